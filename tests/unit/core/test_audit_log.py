"""The audit log: the content of its lines, and that no line can be changed, removed or inserted unnoticed."""

from datetime import timedelta

import pytest
from msgspec.structs import replace

import make
from kubelend.core import audit_log, commands
from kubelend.core.audit_log import CHAIN_START, Actor, AuditEntry, AuditLine, ChainHead
from kubelend.core.events import Nominated, RetentionExpired
from kubelend.core.lifecycle import Role
from kubelend.core.members import Certificate, Member, MembershipStatus, Token, TokenId
from kubelend.core.models import Cluster, ClusterId, Limits

ALICE = Actor("alice", "admin", "192.0.2.1")


def entry(number):
    return AuditEntry(make.T0, ALICE, "Cordoned", f"cluster/{number}")


def chained(count):
    lines = audit_log.chain_entries([entry(number) for number in range(1, count + 1)], CHAIN_START)
    return lines, lines[-1].head


def audit_lines(desk):
    """The audit log of the desk, in order."""
    lines = audit_log.chain_entries(
        [c for c in desk.changes if isinstance(c, AuditEntry)], CHAIN_START
    )
    return [audit_log.decode_line(line) for line in lines]


def test_whole_chain_has_no_breaks():
    lines, end = chained(5)
    assert [line.number for line in lines] == [1, 2, 3, 4, 5]
    assert list(audit_log.verify_chain(lines, CHAIN_START, end)) == []


def test_chain_goes_on_where_it_stood():
    first, middle = chained(2)
    rest = audit_log.chain_entries([entry(3)], middle)
    assert list(audit_log.verify_chain([*first, *rest], CHAIN_START, rest[-1].head)) == []


@pytest.mark.parametrize(
    "spoil, expected",
    [
        (lambda lines: lines[:2] + lines[3:], ["line 3 is missing"]),
        (lambda lines: lines[3:], ["lines 1 to 3 are missing"]),
        (lambda lines: lines[:3], ["lines 4 to 5 are missing"]),
        (
            lambda lines: [*lines[:2], lines[2]._replace(text=b"{}"), *lines[3:]],
            ["line 3 was modified"],
        ),
        (
            lambda lines: [*lines[:2], AuditLine(3, b"{}", bytes(32)), *lines[3:]],
            ["line 3 was modified", "line 4 was modified"],
        ),
        (
            lambda lines: [*lines, *audit_log.chain_entries([entry(6)], lines[-1].head)],
            ["the audit log ends with line 6, which is not the recorded line 5"],
        ),
    ],
    ids=["one gone", "first gone", "last gone", "changed", "exchanged", "inserted"],
)
def test_every_change_of_the_lines_breaks_the_chain(spoil, expected):
    lines, end = chained(5)
    assert list(audit_log.verify_chain(spoil(lines), CHAIN_START, end)) == expected


def test_line_that_is_chained_anew_breaks_the_next_one():
    """Whoever changes a line and its digest has to change all that follow, and where it ends."""
    lines, end = chained(3)
    (forged,) = audit_log.chain_entries(
        [AuditEntry(make.T0, ALICE, "Uncordoned", "cluster/2")], lines[0].head
    )
    assert list(audit_log.verify_chain([lines[0], forged, lines[2]], CHAIN_START, end)) == [
        "line 3 was modified"
    ]
    anew = audit_log.chain_entries([entry(3)], forged.head)
    assert list(audit_log.verify_chain([lines[0], forged, *anew], CHAIN_START, end)) == [
        "the audit log ends with line 3, which is not the recorded line 3"
    ]


def truncated(count, last):
    """An audit log that the broker has truncated."""
    lines, end = chained(count)
    kept = lines[last:]
    added = audit_log.chain_entries(
        [audit_log.truncation_entry(lines[last - 1], make.T0, make.T0)], end
    )
    return [*kept, *added], lines[last - 1].head, added[-1].head


def test_truncated_lines_are_not_missing():
    lines, start, end = truncated(5, 3)
    assert list(audit_log.verify_chain(lines, start, end)) == []


def test_truncation_without_its_entry_is_found():
    """Whoever takes lines out at the front can write where the chain stood, but not the line about it."""
    lines, end = chained(5)
    assert list(audit_log.verify_chain(lines[3:], lines[2].head, end)) == [
        "lines up to 3 are missing, and no line records their truncation"
    ]


def test_entry_of_a_truncation_at_another_line_does_not_count():
    lines, _, end = truncated(5, 3)
    assert list(audit_log.verify_chain(lines[1:], lines[0].head, end)) == [
        "lines up to 4 are missing, and no line records their truncation"
    ]


def test_line_has_actor_action_before_and_after():
    desk = make.Desk()
    desk.advertise("a", region="eu")
    held = desk.reserve("cpu=1,memory=1Gi")
    desk.release(held)
    seen, made, released = audit_lines(desk)
    assert (seen.action, seen.subject, seen.actor.name) == ("Advertised", "cluster/a", "broker")
    assert made.before == {}
    assert made.after["phase"] == "Reserved"
    assert made.after["target"] == "a"
    assert made.after["resources"] == {"cpu": 1000, "memory": 1 << 30}
    assert released.before == {"phase": "Reserved", "reason": "Locked"}
    assert released.after == {"phase": "Released", "reason": "ReleasedByRequester"}


def test_advertisement_with_new_amounts_only_is_not_audited():
    desk = make.Desk()
    desk.advertise("a", "cpu=4,memory=8Gi")
    desk.pass_time(timedelta(seconds=30))
    desk.advertise("a", "cpu=2,memory=4Gi")
    assert [line.action for line in audit_lines(desk)] == ["Advertised"]
    desk.advertise("a", "cpu=2,memory=4Gi", region="eu")
    assert audit_lines(desk)[-1].after == {"labels": {"topology.kubernetes.io/region": "eu"}}


@pytest.mark.parametrize("event", [Nominated, RetentionExpired])
def test_housekeeping_is_not_audited(event):
    found = make.reservation("rsv-1")
    made = event(make.T0, found.id, None) if event is Nominated else event(make.T0, found.id)
    assert commands.audit_entry(ALICE, made, found, found) is None


def test_digest_of_a_token_is_in_no_line():
    token = Token(TokenId("abc"), "d1ge57", Role.CLUSTER, make.T0, "alice", make.T0)
    member = Member(Role.CLUSTER, "a", MembershipStatus.PENDING, make.T0, asks="sha256:ab")
    lines = audit_log.chain_entries(
        [
            AuditEntry(make.T0, ALICE, "TokenCreated", "token/abc", None, token),
            AuditEntry(make.T0, ALICE, "JoinRequested", "member/cluster/a", None, member),
        ],
        CHAIN_START,
    )
    text = b"".join(line.text for line in lines)
    assert b"d1ge57" not in text
    assert b"usesLeft" in text


def test_removal_is_reported_with_the_key_and_when_it_is_forgotten():
    until = make.T0 + make.HOUR
    member = Member(
        Role.CLUSTER, "a", MembershipStatus.REVOKED, make.T0, key="sha256:ab", forget_at=until
    )
    facts = audit_log.audited_fields(member)
    assert (facts["key"], facts["forgetAt"]) == ("sha256:ab", until)


@pytest.mark.parametrize(
    "record, names",
    [
        pytest.param(
            make.reservation(target="a", expires_at=make.T0, acknowledged_at=make.T0),
            "phase reason requester resources target expiresAt acknowledgedAt",
            id="reservation",
        ),
        pytest.param(
            make.cluster(
                cordon="why", region="eu", prices=make.price_list(cpu="1"), policy=make.policy()
            ),
            "cordon labels prices policy",
            id="cluster",
        ),
        pytest.param(
            Cluster(replace(make.advertisement(), endpoint="https://a"), make.T0, make.T0),
            "endpoint",
            id="cluster that can be reached",
        ),
        pytest.param(
            Member(
                *(
                    Role.CLUSTER,
                    "a",
                    MembershipStatus.REVOKED,
                    make.T0,
                    "old",
                    "new",
                    TokenId("abc"),
                ),
                certificate=Certificate("1", make.T0, make.T0, "ca"),
                revoked_at=make.T0,
                reason="why",
                forget_at=make.T0,
            ),
            "standing key asks reason certificate revokedAt forgetAt token",
            id="member",
        ),
        pytest.param(
            Token(TokenId("abc"), "d1ge57", Role.CLUSTER, make.T0, "alice", make.T0, name="a"),
            "role name usesLeft expiresAt",
            id="token",
        ),
        pytest.param(
            Limits(ClusterId("a"), make.policy(), make.quota()), "policy quota", id="limits"
        ),
    ],
)
def test_line_tells_what_was_decided_of_each_kind(record, names):
    assert list(audit_log.audited_fields(record)) == names.split()


def test_start_is_before_the_first_line():
    assert ChainHead(0, bytes(32)) == CHAIN_START
    assert list(audit_log.verify_chain([], CHAIN_START, CHAIN_START)) == []
