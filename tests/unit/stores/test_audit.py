"""A file that has lost what its audit log contains does not pass, and an honest one does, also in use."""

import sqlite3
from contextlib import closing

import pytest

import make
from kubelend.core import audit_log
from kubelend.core.audit import DELETED_ACTION
from kubelend.core.audit_log import BROKER_ACTOR, AuditEntry
from kubelend.core.events import AuditLogTruncated
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
def test_honest_file_passes_and_deleted_rows_of_what_is_held_are_missed(file, monkeypatch, portion):
    monkeypatch.setattr(factory, "LINES_PER_READ", portion)
    file.commit()
    assert file.audit() == []
    for phase, missed in (("Reserved", LOST[:1]), ("Active", LOST)):
        file.execute(f"DELETE FROM reservations WHERE phase = '{phase}'")
        assert file.audit() == missed
    file.runner.pass_time(2 * make.RETENTION)
    file.runner.expire()
    file.commit()
    assert file.audit() == []


LOST = [
    "rsv-1: it is Reserved on b in the audit log, but is missing in the store",
    "rsv-2: it is Active on a in the audit log, but is missing in the store",
]


def test_file_whose_lines_went_with_the_rows_does_not_pass(file):
    for table in ("reservations", "audit_log"):
        file.execute(f"DELETE FROM {table}")
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


def test_recorded_deletion_of_a_reservation_is_no_loss(file):
    file.execute("DELETE FROM reservations WHERE phase IN ('Reserved', 'Active')")
    assert len(file.audit()) == 2
    subjects = ("reservation/rsv-1", "reservation/rsv-2")
    file.commit(*(AuditEntry(make.T0, BROKER_ACTOR, DELETED_ACTION, one) for one in subjects))
    assert file.audit() == []


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
