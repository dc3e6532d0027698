"""No instruction of the broker is missed for long, and of all that is received the newest counts."""

from asyncio import get_running_loop, sleep
from datetime import timedelta
from itertools import pairwise, permutations

import pytest
from structlog.testing import capture_logs

import make
from kubelend.agent import stream
from kubelend.agent.reservation_cache import ReservationCache
from kubelend.core.errors import (
    BrokerUnreachable,
    Forbidden,
    IdentityInUse,
    LimitExceeded,
    NotReady,
    Revoked,
    UnexpectedResponse,
)
from kubelend.core.lifecycle import Phase
from kubelend.wire import bodies
from listeners import Rig, listener
from virtual_time import in_virtual_time, settled

DOWN = BrokerUnreachable("gone")


def disconnect(rig):
    """The stream ends and cannot be opened again."""
    rig.broker.stream_error = DOWN
    rig.broker.disconnect(DOWN)


def reset(rig):
    """The stream ends, and the next one starts with a reset."""
    rig.broker.resets_streams = True
    rig.broker.disconnect(DOWN)


# -- instructions


@in_virtual_time
async def test_known_reservations_are_listed_first_and_then_streamed():
    rig = Rig()
    before = rig.reserve()
    async with rig.running():
        assert rig.phase(before) == Phase.RESERVED
        assert rig.listener.is_connected
        found = rig.reserve()
        rig.broker.send(found)
        await settled()
        assert rig.phase(found) == Phase.RESERVED
        await sleep(3600)
        assert rig.times("instructions") == rig.times("stream") == [0], "no poll beside a stream"


@listener(seconds={"instructions": 2})
async def test_list_that_is_older_than_the_stream_replaces_nothing(rig):
    found = rig.reserve()  # the list is on its way, without it
    rig.broker.send(found)
    await sleep(3)
    assert rig.phase(found) == Phase.RESERVED
    assert rig.times("find") == []


@in_virtual_time
async def test_reservations_that_ended_during_a_gap_are_fetched():
    rig = Rig()
    ended, archived, live = rig.reserve(), rig.reserve(), rig.reserve()
    async with rig.running():
        rig.runner.release(ended)
        rig.broker.archive(archived)
        reset(rig)
        await sleep(1)
        phases = [rig.phase(each) for each in (ended, archived, live)]
        assert phases == [Phase.RELEASED, None, Phase.RESERVED]
        assert {call.reservation for call in rig.broker.named("find")} == {ended, archived}


# -- reconnecting


@listener()
async def test_stream_is_reopened_with_backoff(rig):
    disconnect(rig)
    await sleep(100)
    pauses = [round(late - early, 3) for early, late in pairwise(rig.times("stream"))]
    assert pauses[:9] == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0]


@pytest.mark.parametrize(
    "error, chance, seconds, streams, polls",
    [
        (DOWN, 1.0, 4.5, [0, 0.1, 0.3, 0.7, 1.5, 3.1], [4]),
        (LimitExceeded("16 streams open", retry_after=15), 0.0, 31, [0, 15, 30], None),
        (Forbidden("no"), 0.0, 91, [0, 30, 60, 90], [30, 60, 90]),
        (Revoked("no more"), 0.0, 91, [0, 30, 60, 90], [30, 60, 90]),
        (UnexpectedResponse("what?"), 0.0, 91, [0, 30, 60, 90], [30, 60, 90]),
        (IdentityInUse("twice"), 0.0, 8, [0, 0.2, 0.6, 1.4, 3, 5, 7], []),
    ],
    ids=["jitter", "Retry-After", "Forbidden", "Revoked", "UnexpectedResponse", "takeover"],
)
@in_virtual_time
async def test_stream_that_cannot_be_opened_is_retried(error, chance, seconds, streams, polls):
    rig = Rig(chance=chance)
    rig.broker.stream_error = rig.broker.error = error
    async with rig.running():
        assert rig.health.errors == {"stream": str(error)}
        await sleep(seconds)
        assert rig.times("stream") == pytest.approx(streams)
        assert polls is None or rig.times("instructions") == polls


@pytest.mark.parametrize("is_long", [True, False], ids=["open for long", "delivered something"])
@listener(stream_error=DOWN)
async def test_stream_that_worked_is_reopened_at_once(rig, is_long):
    await sleep(10)
    rig.broker.stream_error = None
    await sleep(10)  # it is open again
    if is_long:
        await sleep(stream.CONNECTED_AFTER.total_seconds())
    else:
        rig.broker.send(rig.reserve())
        await settled()
    rig.broker.disconnect(DOWN)
    ended_at = get_running_loop().time()
    await sleep(0.3)
    assert rig.times("stream")[-1] == pytest.approx(ended_at + 0.2)


@listener()
async def test_stream_that_opens_and_ends_at_once_is_not_hammered(rig):
    rig.broker.resets_streams = True
    for _ in range(200):
        if rig.listener.is_connected:
            rig.broker.disconnect(DOWN)
        await sleep(0.1)
    assert len(rig.times("stream")) < 12


@listener()
async def test_stream_that_ends_without_an_error_is_reopened(rig):
    rig.broker.disconnect(None)
    await sleep(0.3)
    assert rig.times("stream") == [0, 0.2]


@in_virtual_time
async def test_subscribers_are_notified_whenever_the_broker_is_reachable_again():
    rig = Rig()
    reconnects: list[str] = []
    rig.reservations.on_reconnect(lambda: reconnects.append("reconnect"))
    async with rig.running():
        assert len(reconnects) == 1
        rig.broker.disconnect(DOWN)
        await sleep(1)
        assert len(reconnects) == 1
        for _ in range(2):
            rig.broker.send(rig.reserve())
        await settled()
        assert len(reconnects) == 2
        reset(rig)
        await sleep(1)
        assert len(reconnects) == 3


# -- polls


@listener()
async def test_broker_is_polled_while_the_stream_is_down(rig):
    disconnect(rig)
    found = rig.reserve()
    await sleep(11)
    assert rig.phase(found) == Phase.RESERVED
    rig.broker.error = DOWN
    await sleep(10)
    assert rig.times("instructions") == [0, 5, 10, 15, 20], "also while polls fail"
    assert not rig.listener.is_connected


@listener(stream_error=DOWN, seconds={"instructions": 10_000})
async def test_poll_that_hangs_times_out_and_blocks_no_stream(rig):
    await sleep(6)  # the poll hangs
    rig.broker.stream_error = None
    await sleep(3)
    found = rig.reserve()
    rig.broker.send(found)
    await settled()
    assert rig.phase(found) == Phase.RESERVED
    await sleep(20)
    assert len(rig.times("instructions")) > 1, "the first poll never timed out"


# -- lists after a gap


@in_virtual_time
async def test_list_after_a_gap_is_retried_until_it_succeeds():
    rig = Rig()
    rig.broker.error = NotReady("replaying")
    found = rig.reserve()
    async with rig.running():
        await sleep(2)
        assert rig.times("instructions") == [0, 0.2, 0.6, 1.4]
        rig.broker.error = None
        await sleep(2)
        assert rig.phase(found) == Phase.RESERVED
        await sleep(100)
        assert rig.times("instructions") == [0, 0.2, 0.6, 1.4, 3.0]


@listener(error=NotReady("replaying"))
async def test_list_after_a_gap_is_left_to_the_polls_once_the_stream_is_down(rig):
    disconnect(rig)
    await sleep(11)
    assert rig.times("instructions") == [0, 0.2, 5.2, 10.2]


@listener(seconds={"instructions": 3})
async def test_reset_during_a_list_causes_another_list(rig):
    found = rig.reserve()
    reset(rig)
    await sleep(7)
    assert rig.times("instructions") == [0, 3]
    assert rig.phase(found) == Phase.RESERVED


def restore_backup(rig):
    """A broker whose revisions and IDs start over."""
    rig.broker.runner = make.runner(me="cpu=800,memory=800Gi", other="cpu=8,memory=8Gi")


def reserve_long_ago(rig):
    """An active reservation with many revisions."""
    found = rig.reserve()
    rig.runner.activate(found)
    for hours in range(2, 20):
        rig.runner.renew(found, hours * make.HOUR)
    return found


@pytest.mark.parametrize("source", ["stream", "list", "poll"])
@in_virtual_time
async def test_broker_whose_revisions_start_over_is_believed_after_a_gap(source):
    rig = Rig()
    found = reserve_long_ago(rig)
    async with rig.running():
        restore_backup(rig)
        assert rig.reserve() == found
        rig.broker.seconds["instructions"] = 5 if source == "stream" else 0
        if source == "poll":
            disconnect(rig)
            await sleep(6)
        else:
            reset(rig)
            await sleep(1)
        if source == "stream":
            rig.broker.send(found)
            await settled()
        assert rig.reservations.find(found) == rig.broker.body(found)
        assert rig.phase(found) == Phase.RESERVED
        rig.runner.activate(found)
        rig.broker.send(found)
        await sleep(10)
        assert rig.phase(found) == Phase.ACTIVE
        assert rig.times("find") == []


@in_virtual_time
async def test_broker_that_is_restored_while_the_agent_polls_is_believed_by_a_resumed_stream():
    """The polls of the outage raised the known revisions; the stream resumes without a reset."""
    rig = Rig()
    found = reserve_long_ago(rig)
    async with rig.running():
        disconnect(rig)
        await sleep(6)
        assert rig.reservations.find(found) == rig.broker.body(found)
        restore_backup(rig)
        assert rig.reserve() == found
        rig.runner.release(found)
        rig.broker.error, rig.broker.stream_error = DOWN, None
        await sleep(60)
        rig.broker.send(found)
        await settled()
        assert rig.phase(found) == Phase.RELEASED


@pytest.mark.parametrize("is_polling", [False, True], ids=["stream", "polls"])
@in_virtual_time
async def test_many_reservations_that_are_missing_are_fetched_some_at_a_time(is_polling):
    rig = Rig()
    restore_backup(rig)
    known = [rig.reserve() for _ in range(250)]
    async with rig.running():
        for each in known:
            rig.runner.release(each)
        (disconnect if is_polling else reset)(rig)
        await sleep(6 if is_polling else 0.3)
        assert len(rig.broker.named("find")) == stream.MAX_FETCHES_PER_LIST
        await sleep(10 if is_polling else 1)
        assert {rig.phase(each) for each in known} == {Phase.RELEASED}
        await sleep(60)
        assert len(rig.broker.named("find")) == 250
        if not is_polling:
            assert rig.times("instructions") == [0, 0.2, 0.4, 0.6]


# -- health


@listener()
async def test_outage_is_two_log_lines(rig):
    with capture_logs() as lines:
        for number in range(100):
            rig.broker.stream_error = rig.broker.error = BrokerUnreachable(f"try {number}")
            if number == 0:
                rig.broker.disconnect(rig.broker.stream_error)
            await sleep(36)
        assert rig.health.errors == {"stream": "try 0"}
        rig.broker.stream_error = rig.broker.error = None
        await sleep(40)
    assert rig.listener.is_connected
    assert [(line["event"], line.get("error"), line.get("outage")) for line in lines] == [
        ("Broker stream disconnected, polling every 5s", "try 0", None),
        ("Broker stream reconnected", None, "1h0m25s"),
    ]


@pytest.mark.parametrize("is_delivering", [False, True], ids=["poll responds", "delivers"])
@listener()
async def test_resumed_stream_is_connected_once_a_poll_responds_or_it_delivers(rig, is_delivering):
    rig.broker.disconnect(DOWN)
    await sleep(4)
    assert rig.health.errors == {"stream": "gone"}
    if is_delivering:
        rig.broker.send(rig.reserve())
        await settled()
        assert rig.listener.is_connected
    await sleep(100)
    assert rig.listener.is_connected
    assert not rig.health.errors
    assert rig.times("instructions") == ([0] if is_delivering else [0, 5])


@listener()
async def test_resumed_stream_is_not_connected_while_no_poll_responds(rig):
    rig.broker.disconnect(DOWN)
    rig.broker.error = DOWN
    await sleep(600)
    assert rig.health.errors == {"stream": "gone"}


@listener(poll_every=timedelta())
async def test_without_polls_a_stream_that_stays_open_is_connected(rig):
    rig.broker.disconnect(DOWN)
    await sleep(29)
    assert rig.health.errors
    await sleep(2)
    assert rig.listener.is_connected
    assert not rig.health.errors
    disconnect(rig)
    await sleep(600)
    assert rig.times("instructions") == [0]


@listener(stream_error=DOWN)
async def test_permanent_error_after_a_transient_one_is_reported(rig):
    rig.broker.stream_error = Revoked("revoked")
    await sleep(1)
    assert rig.health.errors == {"stream": "revoked"}


@in_virtual_time
async def test_failed_list_beside_an_open_stream_is_a_partial_error_logged_once():
    rig = Rig()
    rig.broker.error = NotReady("replaying")
    with capture_logs() as lines:
        async with rig.running():
            await sleep(10)
            rig.broker.error = NotReady("replaying still")
            rig.broker.send(rig.reserve())
            await sleep(10)
            message = "cannot list instructions after a gap: replaying"
            assert rig.health.errors == {"stream": message}
            assert rig.health.not_ready_reason == ""
            assert rig.listener.is_connected
            rig.broker.error = None
            await sleep(60)
            assert rig.health.errors == {}
    events = [line["event"] for line in lines if "component" in line]
    assert events == ["Component unhealthy", "Component healthy"]


@listener(error=NotReady("replaying"))
async def test_stream_that_breaks_while_the_list_fails_is_reported_as_such(rig):
    await sleep(1)
    disconnect(rig)
    await sleep(20)
    assert rig.health.not_ready_reason == "stream: gone"


def body(id="rsv-1", *, revision=0, phase=Phase.RESERVED, message=""):
    amounts, status = bodies.Quantities("1", "1Gi"), bodies.ReservationStatus(phase.value, message)
    return bodies.Reservation(id, "r", "a", amounts, status, make.T0, revision=revision)


@pytest.fixture
def known():
    return ReservationCache()


@pytest.fixture
def changes(known):
    changes: list[str] = []
    known.subscribe(changes.append)
    return changes


# -- the cache: the order


def test_newest_revision_stays_in_whatever_order_they_arrive():
    states = [body(revision=number, message=str(number)) for number in range(1, 5)]
    for order in permutations(states):
        known = ReservationCache()
        known.put_instructions(order)
        assert known.find("rsv-1") == states[-1]


def test_duplicate_or_older_state_is_no_change(known, changes):
    assert known.put(body(revision=3)) is True
    assert known.put(body(revision=3)) is False
    assert known.put(body(revision=2, phase=Phase.RELEASED)) is False
    assert changes == ["rsv-1"]


def test_without_revisions_the_last_state_counts(known, changes):
    for phase in [Phase.RESERVED, Phase.ACTIVE, Phase.RELEASED]:
        assert known.put(body(phase=phase)) is True
    assert known.put(body(phase=Phase.RELEASED)) is False
    assert changes == ["rsv-1"] * 3


def test_each_reservation_has_its_own_order(known):
    known.put(body("rsv-1", revision=9))
    assert known.put(body("rsv-2", revision=1)) is True
    assert known.put(body("rsv-2", revision=2)) is True
    assert known.find("rsv-2") == body("rsv-2", revision=2)


# -- the cache: gaps


def test_unfinished_reservations_without_an_update_since_then_are_named(known):
    known.put_instructions(
        [body("same"), body("silent"), body("over", phase=Phase.RELEASED), body("gone")]
    )
    since = known.sequence()
    known.put_instructions([body("same"), body("new")])
    known.remove("gone")
    assert known.not_updated_since(since) == ["silent"]


# -- the cache: subscribers


def test_subscribers_find_the_new_state_when_they_are_called(known, changes):
    found: list[object] = []
    known.subscribe(lambda name: found.append(known.find(name)))
    known.put(body(revision=5))
    known.remove("rsv-1")
    known.remove("rsv-1")
    assert known.put(body(revision=4)) is True, "a removed one may come again"
    known.put(body("rsv-2"))
    assert found == [body(revision=5), None, body(revision=4), body("rsv-2")]
    assert changes == ["rsv-1"] * 3 + ["rsv-2"]
