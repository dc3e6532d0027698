"""A refusal that is repeated is told in full a few times, and counted after that: none is lost."""

import pytest
from msgspec.structs import replace

import make
from kubelend.broker.audit_log import (
    MAX_FULL_ENTRIES,
    MAX_FULL_UNAUTHENTICATED,
    MAX_UNAUTHENTICATED_KINDS,
    THROTTLE_WINDOW,
    AuditThrottle,
)
from kubelend.core.audit_log import Actor, AuditEntry

REFUSED = AuditEntry(
    make.T0,
    Actor("mallory", "cluster", "192.0.2.9"),
    "reserve",
    "",
    code="RateLimited",
    message="m",
)
OVER = make.T0 + THROTTLE_WINDOW


@pytest.fixture
def floods():
    return AuditThrottle()


def stranger(remote, name=""):
    return replace(REFUSED, actor=Actor(name, "applicant", remote))


def counted(summaries):
    return sum(int(found.message.partition(" more within")[0]) for found in summaries)


def test_first_ones_are_told_and_the_rest_is_counted(floods):
    assert [floods.admit(REFUSED) for _ in range(MAX_FULL_ENTRIES + 3)] == [
        True
    ] * MAX_FULL_ENTRIES + [False] * 3
    assert floods.due_summaries(make.T0) == []
    (summary,) = floods.due_summaries(OVER)
    assert summary.message == "3 more within 60 s, the last: m"
    assert (summary.at, summary.actor, summary.code) == (OVER, REFUSED.actor, "RateLimited")


def test_window_that_was_not_full_leaves_nothing_to_tell_and_a_new_one_begins(floods):
    assert floods.admit(REFUSED)
    assert floods.due_summaries(OVER) == []
    later = replace(REFUSED, at=OVER)
    assert all(floods.admit(later) for _ in range(MAX_FULL_ENTRIES))
    assert not floods.admit(later)


def test_others_are_not_silenced_by_a_flood(floods):
    for _ in range(MAX_FULL_ENTRIES + 1):
        floods.admit(REFUSED)
    assert floods.admit(replace(REFUSED, actor=Actor("berlin", "cluster")))
    assert floods.admit(replace(REFUSED, code="Forbidden"))
    assert floods.admit(replace(REFUSED, action="renew"))


def test_one_caller_at_many_addresses_is_one(floods):
    many = [replace(REFUSED, actor=Actor("mallory", "cluster", f"192.0.2.{n}")) for n in range(50)]
    assert sum(floods.admit(entry) for entry in many) == MAX_FULL_ENTRIES


def test_strangers_of_any_number_leave_few_lines_and_none_is_uncounted(floods):
    """Whoever has a network of IPv6 has more addresses than there are lines; and names cost nothing."""
    tries = 20_000
    addresses = [f"2001:db8:{n >> 8:x}:{n & 255:x}::{n}" for n in range(tries)]
    told = sum(floods.admit(stranger(remote, f"n-{remote}")) for remote in addresses)
    summaries = floods.due_summaries(OVER)
    assert told <= MAX_FULL_UNAUTHENTICATED
    assert len(summaries) <= MAX_UNAUTHENTICATED_KINDS + 1
    assert told + counted(summaries) == tries


def test_neighbours_count_as_one(floods):
    entries = [stranger(f"2001:db8::{n:x}") for n in range(50)]
    assert sum(floods.admit(entry) for entry in entries) == MAX_FULL_ENTRIES


def test_flood_of_strangers_does_not_silence_who_has_a_certificate(floods):
    for number in range(20_000):
        floods.admit(stranger(f"2001:db8:{number >> 8:x}:{number & 255:x}::1"))
    assert floods.admit(REFUSED)


def test_at_the_end_all_is_told_that_was_only_counted(floods):
    for _ in range(MAX_FULL_ENTRIES + 5):
        floods.admit(REFUSED)
        floods.admit(stranger("192.0.2.1"))
    assert counted(floods.all_summaries(make.T0)) == 10
    assert floods.all_summaries(make.T0) == []
