"""Instructions: pushed to both sides as they happen, resumed without a gap, acknowledged or refused."""

import asyncio
import contextlib

import pytest

import brokers
import make
import waiting
from callers import Caller
from kubelend.api import reservations
from waiting import PATIENCE


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
        assert [found.instruction for found in holds] == [
            ("provider", "Hold", kept["id"]),
            ("provider", "Hold", used["id"]),
        ]
    async with r.stream() as stream:
        reset, *received = await stream.events(4)
        assert [found.instruction[1:] for found in received] == [
            ("Use", kept["id"]),
            ("Use", used["id"]),
            ("Wait", waiting["id"]),
        ]
        assert [int(found.id) for found in received] == sorted(int(found.id) for found in received)


async def test_reservation_is_pushed_to_provider_and_requester(a, r):
    async with a.stream() as provider, r.stream() as requester:
        await provider.event()
        await requester.event()
        made = await r.reserve("500m", "256Mi")
        hold, use = await provider.event(), await requester.event()
        await r.delete("reservations", made["id"])
        withdraw, stop = await provider.event(), await requester.event()
    assert withdraw.instruction == ("provider", "Withdraw", made["id"])
    assert withdraw.data["message"] == "Release 500m CPU / 256Mi Memory held for requester r"
    assert stop.instruction == ("requester", "Stop", made["id"])
    assert stop.data["message"] == "Released by requester r"
    assert "grant" not in withdraw.data
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


async def test_invalid_id_is_refused(a):
    for after in ("x", "-1", "1.5", "9" * 20, "٣"):
        answer = await a.call("GET", "instructions", "stream", headers={"Last-Event-ID": after})
        assert answer.refusal == (400, "InvalidInput")
        assert answer.problem.detail.startswith("Last-Event-ID: ")


async def test_silent_stream_gives_signs_of_life(broker, a, monkeypatch):
    monkeypatch.setattr(reservations, "KEEP_ALIVE_SECONDS", 0.02)
    async with a.stream() as stream:
        await stream.event()
        comments = [(await stream.next()).comment for _ in range(4)]
    assert comments == ["open", "alive", "alive", "alive"]


async def test_slow_reader_catches_up_and_keeps_nobody_waiting(broker, r):
    """It does not read while more is pushed than all buffers hold; everybody else goes on at once."""
    a = broker.cluster("a")
    await a.advertise(resources={"capacity": {"cpu": "64", "memory": "1Gi", "extended": EXTENDED}})
    count = 400
    async with a.stream() as slow, r.stream() as quick:
        await quick.event()
        for _ in range(count // 16):
            await asyncio.gather(*(churn(r) for _ in range(16)))
        last = await r.reserve("1")
        while (event := await quick.event()).instruction[2] != last["id"]:
            pass
        assert event.data["reservation"] == last
        await slow.event()
        received = []
        while (event := await slow.event()).instruction[2] != last["id"]:
            received.append(event.instruction[1:])
        # Once each at the least; had it not been slow, each twice: first a Hold, then a Withdraw.
        assert count <= len(received) < 2 * count
        assert len({found for action, found in received if action == "Withdraw"}) == count


# Resources whose names alone fill several kilobytes.
EXTENDED = {f"{number:03d}{'x' * 240}.com/{'y' * 60}": "1000" for number in range(30)}


async def churn(r):
    wanted = {"cpu": "1m", "memory": "1Mi", "extended": dict.fromkeys(EXTENDED, "1")}
    made = (await r.post("reservations", {"requestedResources": wanted})).json
    await r.delete("reservations", made["id"])


async def test_handshake_reaches_the_other_side_with_the_grant_and_no_log(a, r, log):
    start, nonce = {"clusterID": "liqo-r"}, {"clusterID": "liqo-a", "nonce": "c2VjcmV0LW5vbmNl"}
    path = ("reservations", (await r.reserve())["id"], "handshake")
    async with a.stream() as provider:
        await provider.events(2)
        assert set((await r.put(*path, start)).json) == {"grant"}
        pushed = await provider.event()
        assert (pushed.name, pushed.id, pushed.data) == ("handshake", "", {"reservation": path[1]})
        assert (await a.put(*path, nonce)).json["peer"] == start
    answer = await r.put(*path, start)
    assert answer.json["peer"] == nonce
    assert answer.json["grant"].count(".") == 2
    assert nonce["nonce"] not in log.text


async def test_client_that_goes_away_is_noticed_and_forgotten(broker, a, r):
    async with a.stream() as stream:
        await stream.event()
        assert broker.metric("kubelend_open_streams") == 1
    async with asyncio.timeout(PATIENCE):
        while broker.metric("kubelend_open_streams"):
            await r.reserve("1m", "1Mi")
    assert len(broker.service.streams) == 0
    labels = {"route": "stream", "method": "GET", "code": "200"}
    await waiting.until(lambda: broker.metric("kubelend_http_requests_total", **labels) == 1)


async def test_cluster_has_no_more_streams_than_it_may(broker, a, r):
    streams = [a.stream() for _ in range(reservations.MAX_STREAMS_PER_CLUSTER)]
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


@pytest.fixture
async def b(broker):
    found = broker.cluster("b")
    await found.advertise("4", "8Gi")
    return found


async def test_refused_reservation_moves_to_the_next_best(broker, a, b, r):
    made = await r.reserve("3")
    assert made["targetClusterID"] == "a"
    broker.clock.pass_time(5 * make.SECOND)
    acknowledged = await a.post("instructions", made["id"], "acknowledge")
    assert acknowledged.status == 200
    assert acknowledged.json["status"]["acknowledgedAt"] == "2026-01-01T12:00:05Z"
    assert await r.read("reservations", made["id"]) == acknowledged.json
    assert await a.read("instructions") == [acknowledged.json]
    answer = await a.post("instructions", made["id"], "refuse", {"reason": "maintenance"})
    assert answer.status == 200
    moved = answer.json
    assert (moved["targetClusterID"], moved["previousClusterIDs"]) == ("b", ["a"])
    assert moved["status"] == {
        "phase": "Reserved",
        "message": "Resources locked in cluster b",
        "reason": "Moved",
        "reservedAt": "2026-01-01T12:00:05Z",
        "expiresAt": "2026-01-01T13:00:00Z",
    }
    assert await r.read("reservations", made["id"]) == moved
    assert await a.read("instructions") == []
    assert await b.read("instructions") == [moved]
    failed = (await b.post("instructions", made["id"], "refuse")).json["status"]
    assert (failed["phase"], failed["reason"]) == ("Failed", "ProviderRefused")
    assert failed["message"].startswith("Refused by b: no reason given; then ")


async def test_only_the_present_provider_answers(broker, a, b, r):
    made = await r.reserve("3")
    for step in ("acknowledge", "refuse"):
        assert (await r.post("instructions", made["id"], step)).refusal == (403, "Forbidden")
        assert (await b.post("instructions", made["id"], step)).refusal == (404, "NotFound")
    moved = await a.post("instructions", made["id"], "refuse")
    assert (await a.post("instructions", made["id"], "acknowledge")).refusal == (403, "Forbidden")
    # Said again, because the answer was lost: nothing more happens.
    assert (await a.post("instructions", made["id"], "refuse")).json == moved.json
    assert await r.read("reservations", made["id"]) == moved.json
