"""A file that has lost what its audit log contains does not pass, and an honest one does, also in use."""

import sqlite3
from contextlib import closing

import pytest
from msgspec.structs import replace

import make
from kubelend.core import audit_log
from kubelend.core.events import AuditLogTruncated
from kubelend.core.lifecycle import Phase
from kubelend.core.models import ReservationId
from kubelend.stores import factory
from kubelend.stores.sqlite import SqliteStore


class AuditedFile:
    """A store file with the reservations of a fleet."""

    def __init__(self, path):
        self.path = path
        self.runner = make.runner(a="cpu=4,memory=8Gi", b="cpu=4,memory=8Gi")
        self._committed = 0

    def commit(self, *more):
        changes = [*self.runner.changes[self._committed :], *more]
        self._committed = len(self.runner.changes)
        with closing(SqliteStore.open(self.path)) as store:
            store.commit(changes, self.runner.ledger.revision)

    def execute(self, statement):
        with closing(sqlite3.connect(self.path)) as connection, connection:
            assert connection.execute(statement).rowcount > 0

    def audit(self):
        return factory.audit_store(str(self.path)).violations


@pytest.fixture
def file(tmp_path):
    made = AuditedFile(tmp_path / "kubelend.db")
    made.runner.reserve("cpu=1", pinned="b")
    made.runner.activate(made.runner.reserve("cpu=1", pinned="a"))
    made.runner.release(made.runner.reserve("cpu=1"))
    made.commit()
    return made


@pytest.mark.parametrize("portion", [1, 2, 1024])
def test_honest_file_passes(file, monkeypatch, portion):
    monkeypatch.setattr(factory, "LINES_PER_READ", portion)
    file.commit()
    assert file.audit() == []
    file.runner.pass_time(2 * make.RETENTION)
    file.runner.expire()
    file.commit()
    assert file.audit() == []


@pytest.mark.parametrize("portion", [1, 1024])
def test_deleted_rows_of_what_is_held_are_missed(file, monkeypatch, portion):
    monkeypatch.setattr(factory, "LINES_PER_READ", portion)
    file.execute("DELETE FROM reservations WHERE phase = 'Reserved'")
    assert file.audit() == [
        "rsv-1: it is Reserved on b in the audit log, but is missing in the store"
    ]
    file.execute("DELETE FROM reservations")
    assert file.audit() == [
        "rsv-1: it is Reserved on b in the audit log, but is missing in the store",
        "rsv-2: it is Active on a in the audit log, but is missing in the store",
    ]


def test_changed_row_with_a_right_checksum_is_found(file):
    found = file.runner[ReservationId("rsv-1")]
    over = replace(found, phase=Phase.RELEASED, finished_at=file.runner.now)
    file.commit(over)
    assert file.audit() == [
        "rsv-1: it is Reserved on b in the audit log, but is Released on b in the store"
    ]


def test_file_whose_lines_went_with_the_rows_does_not_pass(file):
    file.execute("DELETE FROM reservations")
    file.execute("DELETE FROM audit_log")
    assert file.audit() == ["lines of the audit log are missing: see `kubelend audit verify`"]


def test_audit_log_that_was_truncated_still_shows_the_rest(file):
    with closing(SqliteStore.open_readonly(file.path)) as store:
        last = store.audit_lines(0, 100)[-1]
    file.runner.pass_time(make.MINUTE)
    file.runner.renew(ReservationId("rsv-1"), 2 * make.HOUR)
    file.commit(
        AuditLogTruncated(last.number),
        audit_log.truncation_entry(last, file.runner.now, file.runner.now),
    )
    assert file.audit() == []
    file.execute("DELETE FROM reservations WHERE phase IN ('Reserved', 'Active')")
    assert file.audit() == ["rsv-1: it is present in the audit log, but is missing in the store"]


class Busy(SqliteStore):
    """A file in which a broker goes on while it is read: just before the records, or just after."""

    file: AuditedFile

    def load(self):
        self.file.runner.reserve("cpu=1")
        self.file.commit()
        records = super().load()
        self.file.runner.release(ReservationId("rsv-1"))
        self.file.runner.activate(self.file.runner.reserve("cpu=1"))
        self.file.commit()
        return records


def test_file_that_changes_while_it_is_read_passes(file, monkeypatch):
    monkeypatch.setattr(Busy, "file", file, raising=False)
    monkeypatch.setattr(factory, "open_readonly", lambda url: Busy.open_readonly(file.path))
    assert file.audit() == []
    monkeypatch.undo()
    assert file.audit() == []


@pytest.mark.parametrize(
    "url, expected",
    [("a.db", False), ("sqlite:///a.db", False), ("kubernetes:", True), ("memory:", False)],
)
def test_only_objects_can_be_given_back_by_deleting_them(url, expected):
    assert factory.is_kubernetes_url(url) is expected
