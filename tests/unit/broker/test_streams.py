"""Instruction streams: what a cluster receives, and which of its agents."""

import asyncio
from contextlib import ExitStack
from datetime import timedelta

import pytest

import make
from clocks import Clock
from kubelend.broker import streams
from kubelend.broker.agent_sessions import MAX_INSTANCE_LENGTH, RECONNECT_GRACE, AgentSessions
from kubelend.broker.streams import Action, Side, StreamHub, Subscription
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


async def test_change_is_sent_to_requester_and_provider_only():
    feeds = StreamHub()
    a, b, r = (feeds.open(cluster, 0) for cluster in (A, B, R))
    feeds.publish([change(1, 1)])
    assert revisions(await a.read(0.01)) == [1]
    assert revisions(await r.read(0.01)) == [1]
    assert await b.read(0.01) == []


async def test_change_is_sent_to_former_providers():
    feeds = StreamHub()
    b = feeds.open(B, 0)
    feeds.publish([change(1, 1, left=(B,))])
    assert revisions(await b.read(0.01)) == [1]


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


async def test_change_is_sent_to_every_stream_of_a_cluster():
    feeds = StreamHub()
    first, second = feeds.open(A, 0), feeds.open(A, 0)
    feeds.publish([change(1, 1)])
    assert revisions(await first.read(1)) == revisions(await second.read(1)) == [1]


async def test_other_changes_are_not_sent():
    feeds = StreamHub()
    a = feeds.open(A, 0)
    feeds.publish([make.cluster("a"), ClusterDeleted(A), Archived(ReservationId("rsv-1"))])
    assert await a.read(0.01) == []


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
    feeds.publish([Member(Role.CLUSTER, "a", MembershipStatus.ACCEPTED, make.T0)])
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


USE = (Side.REQUESTER, Action.USE, "Use a for 500m CPU / 256Mi Memory / 2 GPU")


HOLD = (Side.PROVIDER, Action.HOLD, "Hold 500m CPU / 256Mi Memory / 2 GPU for requester r")


WITHDRAW = (
    Side.PROVIDER,
    Action.WITHDRAW,
    "Release 500m CPU / 256Mi Memory / 2 GPU held for requester r",
)


STOP = (Side.REQUESTER, Action.STOP, "Why")


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


def test_requester_of_a_queued_reservation_waits():
    waiting = reservation(Phase.PENDING, target=None)
    assert instructions("r", waiting) == [(Side.REQUESTER, Action.WAIT, "Why")]


@pytest.mark.parametrize("phase", [Phase.RESERVED, Phase.ACTIVE, Phase.FAILED])
def test_former_provider_withdraws(phase):
    assert instructions("b", reservation(phase, left=("b", "c"))) == [WITHDRAW]


def test_other_clusters_get_no_instruction():
    assert instructions("stranger", reservation()) == []


def test_changes_concern_requester_provider_and_former_providers():
    assert streams.clusters_of(reservation()) == {"r", "a"}
    assert streams.clusters_of(reservation(left=("b", "c"))) == {"r", "a", "b", "c"}
    assert streams.clusters_of(reservation(Phase.PENDING, target=None)) == {"r"}


def test_every_cluster_concerned_gets_an_instruction():
    found = reservation(left=("b",))
    assert all(instructions(cluster, found) for cluster in streams.clusters_of(found))


def test_values_are_api():
    assert [side.value for side in Side] == ["requester", "provider"]
    assert [action.value for action in Action] == ["Wait", "Use", "Stop", "Hold", "Withdraw"]


# -- agent sessions


BERLIN, PARIS = ClusterId("berlin"), ClusterId("paris")


TIMEOUT = timedelta(seconds=90)


class Sessions:
    """Speakers, and a clock to move."""

    def __init__(self):
        self.clock = Clock()
        self.speakers = AgentSessions(self.clock, TIMEOUT)

    def speak(self, instance, cluster=BERLIN, origin="from 10.0.0.7"):
        self.speakers.claim(cluster, instance, origin)

    def is_refused(self, instance, cluster=BERLIN):
        try:
            self.speak(instance, cluster)
        except IdentityInUse:
            return True
        return False

    def stream(self, instance, feed=None):
        feed = feed or Subscription(BERLIN, 0)
        return self.speakers.hold_open(BERLIN, instance, "from 10.0.0.7", feed)


@pytest.fixture
def sessions():
    return Sessions()


def test_second_agent_is_rejected_with_the_active_one_and_a_hint(sessions):
    sessions.speak("one")
    sessions.clock.pass_time(27 * make.SECOND)
    sessions.speak("one")
    sessions.clock.pass_time(3 * make.SECOND)
    with pytest.raises(IdentityInUse) as refused:
        sessions.speak("two", origin="from 10.0.0.8")
    assert str(refused.value) == (
        "another agent is active for berlin since 12:00:00 UTC (from 10.0.0.7, last seen 3 s ago);"
        " stop it, or issue a separate certificate for this cluster"
    )


def test_error_has_the_date_of_an_older_session(sessions):
    sessions.speak("one")
    sessions.clock.pass_time(24 * make.HOUR)
    sessions.speak("one")
    with pytest.raises(IdentityInUse, match="since 2026-01-01 12:00:00 UTC"):
        sessions.speak("two")


def test_error_has_the_latest_address(sessions):
    sessions.speak("one")
    sessions.speak("one", origin="through envoy")
    with pytest.raises(IdentityInUse, match=r"\(through envoy, last seen 0 s ago\)"):
        sessions.speak("two")


def test_each_cluster_has_its_own_session(sessions):
    sessions.speak("one", BERLIN)
    sessions.speak("two", PARIS)
    assert sessions.is_refused("two", BERLIN)
    assert sessions.is_refused("one", PARIS)


def test_rejected_agent_does_not_get_the_session_later(sessions):
    sessions.speak("one")
    for _ in range(10):
        sessions.clock.pass_time(8 * make.SECOND)
        assert sessions.is_refused("two")
    sessions.speak("one")


def test_session_ends_after_the_timeout(sessions):
    sessions.speak("one")
    sessions.clock.pass_time(TIMEOUT - make.MOMENT)
    assert sessions.is_refused("two")
    sessions.clock.pass_time(make.MOMENT)
    sessions.speak("two")
    assert sessions.is_refused("one")


def test_touch_extends_only_the_session_of_the_active_agent(sessions):
    sessions.speak("one")
    sessions.clock.pass_time(TIMEOUT / 2)
    sessions.speakers.touch(BERLIN, "one")
    sessions.speakers.touch(BERLIN, "two")
    sessions.speakers.touch(PARIS, "one")
    sessions.clock.pass_time(TIMEOUT / 2)
    assert sessions.is_refused("two")
    sessions.clock.pass_time(TIMEOUT / 2)
    sessions.speakers.touch(BERLIN, "two")
    sessions.speak("two")
    sessions.speak("three", PARIS)


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
    sessions.speak("two")
    assert sessions.is_refused("one")


def test_session_ends_after_a_stream_that_failed(sessions):
    with pytest.raises(ConnectionResetError), sessions.stream("one"):
        raise ConnectionResetError
    sessions.clock.pass_time(RECONNECT_GRACE)
    sessions.speak("two")


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


def test_hint_during_the_grace_period_is_to_retry(sessions):
    with sessions.stream("one"):
        pass
    with pytest.raises(IdentityInUse) as refused:
        sessions.speak("two")
    assert str(refused.value) == (
        "another agent is active for berlin since 12:00:00 UTC (from 10.0.0.7, last seen 0 s ago);"
        " its stream has just ended; try again in a moment"
    )


def test_grace_period_does_not_extend_the_timeout(sessions):
    with sessions.stream("one"):
        sessions.clock.pass_time(TIMEOUT - make.MOMENT)
    assert sessions.is_refused("two")
    sessions.clock.pass_time(make.MOMENT)
    sessions.speak("two")


def test_clock_set_back_ends_the_grace_period(sessions):
    with sessions.stream("one"):
        pass
    sessions.clock.pass_time(-make.HOUR)
    sessions.speak("two")


def test_request_after_the_last_stream_continues_the_session(sessions):
    with sessions.stream("one"):
        sessions.clock.pass_time(make.MINUTE)
    sessions.speak("one")
    sessions.clock.pass_time(RECONNECT_GRACE)
    with pytest.raises(IdentityInUse, match="since 12:00:00 UTC"):
        sessions.speak("two")


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
        sessions.speak("two")
        stack.close()
        assert sessions.is_refused("one")


def test_rejected_stream_is_not_opened(sessions):
    sessions.speak("one")
    feed = Subscription(BERLIN, 0)
    with pytest.raises(IdentityInUse), sessions.stream("two", feed):
        pytest.fail("it has begun")
    assert not feed.closed


def test_clock_set_back_does_not_end_the_session(sessions):
    sessions.speak("one")
    sessions.clock.pass_time(-make.HOUR)
    with pytest.raises(IdentityInUse, match="last seen 0 s ago"):
        sessions.speak("two")


def test_long_instance_name_is_truncated(sessions):
    sessions.speak("x" * MAX_INSTANCE_LENGTH + "one")
    sessions.clock.pass_time(TIMEOUT / 2)
    sessions.speakers.touch(BERLIN, "x" * MAX_INSTANCE_LENGTH + "two")
    sessions.clock.pass_time(TIMEOUT / 2)
    assert sessions.is_refused("y")
