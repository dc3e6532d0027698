"""Instruction streams: what a cluster receives, and which of its agents."""

import asyncio
from contextlib import ExitStack, suppress
from datetime import timedelta

import pytest

import make
from clocks import Clock
from kubelend.broker import streams
from kubelend.broker.agent_sessions import MAX_INSTANCE_LENGTH, RECONNECT_GRACE, AgentSessions
from kubelend.broker.streams import InstructionAction, Side, StreamHub, Subscription
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


async def test_slow_reader_gets_the_latest_state_of_each_in_order():
    feeds = StreamHub()
    a = feeds.open(A, 0)
    feeds.publish([change(1, 1), change(2, 2), change(1, 3)])
    feeds.publish([change(3, 4), change(2, 5)])
    assert [(f.id, f.revision) for f in await a.read(1)] == [
        ("rsv-1", 3),
        ("rsv-3", 4),
        ("rsv-2", 5),
    ]
    assert await a.read(0.01) == []


async def test_initial_state_is_not_sent_again():
    feeds = StreamHub()
    a = feeds.open(A, 7)
    feeds.publish([change(1, 6), change(2, 7), change(3, 8)])
    assert revisions(await a.read(1)) == [8]


async def test_reader_is_woken_by_a_change():
    feeds = StreamHub()
    a = feeds.open(A, 0)
    reading = asyncio.create_task(a.read(60))
    await asyncio.sleep(0)
    feeds.publish([change(1, 1)])
    assert revisions(await reading) == [1]


async def test_closing_wakes_the_reader_which_can_read_the_rest():
    feeds = StreamHub()
    a = feeds.open(A, 0)
    feeds.publish([change(1, 1)])
    feeds.close(a)
    assert a.closed
    assert revisions(await a.read(60)) == [1]


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


async def test_streams_of_a_revoked_cluster_end_and_no_others():
    feeds = StreamHub()
    first, second, other = feeds.open(A, 0), feeds.open(A, 0), feeds.open(B, 0)
    feeds.publish([Member(Role.VIEWER, "b", MembershipStatus.REVOKED, make.T0)])
    feeds.publish([Member(Role.CLUSTER, "a", MembershipStatus.APPROVED, make.T0)])
    assert len(feeds) == 3
    feeds.publish([Member(Role.CLUSTER, "a", MembershipStatus.REVOKED, make.T0)])
    assert (first.closed, second.closed, other.closed) == (True, True, False)
    assert (feeds.count(A), feeds.count(B)) == (0, 1)


async def test_streams_through_a_revoked_proxy_end_and_no_others():
    feeds = StreamHub()
    through, past, other = feeds.open(A, 0, "edge"), feeds.open(A, 0), feeds.open(B, 0, "core")
    feeds.publish([Member(Role.PROXY, "edge", MembershipStatus.REVOKED, make.T0)])
    assert (through.closed, past.closed, other.closed) == (True, False, False)


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
    return [(i.side, i.action, i.message) for i in streams.instructions_for(cluster, found)]


USE = (Side.REQUESTER, InstructionAction.USE, "Use a for 500m CPU / 256Mi Memory / 2 GPU")


HOLD = (
    Side.PROVIDER,
    InstructionAction.HOLD,
    "Hold 500m CPU / 256Mi Memory / 2 GPU for requester r",
)


WITHDRAW = (
    Side.PROVIDER,
    InstructionAction.WITHDRAW,
    "Release 500m CPU / 256Mi Memory / 2 GPU held for requester r",
)


STOP = (Side.REQUESTER, InstructionAction.STOP, "Why")


@pytest.mark.parametrize(
    "phase, requester, provider",
    [
        (Phase.RESERVED, USE, HOLD),
        (Phase.ACTIVE, USE, HOLD),
        (Phase.RELEASED, STOP, WITHDRAW),
        (Phase.FAILED, STOP, WITHDRAW),
    ],
)
def test_instructions_of_requester_and_provider(phase, requester, provider):
    assert instructions("r", reservation(phase)) == [requester]
    assert instructions("a", reservation(phase)) == [provider]


@pytest.mark.parametrize("phase", [Phase.RESERVED, Phase.ACTIVE, Phase.FAILED])
def test_former_provider_withdraws(phase):
    assert instructions("b", reservation(phase, left=("b", "c"))) == [WITHDRAW]


def test_other_clusters_get_no_instruction():
    assert instructions("stranger", reservation()) == []


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


def test_each_cluster_has_its_own_session(sessions):
    sessions.claim("one", BERLIN)
    sessions.claim("two", PARIS)
    assert sessions.is_refused("two", BERLIN)
    assert sessions.is_refused("one", PARIS)


def test_session_ends_after_the_timeout(sessions):
    sessions.claim("one")
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
    with ExitStack() as outer:
        outer.enter_context(sessions.stream("one"))
        with sessions.stream("one"):
            assert sessions.is_refused("two")
        sessions.clock.pass_time(RECONNECT_GRACE)
        assert sessions.is_refused("two"), "the other stream is open"
    sessions.clock.pass_time(RECONNECT_GRACE - make.MOMENT)
    assert sessions.is_refused("two")
    sessions.clock.pass_time(make.MOMENT)
    sessions.claim("two")
    assert sessions.is_refused("one")


def test_reconnecting_agent_keeps_its_session(sessions):
    """As it does for its new certificate: the old stream is closed first."""
    for _ in range(5):
        with sessions.stream("one"):
            sessions.clock.pass_time(make.MINUTE)
        for _ in range(2):
            sessions.clock.pass_time(RECONNECT_GRACE / 3)
            assert sessions.is_refused("two")
    with sessions.stream("one"):
        sessions.clock.pass_time(RECONNECT_GRACE)
        assert sessions.is_refused("two"), "it came back"


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
    old = Subscription(BERLIN, 0)
    with sessions.stream("one", old):
        sessions.clock.pass_time(TIMEOUT)
        feeds = [old, Subscription(BERLIN, 0)]
        assert not old.closed
        with sessions.stream("two", feeds[1]):
            assert [feed.closed for feed in feeds] == [True, False]
            assert sessions.is_refused("one")
    sessions.clock.pass_time(RECONNECT_GRACE)
    assert not sessions.is_refused("three")


def test_late_end_of_an_old_stream_does_not_affect_the_new_session(sessions):
    with ExitStack() as stack:
        stack.enter_context(sessions.stream("one"))
        sessions.clock.pass_time(TIMEOUT)
        sessions.claim("two")
        stack.close()
        assert sessions.is_refused("one")


def test_rejected_stream_is_not_opened(sessions):
    sessions.claim("one")
    feed = Subscription(BERLIN, 0)
    with pytest.raises(IdentityInUse), sessions.stream("two", feed):
        pytest.fail("it has begun")
    assert not feed.closed


def test_long_instance_name_is_truncated(sessions):
    sessions.claim("x" * MAX_INSTANCE_LENGTH + "one")
    sessions.clock.pass_time(TIMEOUT / 2)
    sessions.held.touch(BERLIN, "x" * MAX_INSTANCE_LENGTH + "two")
    sessions.clock.pass_time(TIMEOUT / 2)
    assert sessions.is_refused("y")
