"""`kubelend audit check` looks at a store, says what it found, and changes nothing."""

import hashlib
import json
import sqlite3
from contextlib import closing
from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from kubelend.cli import main
from kubelend.core import commands
from kubelend.core.ledger import Ledger
from kubelend.core.models import Advertisement, ClusterId, Request, ReservationId
from kubelend.core.resources import Resources
from kubelend.stores import factory

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def resources(cpu):
    return Resources(cpu=cpu * 1000, memory=cpu << 30)


def advertisement(name, allocated):
    return Advertisement(ClusterId(name), resources(8), resources(8), resources(allocated), NOW)


def fill(ledger):
    """Two clusters; the first lends 4 of its 8 CPU and then uses 6 itself."""
    changes = []
    hour = timedelta(hours=1)
    steps = [
        commands.advertise(ledger, advertisement("a", 0), hour, NOW),
        commands.advertise(ledger, advertisement("b", 8), hour, NOW),
        commands.reserve(
            ledger, Request(ClusterId("b"), resources(4), hour), ReservationId("rsv-b-1"), 10, NOW
        ),
        commands.advertise(ledger, advertisement("a", 6), hour, NOW),
    ]
    for step in steps:
        changes += commands.run_command(ledger, step, NOW)[1]
    return changes


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "kubelend.db"
    store = factory.open_store(str(path))
    ledger = Ledger()
    store.commit(fill(ledger), ledger.revision)
    store.close()
    return path


def break_promise(path):
    """Write what no broker would: a cluster that lends to itself, and has no end."""
    store = factory.open_store(str(path))
    records = store.load()
    (found,) = records.reservations
    wrong = msgspec.structs.replace(found, target=found.requester, revision=records.revision + 1)
    store.commit([wrong], records.revision + 1)
    store.close()


def audit(capsys, path, *flags):
    code = main.run(["audit", "--store", str(path), *flags])
    out, err = capsys.readouterr()
    assert err == ""
    return code, out


def test_a_store_that_keeps_its_promises_is_well(path, capsys):
    code, out = audit(capsys, path)
    assert code == 0
    assert out.startswith("No violations: 2 clusters, 1 reservation (1 live), revision ")
    assert "Overcommitted by their own pods, no violation: a" in out


def test_the_report_for_programs_has_fixed_keys(path, capsys):
    code, out = audit(capsys, path, "--json")
    report = json.loads(out)
    assert code == 0
    assert report.pop("revision") > 0
    assert report == {
        "violations": 0,
        "clusters": 2,
        "reservations": 1,
        "live": 1,
        "overcommitted": ["a"],
        "details": [],
        "gone": [],
    }


def test_a_broken_promise_is_told_and_is_exit_code_8(path, capsys):
    break_promise(path)
    code, out = audit(capsys, path, "--json")
    report = json.loads(out)
    assert code == 8
    assert report["violations"] == len(report["details"]) > 0
    assert any("has its requester as provider" in detail for detail in report["details"])
    assert "has its requester as provider" in audit(capsys, path)[1]


def test_a_lost_reservation_is_told_and_is_exit_code_8(path, capsys):
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DELETE FROM reservations WHERE phase = 'Reserved'")
    missed = "rsv-b-1: it is Reserved on a in the audit log, but is missing in the store"
    code, out = audit(capsys, path, "--json")
    report = json.loads(out)
    assert (code, report["violations"], report["details"]) == (8, 1, [missed])
    code, out = audit(capsys, path)
    assert code == 8
    assert out.startswith("1 invariant is violated: 2 clusters, 0 reservations (0 live), revision ")
    assert f"\n{missed}\n" in out


def test_looking_changes_nothing(path, capsys):
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    audit(capsys, path)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == before


def test_a_store_in_use_can_be_looked_at(path, capsys):
    store = factory.open_store(str(path))
    try:
        assert audit(capsys, path)[0] == 0
    finally:
        store.close()


def test_a_file_that_is_no_store_is_one_line(tmp_path, capsys):
    path = tmp_path / "notes.txt"
    path.write_text("no store" * 1000)
    code = main.run(["audit", "--store", str(path)])
    out, err = capsys.readouterr()
    assert code in {2, 7}
    assert (out, err.count("\n")) == ("", 1)
