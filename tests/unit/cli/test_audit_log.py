"""`kubelend audit verify` finds what was changed in a store behind the broker's back."""

import json
import sqlite3
from contextlib import closing

import pytest

import make
from kubelend.cli import audit, main
from kubelend.core import audit_log
from kubelend.core.audit_log import Actor, AuditEntry
from kubelend.core.events import AuditLogTruncated
from kubelend.stores import factory
from kubelend.wire.admin_bodies import Actor as ActorBody
from kubelend.wire.admin_bodies import AuditLine


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "kubelend.db"
    tell(path, *"12345")
    return path


def tell(path, *names):
    with closing(factory.open_store(str(path))) as store:
        alice = Actor("alice", "admin", "192.0.2.1")
        store.commit(
            [AuditEntry(make.T0, alice, "Cordoned", f"cluster/{name}") for name in names], 1
        )


def spoil(path, statement):
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(statement)


def verify(capsys, path, *flags):
    code = main.run(["audit", "verify", "--store", str(path), *flags])
    out, err = capsys.readouterr()
    assert err == ""
    return code, out


def test_journal_that_nobody_touched_is_whole(path, capsys):
    code, out = verify(capsys, path)
    assert code == 0
    assert out.startswith("The audit log is intact: 5 lines\nHead: 5:")


@pytest.mark.parametrize(
    "statement, expected",
    [
        ("DELETE FROM journal WHERE number = 3", "line 3 is missing"),
        ("DELETE FROM journal WHERE number = 5", "line 5 is missing"),
        (
            "UPDATE journal SET line = replace(line, 'alice', 'bob') WHERE number = 2",
            "line 2 was modified",
        ),
        ("DELETE FROM journal", "lines 1 to 5 are missing"),
        (
            "UPDATE meta SET value = 3, digest = (SELECT digest FROM journal WHERE number = 3)"
            " WHERE key = 'journal start'",
            "lines up to 3 are missing, and no line records their truncation",
        ),
    ],
    ids=["taken out", "cut off", "changed", "emptied", "beginning moved"],
)
def test_line_that_was_changed_or_taken_out_is_found_and_is_exit_code_8(
    path, capsys, statement, expected
):
    spoil(path, statement)
    code, out = verify(capsys, path)
    assert code == 8
    assert f"\n{expected}\n" in out


def test_verdict_for_programs_has_fixed_keys(path, capsys):
    code, out = verify(capsys, path, "--json")
    verdict = json.loads(out)
    assert (code, verdict.pop("head").partition(":")[0]) == (0, "5")
    assert verdict == {"breaks": 0, "lines": 5, "first": 1, "last": 5, "details": [], "notes": []}


def test_anchor_finds_a_journal_that_was_written_anew_from_the_start(path, tmp_path, capsys):
    """Whoever can write the file can make a new, whole chain; not one that has the old line 5."""
    head = json.loads(verify(capsys, path, "--json")[1])["head"]
    tell(path, "6")
    assert verify(capsys, path, "--anchor", head)[0] == 0
    forged = tmp_path / "forged.db"
    tell(forged, *"99945")
    code, out = verify(capsys, forged, "--anchor", head)
    assert code == 8
    assert "line 5 is not the one of the anchor: the audit log was rewritten" in out
    short = tmp_path / "short.db"
    tell(short, "1")
    assert "line 5 of the anchor is missing" in verify(capsys, short, "--anchor", head)[1]


def test_anchor_older_than_what_is_kept_is_a_note(path, capsys):
    head = json.loads(verify(capsys, path, "--json")[1])["head"]
    with closing(factory.open_store(str(path))) as store:
        tell_more = AuditEntry(make.T0, Actor("alice", "admin"), "Cordoned", "cluster/6")
        store.commit([tell_more], 1)
        (last,) = store.audit_lines(5, 1)
        store.commit([AuditLogTruncated(6), audit_log.truncation_entry(last, make.T0, make.T0)], 1)
    code, out = verify(capsys, path, "--anchor", head)
    assert code == 0
    assert "line 5 of the anchor is older than the retention" in out


def test_anchor_that_is_none_is_refused(path, capsys):
    assert main.run(["audit", "verify", "--store", str(path), "--anchor", "yesterday"]) == 2
    assert "is no head of an audit log" in capsys.readouterr().err


def test_table_shows_what_changed_for_people():
    line = AuditLine(
        number=7,
        at=make.T0,
        actor=ActorBody("broker", "broker"),
        action="Released",
        subject="reservation/rsv-1",
        digest="",
        before={"phase": "Reserved"},
        after={"phase": "Released", "resources": {"cpu": 1000}},
    )
    heading, row = audit.audit_table([line], wide=False).splitlines()
    assert heading.split() == ["LINE", "TIME", "ACTOR", "ACTION", "SUBJECT", "CHANGE"]
    assert row.split(maxsplit=5) == [
        "7",
        "2026-01-01T12:00:00Z",
        "broker",
        "Released",
        "reservation/rsv-1",
        "phase: Reserved -> Released; resources: 1 CPU / 0 Memory",
    ]


def test_wide_table_shows_from_where_and_through_which_proxy():
    actor = ActorBody("paris", "cluster", "192.0.2.1", "edge")
    line = AuditLine(7, make.T0, actor, "Cordoned", "cluster/paris", "")
    assert "192.0.2.1 via edge" in audit.audit_table([line], wide=True)
    assert "edge" not in audit.audit_table([line], wide=False)


def test_on_a_terminal_nothing_but_a_name_passes_its_edge():
    line = AuditLine(
        number=7,
        at=make.T0,
        actor=ActorBody("paris", "cluster"),
        action="reserve",
        subject="",
        digest="",
        code="NoCapacity",
        message="no suitable cluster: " + ", ".join(f"{number} Stale" for number in range(30)),
    )
    text = audit.audit_table([line, line], wide=False, width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("rejected: NoCapacity") == 2
