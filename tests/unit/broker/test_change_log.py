"""The log of the broker: one line for each decision and each change of state, and none for anything else."""

from datetime import timedelta
from typing import Any

import pytest
from structlog.testing import capture_logs

import make
from kubelend.broker import change_log
from kubelend.broker.metrics import BrokerMetrics
from kubelend.broker.service import Broker, BrokerRules, LimitService
from kubelend.broker.writer import CURRENT_ACTOR
from kubelend.core import audit_log, enrolment, events
from kubelend.core.audit_log import Actor, AuditEntry
from kubelend.core.commands import WaitLimits
from kubelend.core.enrolment import Applicant, JoinPolicy
from kubelend.core.errors import Conflict, KeyReused, NoCapacity, QueueFull, QuotaExceeded
from kubelend.core.lending import LendingPolicy
from kubelend.core.lifecycle import Reason, Role
from kubelend.core.members import Certificate, Token, TokenId
from kubelend.core.models import ClusterId, Quota, ReservationId

A, B, R = ClusterId("a"), ClusterId("b"), ClusterId("r")
ALICE = Actor("alice", "admin")
OFFER = "cpu=4,memory=8Gi"
HOUSEKEEPING = {events.Nominated, events.RetentionExpired}
"""No right or share of anybody changes by these, so they have no audit entry."""


@pytest.fixture
async def broker(store, clock):
    rules = BrokerRules(
        stale_after=make.STALE_AFTER, waiting=WaitLimits(1), lost_after=timedelta(minutes=5)
    )
    made = Broker(lambda: store, clock, rules, BrokerMetrics())
    await made.load()
    await made.advertise(make.advertisement("a", OFFER))
    yield made
    await made.close()


@pytest.fixture
def alice():
    token = CURRENT_ACTOR.set(ALICE)
    yield
    CURRENT_ACTOR.reset(token)


@pytest.fixture
def logs(broker):
    with capture_logs() as captured:
        yield captured


def texts(logs):
    return [line["event"] for line in logs]


def leaves(kind):
    below = kind.__subclasses__()
    return {kind} if not below else {leaf for one in below for leaf in leaves(one)}


def test_every_audited_event_has_a_text():
    audited = leaves(events.Event) - HOUSEKEEPING
    assert {kind.__name__ for kind in audited} | {audit_log.TRUNCATED_ACTION} == set(
        change_log.LINES
    )


async def test_a_placed_reservation_is_logged_with_its_keys(broker, logs):
    found = await broker.reserve(make.request("cpu=1,memory=1Gi"))
    (line,) = logs
    assert line == {
        "event": "Reservation placed",
        "log_level": "info",
        "reservation": found.id,
        "requester": found.requester,
        "cluster": "a",
        "cpu": "1",
        "memory": "1Gi",
        "expires_at": found.expires_at.isoformat(),
        "actor": "broker",
    }


async def test_nothing_is_logged_before_it_is_durable(broker, store, logs):
    store.broken = OSError("full")
    with pytest.raises(Exception, match="full"):
        await broker.reserve(make.request())
    assert "Reservation placed" not in texts(logs)


async def test_transitions_of_a_reservation_are_logged_once(broker, clock, logs):
    found = await broker.reserve(make.request(key="k"))
    await broker.reserve(make.request(key="k"))
    await broker.acknowledge(found.id, A)
    await broker.activate(found.id)
    clock.pass_time(make.MINUTE)
    await broker.renew(found.id, None)
    for _ in range(2):
        await broker.release(found.id, Reason.BY_REQUESTER)
    steps = ["placed", "acknowledged", "activated", "renewed", "released"]
    assert texts(logs) == [f"Reservation {step}" for step in steps]
    assert {line["log_level"] for line in logs} == {"info"}
    assert logs[-1]["reason"] == "ReleasedByRequester"


async def test_a_queued_request_is_logged_and_then_its_placement_or_its_end(broker, clock, logs):
    first = await broker.reserve(make.request("cpu=4,memory=1Gi"))
    await broker.reserve(make.request("cpu=1,memory=1Gi", wait=make.HOUR))
    await broker.release(first.id, Reason.BY_REQUESTER)
    await broker.reserve(make.request("cpu=9,memory=1Gi", wait=make.MINUTE))
    clock.pass_time(make.HOUR * 2)
    await broker.expire()
    steps = ["placed", "queued", "released", "placed", "queued", "failed", "expired"]
    assert texts(logs) == [f"Reservation {step}" for step in steps]
    assert logs[-2]["reason"] == "WaitTimedOut"


async def test_a_rejected_request_is_logged_once_with_the_histogram(broker, logs):
    """A resource of any name does not replace a key."""
    with pytest.raises(NoCapacity):
        await broker.reserve(make.request("cpu=9,memory=1Gi,event=1,actor=1"))
    (line,) = logs
    assert (line["event"], line["log_level"]) == ("Reservation rejected", "info")
    assert (line["reason"], line["clusters"]) == ("NoCapacity", 1)
    assert line["rejections"] == {"InsufficientCPU": 1}
    assert (line["cpu"], line["memory"]) == ("9", "1Gi")
    assert line["extended"] == {"event": "1", "actor": "1"}


@pytest.mark.parametrize("kind", [QueueFull, KeyReused, Conflict], ids=lambda kind: kind.__name__)
async def test_every_other_rejection_is_logged_once(broker, logs, kind):
    first = make.request("cpu=9,memory=1Gi", wait=make.HOUR, key="k")
    await broker.reserve(first, ReservationId("one"))
    again = {
        QueueFull: (make.request("cpu=9,memory=1Gi", wait=make.HOUR), None),
        KeyReused: (make.request("cpu=8,memory=1Gi", key="k"), None),
        Conflict: (make.request(), ReservationId("one")),
    }
    with pytest.raises(kind):
        await broker.reserve(*again[kind])
    assert texts(logs) == ["Reservation queued", "Reservation rejected"]
    assert logs[-1]["reason"] == kind.code
    assert ("error" in logs[-1]) is (kind is not KeyReused)  # its message contains the key


async def test_quota_and_policy_are_logged_when_set_and_deleted(broker, alice, logs):
    limits = LimitService(broker)
    await limits.set_policy(A, LendingPolicy(deny=("x",)))
    await limits.clear_policy(A)
    await limits.set_quota(R, Quota(reservations=0))
    with pytest.raises(QuotaExceeded):
        await broker.reserve(make.request())
    await limits.clear_quota(R)
    changes = ["Policy set", "Policy deleted", "Quota set", "Reservation rejected", "Quota deleted"]
    assert texts(logs) == changes
    assert {line["actor"] for line in logs} == {"admin/alice"}


async def test_changes_of_a_cluster_are_logged(broker, alice, logs):
    await broker.cordon(A, "repair")
    await broker.uncordon(A)
    found = await broker.reserve(make.request())
    await broker.advertise(make.advertisement("b", OFFER))
    await broker.drain(A, "repair")
    await broker.remove(A)
    assert texts(logs) == [
        *("Cluster cordoned", "Cluster uncordoned", "Reservation placed", "Cluster registered"),
        *("Cluster cordoned", "Reservation moved", "Cluster drained", "Cluster removed"),
    ]
    assert (logs[0]["reason"], logs[0]["actor"]) == ("repair", "admin/alice")
    moved, drained = logs[5:7]
    assert (moved["reservation"], moved["previous_cluster"], moved["cluster"]) == (
        found.id,
        "a",
        "b",
    )
    assert drained["reservations"] == 1


async def test_an_advertisement_is_logged_at_info_only_if_it_changes_more_than_amounts(
    broker, logs
):
    await broker.advertise(make.advertisement("a", "cpu=3,memory=8Gi"))
    await broker.advertise(make.advertisement("a", OFFER, labels={"zone": "z"}))
    (line,) = (line for line in logs if line["log_level"] != "debug")
    assert (line["event"], line["cluster"]) == ("Cluster advertisement changed", "a")


async def test_a_failover_is_logged_for_the_provider_and_each_reservation(broker, clock, logs):
    await broker.reserve(make.request())
    for _ in range(120):
        clock.pass_time(timedelta(seconds=9))  # a longer gap would count as a pause of the broker
        await broker.advertise(make.advertisement("c", OFFER))
        await broker.expire()
    assert texts(logs).count("Reservation failed over") == 1
    assert texts(logs).count("Provider unreachable, failing over its reservations") == 1


def answer(_, found):
    return found


CERTIFICATE = Certificate("01", make.T0, make.T0 + make.HOUR, "pin")


def token(name):
    return Token(
        TokenId(name), "digest", Role.CLUSTER, make.T0, "alice", make.T0 + make.HOUR, uses_left=9
    )


async def join(broker, name, key, policy, certificate):
    def command(ledger, now):
        known = ledger.member_index.tokens["t"]
        judged = enrolment.decide_join(
            ledger, Applicant(Role.CLUSTER, name, key), known, policy, now
        )
        return (yield from enrolment.join_member(ledger, judged, certificate, now))

    await broker.change(command, answer)


async def test_tokens_and_members_are_logged(broker, alice, logs):
    role = Role.CLUSTER
    created = token("t"), JoinPolicy()
    await broker.change(lambda led, now: enrolment.create_token(led, *created, now), answer)
    await join(broker, "auto", "k1", JoinPolicy(auto_approve=("*",)), CERTIFICATE)
    await join(broker, "asks", "k2", JoinPolicy(), None)
    await join(broker, "other", "k3", JoinPolicy(), None)
    lost: dict[str, Any] = {"reason": "lost", "by": "alice", "release": False}
    for command in (
        lambda led, now: enrolment.approve_member(led, role, "asks", "", "alice", now),
        lambda led, now: enrolment.deny_join(led, role, "other", now),
        lambda led, now: enrolment.revoke_member(led, role, "asks", **lost, now=now),
        lambda led, now: enrolment.remove_member(led, role, "auto", "alice", now),
        lambda led, now: enrolment.delete_token(led, TokenId("t"), now),
    ):
        await broker.change(command, answer)
    assert [f"{line['event']}: {line.get('cluster')}" for line in logs] == [
        *("Token created: None", "Token used: None", "Member joined: auto"),
        *("Certificate issued: auto", "Token used: None", "Member join requested: asks"),
        *("Token used: None", "Member join requested: other", "Member approved: asks"),
        *("Member denied: other", "Member revoked: asks", "Member removed: auto"),
        "Token deleted: None",
    ]
    assert logs[0]["token_id"] == "t"


async def test_unknown_action_is_logged(broker, logs):
    broker.persist([AuditEntry(make.T0, ALICE, "Invented", "cluster/a")])
    await broker.wait_durable()
    (line,) = logs
    assert (line["event"], line["action"], line["subject"]) == (
        "Ledger changed",
        "Invented",
        "cluster/a",
    )


async def test_audited_rejection_is_not_logged_again(broker, logs):
    broker.append_audit(AuditEntry(make.T0, ALICE, "reserve", "", code="Forbidden", message="no"))
    await broker.wait_durable()
    assert logs == []
