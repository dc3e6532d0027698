"""Transports: chosen by name, loaded only then; calls and streams over a network that fails."""

import asyncio
import subprocess
import sys
from contextlib import AsyncExitStack, aclosing
from datetime import timedelta

import msgspec
import pytest
from aiohttp import web
from msgspec.structs import replace

import make
from certificates import Certificates
from kubelend.communicators import factory
from kubelend.communicators.cluster_namespace import RevisionTracker
from kubelend.communicators.factory import CommunicatorOptions
from kubelend.communicators.http import HttpCommunicator
from kubelend.core.errors import (
    BrokerUnreachable,
    Forbidden,
    InvalidSettings,
    MissingRoute,
    NotReady,
)
from kubelend.wire import bodies, route
from scripted_broker import body, events, hang_up, problem, raw, say_nothing
from waiting import PATIENCE, until

SHORT, LONGER = timedelta(milliseconds=100), timedelta(seconds=2)
STATUS = bodies.ReservationStatus("Reserved", "Locked")
RESERVATION = bodies.Reservation(
    *("rsv-a-1", "a", "b", bodies.Quantities("1", "1Gi"), STATUS, make.T0)
)
REQUEST = bodies.ReservationRequest(RESERVATION.requested_resources)
RESET = b"event: reset\ndata: {}\n\n"

pytestmark = pytest.mark.broker("scripted")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return Certificates(tmp_path_factory.mktemp("pki"))


@pytest.fixture
async def opened(broker, certificates):
    """Opens communicators with these options, which are closed at the end."""
    async with AsyncExitStack() as stack:

        async def opened(**fields):
            options = CommunicatorOptions(broker.url, certificates.cluster("a"), **fields)
            found = await factory.open_communicator("http", options)
            assert found is not None
            stack.push_async_callback(found.close)
            return found

        yield opened


@pytest.fixture
async def communicator(opened):
    return await opened()


def instruction_of(revision, id="rsv-1", role="provider"):
    found = replace(RESERVATION, id=id, revision=revision)
    return bodies.Instruction(revision, role, "Hold", "Hold it", found)


def event(revision):
    data = msgspec.json.encode(instruction_of(revision))
    return b"id: %d\nevent: instruction\ndata: %s\n\n" % (revision, data)


async def revisions(communicator, resets=None):
    """The revisions that a stream delivers until it fails, and the error."""
    marks = [] if resets is None else resets
    found = []
    try:
        async with aclosing(communicator.stream(lambda: marks.append("reset"))) as stream:
            while True:
                found.append((await anext(stream)).revision)
    except BrokerUnreachable as error:
        return found, error.message


def resumed(broker):
    return [seen.headers.get(route.LAST_EVENT_ID, "") for seen in broker.seen]


# -- choosing a transport


async def test_http_is_opened_without_a_call_and_no_name_opens_nothing(broker, communicator):
    assert isinstance(communicator, HttpCommunicator)
    assert broker.seen == []
    assert await factory.open_communicator("", CommunicatorOptions()) is None


@pytest.mark.parametrize("name", ["mqtt", "HTTP"])
async def test_unknown_transport_is_rejected(name):
    message = f"unknown transport '{name}'; use http or kubernetes, or leave it empty"
    with pytest.raises(InvalidSettings, match=f"^--broker-transport: {message}"):
        await factory.open_communicator(name, CommunicatorOptions("https://localhost"))


async def test_missing_option_of_http_is_named(certificates, tmp_path):
    for options, message in (
        (CommunicatorOptions(certificates=certificates.cluster("a")), "--broker-url"),
        (CommunicatorOptions("https://localhost"), "--broker-cert-path"),
        (CommunicatorOptions("https://localhost", tmp_path / "absent"), "tls.crt"),
    ):
        with pytest.raises(InvalidSettings, match=message):
            await factory.open_communicator("http", options)


def test_only_the_transport_loads_its_library():
    """What the whole process of an agent loads is in tests/unit/apps/test_agent_startup.py."""
    names = "communicators.factory peerings.liqoctl agent.peering"
    modules = ", ".join(f"kubelend.{name}" for name in names.split())
    absent = {"aiohttp", "numpy", "cryptography", "uvloop", "typer"}
    program = f"import sys, {modules}; print(*({absent} & sys.modules.keys()))"
    found = subprocess.check_output([sys.executable, "-c", program], text=True)
    assert found.strip() == ""


# -- calls


async def test_request_without_a_response_is_repeated_with_its_key(broker, communicator):
    broker.responses += [hang_up, body(RESERVATION, 201)]
    assert await communicator.request(REQUEST, "the key") == RESERVATION
    assert [seen.headers[route.IDEMPOTENCY_KEY] for seen in broker.seen] == ["the key"] * 2


@pytest.mark.parametrize(
    "call, error, attempts",
    [
        (lambda to: to.request(REQUEST, "k"), NotReady("starting"), 3),
        (lambda to: to.activate("rsv-a-1"), Forbidden("no"), 1),
        (lambda to: anext(to.stream(lambda: None)), NotReady("starting"), 1),
    ],
    ids=["transient", "permanent", "stream"],
)
async def test_call_is_retried_twice_unless_it_is_permanent_or_opens_a_stream(
    broker, communicator, call, error, attempts
):
    broker.responses.append(problem(error))
    with pytest.raises(type(error)):
        await call(communicator)
    assert len(broker.seen) == attempts


async def test_call_has_a_timeout(broker, opened):
    broker.responses.append(say_nothing)
    with pytest.raises(BrokerUnreachable, match="did not answer within"):
        await (await opened(timeout=SHORT)).ping()


async def test_response_of_a_proxy_for_a_broker_that_is_not_ready(broker, communicator):
    broker.responses.append(raw(b"not ready: starting", 503))
    with pytest.raises(NotReady, match="the broker is not ready: starting"):
        await communicator.ping()


async def test_connections_are_reused(broker, communicator):
    broker.responses.append(body(RESERVATION))
    for _ in range(3):
        await communicator.find("rsv-a-1")
    assert len(broker.connections) == 1


async def test_every_call_names_the_agent_process(broker, opened):
    broker.responses += [body(RESERVATION), events(event(1))]
    named = await opened(instance="agent-7")
    await named.find("rsv-a-1")
    await revisions(named)
    assert [seen.headers[route.AGENT_HEADER] for seen in broker.seen] == ["agent-7"] * 2


async def test_only_unfinished_reservations_are_listed(broker, communicator):
    broker.responses += [
        body(bodies.ReservationList([RESERVATION], next="7")),
        body(bodies.ReservationList([RESERVATION])),
    ]
    assert await communicator.instructions() == [RESERVATION] * 2
    assert [seen.query for seen in broker.seen] == [
        {"phase": "Pending,Reserved,Active", "limit": "1000"},
        {"phase": "Pending,Reserved,Active", "limit": "1000", "continue": "7"},
    ]


# -- the stream


async def test_disconnected_stream_raises_and_the_next_resumes_after_the_last_event(
    broker, communicator
):
    broker.responses += [events(event(1) + event(2)), events(event(3)), events(b"")]
    assert (await revisions(communicator))[0] == [1, 2]
    assert (await revisions(communicator))[0] == [3]
    assert (await revisions(communicator))[0] == []
    assert resumed(broker) == ["", "2", "3"]


async def test_incomplete_event_is_not_delivered(broker, communicator):
    broker.responses += [events(event(1) + event(2)[:-10]), events(event(2))]
    assert (await revisions(communicator))[0] == [1]
    assert (await revisions(communicator))[0] == [2]
    assert resumed(broker) == ["", "1"]


async def test_after_a_reset_earlier_event_ids_are_not_used(broker, communicator):
    """A broker whose store was lost counts from the start: after the old ID it would send nothing."""
    resets: list[str] = []
    broker.responses += [events(event(7)), events(RESET), events(RESET + event(2)), events(b"")]
    for expected in ([7], [], [2], []):
        assert (await revisions(communicator, resets))[0] == expected
    assert resumed(broker) == ["", "7", "", "2"]
    assert resets == ["reset"] * 2


async def test_half_open_connection_times_out(broker, opened):
    broker.responses.append(events(b"", stay=True))
    async with asyncio.timeout(PATIENCE):
        found, message = await revisions(await opened(idle_timeout=SHORT))
    assert found == []
    assert "did not answer within 100ms" in message


async def test_keepalives_keep_an_idle_stream_open(broker, opened):
    async def heartbeats(request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(9):
            await response.write(b": alive\n\n")
            await asyncio.sleep(LONGER.total_seconds() / 8)
        await response.write(event(1))
        return response

    broker.responses.append(heartbeats)
    assert (await revisions(await opened(idle_timeout=LONGER)))[0] == [1]


async def test_close_ends_a_call_in_progress(broker, communicator):
    broker.responses.append(say_nothing)
    call = asyncio.create_task(communicator.find("rsv-a-1"))
    await until(lambda: bool(broker.seen))
    await communicator.close()
    with pytest.raises(BrokerUnreachable):
        await call


# -- the stream of the kubernetes transport


def test_each_revision_of_a_reservation_and_role_is_delivered_once():
    tracker = RevisionTracker()
    advanced = [tracker.advance(instruction_of(number)) for number in (5, 5, 4, 6)]
    assert advanced == [True, False, False, True]
    assert tracker.advance(instruction_of(3, "rsv-2"))
    assert tracker.advance(instruction_of(3, role="requester"))
    tracker.complete_to = 9
    tracker.reset()
    assert tracker.complete_to < 0
    assert tracker.advance(instruction_of(1))


@pytest.mark.parametrize("call", ["find", "release", "activate", "acknowledge"])
async def test_page_of_a_proxy_is_not_taken_for_a_broker_without_the_route(
    broker, communicator, call
):
    """It would be taken for the end of the reservation."""
    broker.responses.append(raw(b"<html>no backend</html>", 404))
    with pytest.raises(MissingRoute):
        await getattr(communicator, call)("rsv-a-1")
    broker.responses[:] = [raw(b"<html>", 404), body(bodies.Version("1"))]
    with pytest.raises(MissingRoute):
        await getattr(communicator, call)("rsv-a-1")
