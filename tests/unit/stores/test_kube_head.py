"""What the head of a Kubernetes store says, and how much of it goes into one object."""

import msgspec
import pytest
from msgspec.structs import replace

from kubelend.core.audit_log import CHAIN_START, AuditLine, ChainHead
from kubelend.stores.batch import CorruptRecord
from kubelend.stores.kubernetes import audit_log, head
from kubelend.stores.kubernetes.head import (
    AuditPosition,
    ChainedLine,
    CommitChanges,
    HeadState,
    RecordWrite,
)


def write(number, size=10):
    text = b'{"a": "' + b"x" * size + b'"}'
    return RecordWrite("cluster", f"c{number}", msgspec.Raw(text))


def chained(number, size=10):
    return ChainedLine.of(
        AuditLine(number, b'{"n":  ' + b"1" * size + b"}", bytes([number % 256] * 32))
    )


STATE = HeadState(
    epoch=3,
    sequence=7,
    revision=2**53 + 1,
    end=AuditPosition.of(ChainHead(2, b"\1" * 32)),
    lines=(chained(1), chained(2)),
    changes=CommitChanges((write(1), RecordWrite("token", "t"))),
)


def test_state_is_read_as_it_was_written():
    found = head.head_object(STATE, "ns", "5")
    assert head.state_from_object(found) == STATE
    assert (found.metadata.name, found.metadata.namespace) == ("head", "ns")
    assert (found.metadata.resource_version, found.contents, found.record.revision) == (
        "5",
        "head",
        7,
    )


def test_texts_of_records_and_lines_keep_every_byte():
    read = head.state_from_object(head.head_object(STATE, "ns"))
    assert read.changes.writes[0].text == STATE.changes.writes[0].text
    assert read.changes.writes[1].text == b""
    assert read.lines[0].line == chained(1).line


def test_new_audit_log_begins_at_the_start():
    assert (HeadState().start.head, HeadState().end.head) == (CHAIN_START, CHAIN_START)


@pytest.mark.parametrize(
    "kept", [{"data": "{}"}, {"checksum": "1"}, {"data": "no JSON", "checksum": "1"}]
)
def test_head_that_somebody_has_edited_is_refused(kept):
    found = head.head_object(STATE, "ns")
    edited = replace(found, record=replace(found.record, **kept))
    with pytest.raises(CorruptRecord, match="ns/head"):
        head.state_from_object(edited)


def test_small_commit_is_in_the_head_alone():
    assert head.split_oversized(STATE, "ns", "5") == (STATE, [])


def test_commit_that_is_too_large_is_put_into_objects_that_the_head_names():
    changes = CommitChanges(
        tuple(write(number, 100_000) for number in range(20)),
        tuple(chained(number, 300_000) for number in range(1, 6)),
    )
    state, parts = head.split_oversized(replace(STATE, changes=changes), "ns", "5")
    assert state.elsewhere == tuple(f"pending-5-{number}" for number in range(len(parts)))
    assert state.changes == CommitChanges()
    assert head.changes_from_parts(parts) == changes
    for part in parts:
        assert len(msgspec.json.encode(part)) < 1_000_000


def test_quotes_count_twice_because_they_are_written_so():
    text = b'"' + b'\\"' * 300_000 + b'"'
    state = replace(STATE, changes=CommitChanges((RecordWrite("cluster", "a", msgspec.Raw(text)),)))
    assert head.split_oversized(state, "ns", "5").parts


def test_lines_wait_in_the_head_until_they_are_many():
    few = tuple(chained(number) for number in range(1, 6))
    assert audit_log.split_log_tail(HeadState(), few) == (few, ())
    many = tuple(chained(number, 1000) for number in range(1, 60))
    assert audit_log.split_log_tail(HeadState(lines=few), many) == ((), few + many)
