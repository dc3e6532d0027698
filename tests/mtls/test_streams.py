"""Instructions as they happen: pushed to both sides, resumed without a gap, and never in anyone's way."""

import asyncio
import contextlib

import pytest

import brokers
import make
import waiting
from callers import Caller, wish
from kubelend.api import instructions
from waiting import PATIENCE


@pytest.fixture
async def a(broker):
    found = broker.cluster("a")
    await found.advertise("64", "64Gi")
    return found


@pytest.fixture
def r(broker):
    return broker.cluster("r")


async def test_stream_opens_with_a_reset_and_all_that_is_open(broker, a, r):
    kept, used, over = [await r.reserve() for _ in range(3)]
    await r.post("reservations", used["id"], "activate")
    await r.delete("reservations", over["id"])
    waiting = await r.queue("999", wait="1h")
    async with a.stream() as stream:
        reset, *holds = await stream.events(3)
        assert stream.response.status == 200
        assert stream.response.headers["Content-Type"] == "text/event-stream"
        assert stream.response.headers["Cache-Control"] == "no-store"
        assert (reset.name, reset.id, reset.data) == ("reset", "", {})
        assert [found.told for found in holds] == [
            ("provider", "Hold", kept["id"]),
            ("provider", "Hold", used["id"]),
        ]
    async with r.stream() as stream:
        reset, *received = await stream.events(4)
        assert [found.told[1:] for found in received] == [
            ("Use", kept["id"]),
            ("Use", used["id"]),
            ("Wait", waiting["id"]),
        ]
        assert [int(found.id) for found in received] == sorted(int(found.id) for found in received)


async def test_stream_that_its_client_ends_is_counted(broker, a):
    async with a.stream() as stream:
        await stream.event()
    labels = {"route": "stream", "method": "GET", "code": "200"}
    await waiting.until(lambda: broker.metric("kubelend_http_requests_total", **labels) == 1)


async def test_reservation_is_pushed_to_provider_and_requester(a, r):
    async with a.stream() as provider, r.stream() as requester:
        await provider.event()
        await requester.event()
        made = await r.reserve("500m", "256Mi")
        hold, use = await provider.event(), await requester.event()
    assert hold.name == use.name == "instruction"
    assert hold.id == use.id == str(hold.data["revision"])
    assert hold.data.pop("grant") == use.data["grant"]
    assert hold.data == {
        "revision": int(hold.id),
        "role": "provider",
        "action": "Hold",
        "message": "Hold 500m CPU / 256Mi Memory for requester r",
        "reservation": made,
    }
    assert use.data["message"] == "Use a for 500m CPU / 256Mi Memory"
    assert (use.data["role"], use.data["action"]) == ("requester", "Use")
    assert use.data["reservation"] == made


async def test_every_step_of_a_life_is_pushed(a, r):
    async with a.stream() as provider, r.stream() as requester:
        await provider.event()
        await requester.event()
        made = await r.reserve()
        await provider.event()
        await requester.event()
        path = ("reservations", made["id"])
        for step, seen in (
            (a.post("instructions", made["id"], "acknowledge"), "acknowledgedAt"),
            (r.post(*path, "activate"), "activatedAt"),
            (r.delete(*path), "finishedAt"),
        ):
            expected = (await step).json
            assert seen in expected["status"]
            for stream in (provider, requester):
                assert (await stream.event()).data["reservation"] == expected
        withdrawn = await r.get(*path)
        assert withdrawn.json["status"]["phase"] == "Released"


async def test_end_is_a_withdrawal_for_the_provider_and_a_stop_for_the_requester(a, r):
    made = await r.reserve("2", "1Gi")
    async with a.stream() as provider, r.stream() as requester:
        await provider.events(2)
        await requester.events(2)
        await r.delete("reservations", made["id"])
        withdraw, stop = await provider.event(), await requester.event()
    assert withdraw.told == ("provider", "Withdraw", made["id"])
    assert withdraw.data["message"] == "Release 2 CPU / 1Gi Memory held for requester r"
    assert stop.told == ("requester", "Stop", made["id"])
    assert stop.data["message"] == "Released by requester r"


async def test_nobody_hears_of_what_does_not_concern_them(broker, a, r):
    s = broker.cluster("s")
    async with s.stream() as stream:
        await stream.event()
        await r.reserve()
        mine = await s.reserve()
        assert (await stream.event()).told == ("requester", "Use", mine["id"])


# -- resuming


async def test_resumed_stream_tells_exactly_what_was_missed(a, r):
    first, second, third = [await r.reserve() for _ in range(3)]
    async with a.stream() as stream:
        *_, last = await stream.events(4)
    await r.delete("reservations", first["id"])
    fourth = await r.reserve()
    await r.post("reservations", second["id"], "activate")
    async with a.stream(after=last.id) as stream:
        assert [event.told[1:] for event in await stream.events(3)] == [
            ("Withdraw", first["id"]),
            ("Hold", fourth["id"]),
            ("Hold", second["id"]),
        ]
        await r.delete("reservations", third["id"])
        assert (await stream.event()).told == ("provider", "Withdraw", third["id"])


async def test_resumed_stream_that_missed_nothing_says_so_and_goes_on(a, r):
    await r.reserve()
    async with a.stream() as stream:
        _, last = await stream.events(2)
    async with a.stream(after=last.id) as stream:
        assert (await stream.next()).comment == "open"
        made = await r.reserve()
        assert (await stream.event()).told == ("provider", "Hold", made["id"])


async def test_cut_at_every_event_and_resumed_nothing_is_lost_or_repeated(a, r):
    made = [(await r.reserve("1m", "1Mi"))["id"] for _ in range(12)]
    received: list[str] = []
    last = ""
    while len(received) < len(made):
        async with a.stream(after=last) as stream:
            event = await stream.event()
            while event.name == "reset":
                event = await stream.event()
            received.append(event.told[2])
            last = event.id
    assert received == made


@pytest.mark.parametrize("after", ["999999999", "9" * 19])
async def test_unknown_id_is_answered_with_a_reset_and_all_that_is_open(a, r, after):
    made = await r.reserve()
    async with a.stream(after=after) as stream:
        reset, hold = await stream.events(2)
    assert reset.name == "reset"
    assert hold.told == ("provider", "Hold", made["id"])


async def test_id_older_than_what_is_forgotten_is_answered_with_a_reset(start):
    """What ended in between has been archived, so only the whole present is the truth."""
    broker = await start(retention=make.MINUTE)
    a, r = broker.cluster("a"), broker.cluster("r")
    await a.advertise()
    over = await r.reserve(duration="1h")
    async with a.stream() as stream:
        _, seen = await stream.events(2)
    await r.delete("reservations", over["id"])
    async with a.stream(after=seen.id) as stream:
        assert (await stream.event()).told == ("provider", "Withdraw", over["id"])
    broker.clock.pass_time(2 * make.MINUTE)
    kept = await r.reserve()
    await broker.expire()
    async with a.stream(after=seen.id) as stream:
        reset, hold = await stream.events(2)
        assert reset.name == "reset"
        assert hold.told == ("provider", "Hold", kept["id"])


@pytest.mark.parametrize("after", ["x", "-1", "1.5", "9" * 20, "٣"])
async def test_what_is_no_id_is_refused(a, after):
    answer = await a.call("GET", "instructions", "stream", headers={"Last-Event-ID": after})
    assert answer.refusal == (400, "InvalidInput")
    assert answer.problem.detail.startswith("Last-Event-ID: ")


# -- the life of a stream


async def test_silent_stream_gives_signs_of_life(broker, a, monkeypatch):
    monkeypatch.setattr(instructions, "KEEP_ALIVE_SECONDS", 0.02)
    async with a.stream() as stream:
        await stream.event()
        comments = [(await stream.next()).comment for _ in range(4)]
    assert comments == ["open", "alive", "alive", "alive"]


async def test_slow_reader_catches_up_and_keeps_nobody_waiting(broker, r):
    """It does not read while more is pushed than all buffers hold; everybody else goes on at once."""
    a = broker.cluster("a")
    await a.advertise("64", "64Gi", resources=heavy("64", "1000"))
    count = 400
    async with a.stream() as slow, r.stream() as quick:
        await quick.event()
        for _ in range(count // 16):
            await asyncio.gather(*(churn(r) for _ in range(16)))
        last = await r.reserve("1")
        while (event := await quick.event()).told[2] != last["id"]:
            pass
        assert event.data["reservation"] == last
        await slow.event()
        received = []
        while (event := await slow.event()).told[2] != last["id"]:
            received.append(event.told[1:])
        # Once each at the least; had it not been slow, each twice: first a Hold, then a Withdraw.
        assert count <= len(received) < 2 * count
        assert len({found for action, found in received if action == "Withdraw"}) == count


def heavy(cpu, each):
    """Resources whose names alone fill several kilobytes."""
    names = [f"{number:03d}{'x' * 240}.com/{'y' * 60}" for number in range(30)]
    return {"capacity": amounts(cpu, names, each)}


def amounts(cpu, names, each):
    return {"cpu": cpu, "memory": "1Gi", "extended": dict.fromkeys(names, each)}


async def churn(r):
    wanted = heavy("1m", "1")["capacity"] | {"memory": "1Mi"}
    made = (await r.post("reservations", {"requestedResources": wanted})).json
    await r.delete("reservations", made["id"])


async def test_client_that_goes_away_is_noticed_and_forgotten(broker, a, r):
    async with a.stream() as stream:
        await stream.event()
        assert broker.metric("kubelend_open_streams") == 1
    async with asyncio.timeout(PATIENCE):
        while broker.metric("kubelend_open_streams"):
            await r.reserve("1m", "1Mi")
    assert len(broker.service.streams) == 0


async def test_cluster_has_no_more_streams_than_it_may(broker, a, r):
    streams = [a.stream() for _ in range(instructions.MAX_STREAMS_PER_CLUSTER)]
    for stream in streams:
        await (await stream.__aenter__()).event()
    answer = await a.get("instructions", "stream")
    assert answer.refusal == (429, "LimitExceeded")
    assert answer.headers["Retry-After"] == "15"
    async with r.stream() as other:
        assert (await other.event()).name == "reset"
    for stream in streams:
        await stream.__aexit__(None, None, None)


async def test_streams_end_when_the_broker_stops_and_hold_nothing_up(certificates):
    async with contextlib.AsyncExitStack() as stack:
        async with brokers.running(certificates, shutdown_timeout=make.HOUR) as broker:
            reader = Caller(broker.port, certificates.cluster("a"), "a")
            stack.push_async_callback(reader.hang_up)
            streams = [await stack.enter_async_context(reader.stream()) for _ in range(3)]
            for stream in streams:
                await stream.event()
        for stream in streams:
            assert [event for event in await stream.rest() if not event.comment] == []


async def test_stream_is_not_counted_against_other_calls(a, r):
    """A stream stays open for hours; calls on other connections do not wait for it."""
    async with a.stream() as stream:
        await stream.event()
        answers = await asyncio.gather(
            *(a.get("instructions") for _ in range(20)),
            *(r.post("reservations", wish("1m", "1Mi")) for _ in range(20)),
        )
        assert {answer.status for answer in answers} == {200, 201}
