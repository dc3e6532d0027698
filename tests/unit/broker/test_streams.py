"""Instruction streams: what a cluster receives, and which of its agents."""

import asyncio
from contextlib import ExitStack, suppress
from datetime import timedelta

import pytest

import make
from clocks import Clock
from kubelend.broker import streams
from kubelend.broker.agent_sessions import MAX_INSTANCE_LENGTH, RECONNECT_GRACE, AgentSessions
from kubelend.broker.streams import StreamHub, Subscription
from kubelend.core.errors import IdentityInUse
from kubelend.core.events import Archived, ClusterDeleted
from kubelend.core.lifecycle import Phase, Role
from kubelend.core.members import Member, MembershipStatus
from kubelend.core.models import ClusterId, ReservationId
from waiting import PATIENCE

# -- subscriptions


A, B, R = ClusterId("a"), ClusterId("b"), ClusterId("r")


def change(number, revision, *, target="a", left=(), requester="r"):
    return make.reservation(
        f"rsv-{number}",
        make.request(requester=requester),
        phase=Phase.RESERVED,
        target=target,
        left=left,
        revision=revision,
    )


def revisions(news):
    return [found.revision for found in news]


async def test_change_is_sent_to_requester_provider_and_former_providers_only():
    feeds = StreamHub()
    a, again, b, r = (feeds.open(cluster, 0) for cluster in (A, A, B, R))
    feeds.publish([make.cluster("b"), ClusterDeleted(B), Archived(ReservationId("rsv-9"))])
    feeds.publish([change(1, 1)])
    assert await b.read(0.01) == []
    feeds.publish([change(2, 2, left=(B,))])
    assert revisions(await b.read(0.01)) == [2]
    for stream in (a, again, r):
        assert revisions(await stream.read(0.01)) == [1, 2]


async def test_slow_reader_gets_the_latest_state_of_each_in_order_since_it_began():
    feeds = StreamHub()
    a = feeds.open(A, 1)
    feeds.publish([change(4, 1), change(1, 2), change(2, 3), change(1, 4)])
    feeds.publish([change(3, 5), change(2, 6)])
    changes = [(found.id, found.revision) for found in await a.read(1)]
    assert changes == [("rsv-1", 4), ("rsv-3", 5), ("rsv-2", 6)]
    assert await a.read(0.01) == []


async def test_reader_is_woken_by_a_change_and_by_closing_and_can_read_the_rest():
    feeds = StreamHub()
    a = feeds.open(A, 0)
    reading = asyncio.create_task(a.read(60))
    await asyncio.sleep(0)
    feeds.publish([change(1, 1)])
    assert revisions(await reading) == [1]
    feeds.publish([change(1, 2)])
    feeds.close(a)
    assert a.closed
    assert revisions(await a.read(60)) == [2]


async def test_open_streams_are_counted_by_cluster():
    feeds = StreamHub()
    streams = [feeds.open(A, 0), feeds.open(A, 0), feeds.open(R, 0)]
    assert (len(feeds), feeds.count(A), feeds.count(R), feeds.count(B)) == (3, 2, 1, 0)
    feeds.close(streams[0])
    feeds.close(streams[0])
    assert (len(feeds), feeds.count(A)) == (2, 1)
    feeds.close_all()
    assert len(feeds) == 0
    assert all(stream.closed for stream in streams)
    feeds.publish([change(1, 1)])
    assert await streams[1].read(0.01) == []


async def test_streams_of_a_revoked_cluster_or_proxy_end_and_no_others():
    feeds = StreamHub()
    first, second = feeds.open(A, 0), feeds.open(A, 0)
    through, past = feeds.open(B, 0, "edge"), feeds.open(B, 0, "core")
    feeds.publish([Member(Role.VIEWER, "b", MembershipStatus.REVOKED, make.T0)])
    feeds.publish([Member(Role.CLUSTER, "a", MembershipStatus.APPROVED, make.T0)])
    assert len(feeds) == 4
    feeds.publish([Member(Role.CLUSTER, "a", MembershipStatus.REVOKED, make.T0)])
    assert (first.closed, second.closed, through.closed) == (True, True, False)
    feeds.publish([Member(Role.PROXY, "edge", MembershipStatus.REVOKED, make.T0)])
    assert (through.closed, past.closed) == (True, False)
    assert (feeds.count(A), feeds.count(B)) == (0, 1)


async def test_reader_may_be_woken_without_a_change():
    feeds = StreamHub()
    a = feeds.open(A, 0)
    feeds.wake_all()
    assert await asyncio.wait_for(a.read(2 * PATIENCE), PATIENCE) == []
    assert not a.closed


# -- instructions


AMOUNTS = "cpu=500m,memory=256Mi,gpu=2"


def reservation(phase=Phase.RESERVED, *, target="a", left=()):
    return make.reservation(
        "rsv-1", make.request(AMOUNTS, "r"), phase=phase, target=target, left=left, message="Why"
    )


def instructions(cluster, found):
    return [f"{i.side} {i.action}: {i.message}" for i in streams.instructions_for(cluster, found)]


@pytest.mark.parametrize("phase", [Phase.RESERVED, Phase.ACTIVE, Phase.RELEASED, Phase.FAILED])
def test_instructions_of_requester_provider_and_former_provider(phase):
    found, amounts = reservation(phase, left=("b", "c")), "500m CPU / 256Mi Memory / 2 GPU"
    withdraw = f"provider Withdraw: Release {amounts} held for requester r"
    is_over = phase in (Phase.RELEASED, Phase.FAILED)
    use = "requester Stop: Why" if is_over else f"requester Use: Use a for {amounts}"
    hold = withdraw if is_over else f"provider Hold: Hold {amounts} for requester r"
    assert instructions("r", found) == [use]
    assert instructions("a", found) == [hold]
    assert instructions("b", found) == [withdraw]
    assert instructions("stranger", found) == []


# -- agent sessions


BERLIN, PARIS = ClusterId("berlin"), ClusterId("paris")
TIMEOUT = timedelta(seconds=90)


class Sessions:
    """Agent sessions, and a clock to move."""

    def __init__(self):
        self.clock = Clock()
        self.held = AgentSessions(self.clock, TIMEOUT)

    def claim(self, instance, cluster=BERLIN, origin="from 10.0.0.7"):
        self.held.claim(cluster, instance, origin)

    def is_refused(self, instance, cluster=BERLIN):
        try:
            self.claim(instance, cluster)
        except IdentityInUse:
            return True
        return False

    def stream(self, instance, feed=None):
        feed = feed or Subscription(BERLIN, 0)
        return self.held.hold_open(BERLIN, instance, "from 10.0.0.7", feed)


@pytest.fixture
def sessions():
    return Sessions()


def used_twice(sessions):
    sessions.claim("one")
    sessions.clock.pass_time(27 * make.SECOND)
    sessions.claim("one")
    sessions.clock.pass_time(3 * make.SECOND)


def used_for_a_day(sessions):
    sessions.claim("one")
    sessions.clock.pass_time(24 * make.HOUR)
    sessions.claim("one", origin="through envoy")


def used_with_a_clock_set_back(sessions):
    sessions.claim("one")
    sessions.clock.pass_time(-make.HOUR)


def used_for_a_stream(sessions):
    with sessions.stream("one"):
        pass


STOP_IT = "stop it, or issue a separate certificate for this cluster"


@pytest.mark.parametrize(
    "use, since, seen, hint",
    [
        (used_twice, "12:00:00", "from 10.0.0.7, last seen 3 s ago", STOP_IT),
        (used_for_a_day, "2026-01-01 12:00:00", "through envoy, last seen 0 s ago", STOP_IT),
        (used_with_a_clock_set_back, "12:00:00", "from 10.0.0.7, last seen 0 s ago", STOP_IT),
        (
            used_for_a_stream,
            "12:00:00",
            "from 10.0.0.7, last seen 0 s ago",
            "its stream has just ended; try again in a moment",
        ),
    ],
)
def test_second_agent_is_rejected_with_the_active_one_and_a_hint(sessions, use, since, seen, hint):
    use(sessions)
    with pytest.raises(IdentityInUse) as refused:
        sessions.claim("two", origin="from 10.0.0.8")
    assert (
        str(refused.value)
        == f"another agent is active for berlin since {since} UTC ({seen}); {hint}"
    )


def test_session_ends_after_the_timeout_and_each_cluster_has_its_own(sessions):
    sessions.claim("one")
    sessions.claim("two", PARIS)
    assert sessions.is_refused("one", PARIS)
    for share in (TIMEOUT / 2, TIMEOUT / 2 - make.MOMENT):
        sessions.clock.pass_time(share)
        assert sessions.is_refused("two"), "and asking does not help later"
    sessions.clock.pass_time(make.MOMENT)
    sessions.claim("two")
    assert sessions.is_refused("one")


def test_touch_extends_only_the_session_of_the_active_agent(sessions):
    sessions.claim("one")
    sessions.clock.pass_time(TIMEOUT / 2)
    sessions.held.touch(BERLIN, "one")
    sessions.held.touch(BERLIN, "two")
    sessions.held.touch(PARIS, "one")
    sessions.clock.pass_time(TIMEOUT / 2)
    assert sessions.is_refused("two")
    sessions.clock.pass_time(TIMEOUT / 2)
    sessions.held.touch(BERLIN, "two")
    sessions.claim("two")
    sessions.claim("three", PARIS)


def test_session_ends_a_grace_period_after_the_last_stream(sessions):
    """A new certificate closes the old stream first: who comes back within that time stays."""
    with ExitStack() as outer:
        outer.enter_context(sessions.stream("one"))
        with sessions.stream("one"):
            assert sessions.is_refused("two")
        sessions.clock.pass_time(RECONNECT_GRACE)
        assert sessions.is_refused("two"), "the other stream is open"
    sessions.clock.pass_time(RECONNECT_GRACE - make.MOMENT)
    assert sessions.is_refused("two")
    with sessions.stream("one"):
        sessions.clock.pass_time(RECONNECT_GRACE)
        assert sessions.is_refused("two"), "it came back"
    sessions.clock.pass_time(RECONNECT_GRACE)
    sessions.claim("two")
    assert sessions.is_refused("one")


@pytest.mark.parametrize(
    "open_for, wait",
    [
        pytest.param(make.NO_TIME, RECONNECT_GRACE, id="after the grace"),
        pytest.param(TIMEOUT - make.MOMENT, make.MOMENT, id="not longer than the timeout"),
        pytest.param(make.NO_TIME, -make.HOUR, id="when the clock is set back"),
    ],
)
def test_grace_period_ends_after_a_stream_that_failed(sessions, open_for, wait):
    with suppress(ConnectionResetError), sessions.stream("one"):
        sessions.clock.pass_time(open_for)
        raise ConnectionResetError
    assert sessions.is_refused("two")
    sessions.clock.pass_time(wait)
    sessions.claim("two")


def test_request_after_the_last_stream_continues_the_session(sessions):
    with sessions.stream("one"):
        sessions.clock.pass_time(make.MINUTE)
    sessions.claim("one")
    sessions.clock.pass_time(RECONNECT_GRACE)
    with pytest.raises(IdentityInUse, match="since 12:00:00 UTC"):
        sessions.claim("two")


def test_open_stream_does_not_extend_the_session_and_is_closed_with_it(sessions):
    """A host that lost its power closes nothing."""
    old, new, refused = (Subscription(BERLIN, 0) for _ in range(3))
    with sessions.stream("one", old):
        sessions.clock.pass_time(TIMEOUT)
        assert not old.closed
        with sessions.stream("two", new):
            assert (old.closed, new.closed) == (True, False)
            with pytest.raises(IdentityInUse), sessions.stream("one", refused):
                pytest.fail("it has begun")
            assert not refused.closed
        sessions.claim("two")
    assert sessions.is_refused("one"), "the late end of the old stream changes nothing"
    sessions.clock.pass_time(RECONNECT_GRACE)
    assert sessions.is_refused("three")


def test_long_instance_name_is_truncated(sessions):
    sessions.claim("x" * MAX_INSTANCE_LENGTH + "one")
    sessions.clock.pass_time(TIMEOUT / 2)
    sessions.held.touch(BERLIN, "x" * MAX_INSTANCE_LENGTH + "two")
    sessions.clock.pass_time(TIMEOUT / 2)
    assert sessions.is_refused("y")
