"""What becomes of an object whose answer does not come: it is taken back, whatever kept the answer away."""

import asyncio
from datetime import timedelta

import pytest
from aiohttp import web

import scripted_api
from kubelend.cli import kube_backend, kube_objects
from kubelend.cli.kube_backend import KindBackend
from kubelend.core.errors import Forbidden, NotFound, Unauthenticated, Unavailable, UnexpectedAnswer
from kubelend.kits.backoff import Backoff
from kubelend.kube.client import Client
from kubelend.wire import bodies
from scripted_api import found, status
from waiting import until

ONCE = Backoff(retries=0)
ASKED = bodies.ReservationRequest(bodies.Quantities("1", "1Gi"))
MADE = {
    "metadata": {"name": "lend-1", "namespace": "team", "uid": "u"},
    "spec": {"requestedCPU": "1", "requestedMemory": "1Gi"},
}
RESERVED = MADE | {"status": {"phase": "Reserved", "reservationName": "rsv-1"}}


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    monkeypatch.setattr(kube_backend, "POLL_SECONDS", 0.01)


@pytest.fixture
async def server(certificates):
    async with scripted_api.running(certificates.server()) as running:
        yield running


@pytest.fixture
async def clerk(server):
    async with Client.open(server.access(), backoff=ONCE) as client:
        yield KindBackend(client, kube_objects.RESOURCE_REQUESTS, "team", timedelta(seconds=0.3))


def script(server, *looks, create=None, delete=None):
    """`looks` are the answers to GET, the last of them for ever."""
    looking = iter(looks[:-1])
    by_method = {
        "POST": lambda: create or found(MADE),
        "GET": lambda: next(looking, None) or looks[-1](),
        "DELETE": lambda: delete or found({}),
    }

    async def answer(request):
        if (said := by_method[request.method]()) is not HANG_UP:
            return said
        request.transport.abort()
        return web.Response()

    server.answers += [answer] * 1000


HANG_UP = web.Response()


def methods(server):
    return [request.method for request in server.asked]


@pytest.mark.parametrize(
    "code, kind",
    [
        pytest.param(403, Forbidden, id="may create and not look"),
        pytest.param(401, Unauthenticated, id="token ran out"),
        pytest.param(429, Unavailable, id="too many calls, all the time"),
        pytest.param(503, Unavailable, id="away, all the time"),
        pytest.param(418, UnexpectedAnswer, id="what nobody knows"),
    ],
)
async def test_whatever_keeps_the_answer_away_takes_the_object_back(server, clerk, code, kind):
    script(server, lambda: status(code, "so it is"))
    with pytest.raises(kind, match=r"so it is.*; it was deleted") as caught:
        await clerk.reserve(ASKED, "")
    assert type(caught.value) is kind
    assert methods(server)[-1] == "DELETE"
    assert (await server.asked[-1].json())["preconditions"] == {"uid": "u"}


async def test_what_cannot_be_taken_back_is_said_to_be_there(server, clerk):
    script(server, lambda: status(401, "who?"), delete=status(401, "who?"))
    with pytest.raises(Unauthenticated, match=r"who\?; it could not be deleted: .*who\?; check"):
        await clerk.reserve(ASKED, "")


async def test_what_somebody_else_deleted_is_not_taken_back(server, clerk):
    script(server, lambda: status(404, name="lend-1"))
    with pytest.raises(NotFound, match="was deleted by another client"):
        await clerk.reserve(ASKED, "")
    assert methods(server) == ["POST", "GET"]


async def test_what_passes_is_waited_for(server, clerk):
    script(server, status(429), status(503), HANG_UP, lambda: found(RESERVED))
    assert (await clerk.reserve(ASKED, "")).status.phase == "Reserved"
    assert methods(server) == ["POST", *["GET"] * 4]


@pytest.mark.parametrize("key, is_withdrawn", [("", True), ("deploy-7", False)])
async def test_object_that_may_have_arrived_is_taken_back_if_it_is_nobody_elses(
    server, clerk, key, is_withdrawn
):
    script(server, lambda: found(RESERVED), create=HANG_UP)
    with pytest.raises(Unavailable):
        await clerk.reserve(ASKED, key)
    assert methods(server) == ["POST", "DELETE"][: 1 + is_withdrawn]


async def test_what_may_not_be_made_is_not_taken_back(server, clerk):
    script(server, lambda: found(RESERVED), create=status(403))
    with pytest.raises(Forbidden):
        await clerk.reserve(ASKED, "")
    assert methods(server) == ["POST"]


async def test_interrupted_borrower_takes_the_object_back(server, clerk):
    script(server, lambda: found(MADE))
    task = asyncio.create_task(clerk.reserve(ASKED, ""))
    await until(lambda: "GET" in methods(server))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert methods(server)[-1] == "DELETE"
