"""`kubelend audit` finds what was changed in a store without the broker, and changes nothing itself."""

import hashlib
import json
import sqlite3
from contextlib import closing
from datetime import timedelta

import pytest
from msgspec.structs import replace

import make
from kubelend.cli import audit
from kubelend.core import audit_log, commands
from kubelend.core.audit_log import Actor, AuditEntry
from kubelend.core.events import AuditLogTruncated
from kubelend.core.ledger import Ledger
from kubelend.core.models import Advertisement, ClusterId, Request, ReservationId
from kubelend.core.resources import Resources
from kubelend.stores import factory
from kubelend.wire.admin_bodies import Actor as ActorBody
from kubelend.wire.admin_bodies import AuditLine

HOUR = timedelta(hours=1)


def execute(path, statement):
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(statement)


# -- audit check


def amounts(cpu):
    return Resources(cpu=cpu * 1000, memory=cpu << 30)


def advertise(ledger, name, allocated):
    found = Advertisement(ClusterId(name), amounts(8), amounts(8), amounts(allocated), make.T0)
    return commands.advertise(ledger, found, HOUR, make.T0)


@pytest.fixture
def store(tmp_path):
    """Two clusters; the first lends 4 of its 8 CPU and then uses 6 itself."""
    ledger = Ledger()
    request = Request(ClusterId("b"), amounts(4), HOUR)
    steps = [
        advertise(ledger, "a", 0),
        advertise(ledger, "b", 8),
        commands.reserve(
            ledger, request, ReservationId("rsv-b-1"), commands.WaitLimits(10), make.T0
        ),
        advertise(ledger, "a", 6),
    ]
    changes = [
        change for step in steps for change in commands.run_command(ledger, step, make.T0)[1]
    ]
    with closing(factory.open_store(str(tmp_path / "kubelend.db"))) as opened:
        opened.commit(changes, ledger.revision)
    return tmp_path / "kubelend.db"


@pytest.fixture
def check(kubelend):
    """Runs both outputs of the check; returns exit code, text and report."""

    def run(path):
        code, out, err = kubelend(f"audit check --store {path}")
        again, report, _ = kubelend(f"audit check --store {path} --json")
        assert (again, err) == (code, "")
        return code, out, json.loads(report)

    return run


def test_a_consistent_store_passes_also_while_it_is_used(store, check):
    before = hashlib.sha256(store.read_bytes()).hexdigest()
    code, out, report = check(store)
    assert code == 0
    assert out.startswith("No violations: 2 clusters, 1 reservation (1 live), revision ")
    assert "Overcommitted by their own pods, no violation: a" in out
    assert report.pop("revision") > 0
    counts = {"violations": 0, "clusters": 2, "reservations": 1, "live": 1}
    assert report == {**counts, "overcommitted": ["a"], "details": [], "gone": []}
    assert hashlib.sha256(store.read_bytes()).hexdigest() == before
    with closing(factory.open_store(str(store))):
        assert check(store)[0] == 0


def test_a_violated_invariant_is_exit_code_8(store, check):
    """A cluster that lends to itself is what no broker would write."""
    with closing(factory.open_store(str(store))) as opened:
        records = opened.load()
        (found,) = records.reservations
        revision = records.revision + 1
        opened.commit([replace(found, target=found.requester, revision=revision)], revision)
    code, out, report = check(store)
    assert code == 8
    assert report["violations"] == len(report["details"]) > 0
    assert any("has its requester as provider" in detail for detail in report["details"])
    assert "has its requester as provider" in out


def test_a_missing_reservation_is_exit_code_8(store, check):
    execute(store, "DELETE FROM reservations WHERE phase = 'Reserved'")
    missing = "rsv-b-1: it is Reserved on a in the audit log, but is missing in the store"
    code, out, report = check(store)
    assert (code, report["violations"], report["details"]) == (8, 1, [missing])
    assert out.startswith("1 invariant is violated: 2 clusters, 0 reservations (0 live), revision ")
    assert f"\n{missing}\n" in out


def test_a_file_that_is_no_store_is_one_line(tmp_path, kubelend):
    path = tmp_path / "notes.txt"
    path.write_text("no store" * 1000)
    code, out, err = kubelend(f"audit --store {path}")
    assert code in {2, 7}
    assert (out, err.count("\n")) == ("", 1)


# -- audit verify


def append(path, *names):
    """A line for each name."""
    alice = Actor("alice", "admin", "192.0.2.1")
    entries = [AuditEntry(make.T0, alice, "Cordoned", f"cluster/{name}") for name in names]
    with closing(factory.open_store(str(path))) as opened:
        opened.commit(entries, 1)


@pytest.fixture
def log(tmp_path):
    append(tmp_path / "log.db", *"12345")
    return tmp_path / "log.db"


@pytest.fixture
def verify(kubelend):
    def run(path, flags=""):
        code, out, err = kubelend(f"audit verify --store {path} {flags}")
        assert err == ""
        return code, out

    return run


@pytest.fixture
def head(log, verify):
    return json.loads(verify(log, "--json")[1])["head"]


def test_an_untouched_log_is_intact(log, verify):
    code, out = verify(log)
    assert code == 0
    assert out.startswith("The audit log is intact: 5 lines\nHead: 5:")
    code, out = verify(log, "--json")
    report = json.loads(out)
    assert (code, report.pop("head").partition(":")[0]) == (0, "5")
    assert report == {"breaks": 0, "lines": 5, "first": 1, "last": 5, "details": [], "notes": []}


EDITED = "UPDATE audit_log SET line = replace(line, 'alice', 'bob') WHERE number = 2"
START_MOVED = (
    "UPDATE meta SET value = 3, digest = (SELECT digest FROM audit_log WHERE number = 3)"
    " WHERE key = 'audit log start'"
)


@pytest.mark.parametrize(
    "statement, problem",
    [
        ("DELETE FROM audit_log WHERE number = 3", "line 3 is missing"),
        ("DELETE FROM audit_log WHERE number = 5", "line 5 is missing"),
        (EDITED, "line 2 was modified"),
        ("DELETE FROM audit_log", "lines 1 to 5 are missing"),
        (START_MOVED, "lines up to 3 are missing, and no line records their truncation"),
    ],
    ids=["removed", "truncated", "changed", "emptied", "start moved"],
)
def test_a_changed_or_removed_line_is_exit_code_8(log, verify, statement, problem):
    execute(log, statement)
    code, out = verify(log)
    assert code == 8
    assert out.startswith("The audit log is broken: ")
    assert f"\n{problem}\n" in out


def test_an_anchor_finds_a_log_that_was_rewritten_from_the_start(log, head, tmp_path, verify):
    """Write access to the file allows a new, valid chain; not one that has the old line 5."""
    append(log, "6")
    assert verify(log, f"--anchor {head}")[0] == 0
    append(tmp_path / "forged.db", *"99945")
    code, out = verify(tmp_path / "forged.db", f"--anchor {head}")
    assert code == 8
    assert "line 5 is not the one of the anchor: the audit log was rewritten" in out
    append(tmp_path / "short.db", "1")
    assert "line 5 of the anchor is missing" in verify(tmp_path / "short.db", f"--anchor {head}")[1]


def test_an_anchor_older_than_the_retention_is_a_note_and_no_anchor_an_error(
    log, head, verify, kubelend
):
    append(log, "6")
    with closing(factory.open_store(str(log))) as opened:
        (last,) = opened.audit_lines(5, 1)
        truncation = audit_log.truncation_entry(last, make.T0, make.T0)
        opened.commit([AuditLogTruncated(6), truncation], 1)
    code, out = verify(log, f"--anchor {head}")
    assert code == 0
    assert "line 5 of the anchor is older than the retention" in out
    code, _, err = kubelend(f"audit verify --store {log} --anchor yesterday")
    assert (code, "is no head of an audit log" in err) == (2, True)


# -- audit log


def line(actor, **fields):
    known = {"action": "Cordoned", "subject": "cluster/paris", "digest": ""}
    return AuditLine(number=7, at=make.T0, actor=actor, **known | fields)


def test_lines_show_what_changed():
    certificate = {"serial": "1f", "expires_at": "2027"}
    before = {"phase": "Reserved", "certificate": None}
    after = {"phase": "Released", "certificate": certificate, "resources": {"cpu": 1000}, "uses": 3}
    subject = {"action": "Released", "subject": "reservation/rsv-1"}
    released = line(ActorBody("broker", "broker"), **subject, before=before, after=after)
    assert audit.audit_table([released], None, wide=False) == (
        "LINE  TIME                  ACTOR   ACTION    SUBJECT            CHANGE\n"
        "7     2026-01-01T12:00:00Z  broker  Released  reservation/rsv-1  phase: Reserved -> Released;"
        " certificate: none -> 1f until 2027; resources: 1 CPU / 0 Memory; uses: 3"
    )


def test_wide_lines_show_address_and_proxy():
    proxied = line(ActorBody("paris", "cluster", "192.0.2.1", "edge"))
    assert "192.0.2.1 via edge" in audit.audit_table([proxied], None, wide=True)
    assert "edge" not in audit.audit_table([proxied], None, wide=False)


def test_on_a_terminal_changes_are_wrapped_below_their_line():
    message = "no suitable cluster: " + ", ".join(f"{number} Stale" for number in range(30))
    fields = {"action": "reserve", "subject": "", "code": "NoCapacity", "message": message}
    rejected = line(ActorBody("paris", "cluster"), **fields)
    text = audit.audit_table([rejected, rejected], 80, wide=False)
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("\n      rejected: NoCapacity: no suitable cluster: 0 Stale,") == 2
