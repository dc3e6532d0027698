"""Responses: the root of every call, JSON bodies as they go over a socket, and pages of lists."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from email.utils import parsedate_to_datetime

import aiohttp
import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

import make
from kubelend.api import request
from kubelend.api.request import JsonResponse, RequestScope, paginate
from kubelend.broker.metrics import BrokerMetrics
from kubelend.core.errors import Forbidden, KubelendError
from kubelend.kits import clock
from kubelend.transports import server
from kubelend.transports.server import ServerLimits
from waiting import PATIENCE

Ending = Callable[[], JsonResponse]


class Root:
    """A root around a handler that ends like this, at the door or later, and what it reported as rejected."""

    def __init__(self, ending: Ending, *, at_the_door: bool) -> None:
        self.metrics = BrokerMetrics()
        self.rejected: list[tuple[str, KubelendError]] = []
        self._ending, self._at_the_door = ending, at_the_door
        self.handler = request.handle(self._enter, self._refused, self.metrics)

    def _enter(self, visit: RequestScope) -> Awaitable[web.StreamResponse]:
        visit.route = "version"
        if self._at_the_door:
            self._ending()
        return self._handle()

    async def _handle(self) -> web.StreamResponse:
        return self._ending()

    def _refused(self, visit: RequestScope, error: KubelendError) -> None:
        self.rejected.append((visit.route, error))

    async def call(self) -> tuple[int, dict[str, object]]:
        async with (
            server.serve_http(self.handler, "127.0.0.1", 0, ServerLimits()) as port,
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{port}/") as answer,
        ):
            return answer.status, json.loads(await answer.read())

    def count(self, name: str, **labels: str) -> float:
        """What all series with these labels say together."""
        text = self.metrics.render(self.metrics.snapshot(make.T0)).decode()
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )


def answers() -> JsonResponse:
    return JsonResponse({"version": "1"})


def refuses() -> JsonResponse:
    raise Forbidden("not you")


def fails() -> JsonResponse:
    raise ZeroDivisionError("a secret")


@pytest.fixture(params=[True, False], ids=["at the door", "in its handler"])
def at_the_door(request):
    return request.param


async def test_what_a_handler_answers_is_answered(at_the_door):
    root = Root(answers, at_the_door=at_the_door)
    assert await root.call() == (200, {"version": "1"})
    assert root.rejected == []


async def test_refusal_is_answered_counted_and_reported_with_the_route_it_came_to(at_the_door):
    root = Root(refuses, at_the_door=at_the_door)
    status, body = await root.call()
    assert (status, body["code"]) == (403, "Forbidden")
    assert [(route, type(error)) for route, error in root.rejected] == [("version", Forbidden)]
    refused = root.count("kubelend_http_requests_rejected_total", route="version", code="Forbidden")
    assert refused == 1


async def test_what_nobody_foresaw_is_logged_and_answered_without_its_details(at_the_door):
    root = Root(fails, at_the_door=at_the_door)
    with capture_logs() as logs:
        status, body = await root.call()
    assert (status, body["code"]) == (500, "Internal")
    assert body["error"] == "internal error; see the log of the broker"
    assert "secret" not in json.dumps(body)
    (line,) = [line for line in logs if line["event"] == "Request failed"]
    assert (line["route"], line["exc_info"]) == ("version", True)
    assert root.rejected == []


@pytest.mark.parametrize(
    "ending, status",
    [(answers, "200"), (refuses, "403"), (fails, "500")],
    ids=["answered", "refused", "failed"],
)
async def test_every_call_is_counted_and_timed_once(ending, status):
    root = Root(ending, at_the_door=False)
    with capture_logs():
        await root.call()
    labels = {"route": "version", "method": "GET", "code": status}
    assert root.count("kubelend_http_requests_total") == 1
    assert root.count("kubelend_http_requests_total", **labels) == 1
    assert root.count("kubelend_http_request_duration_seconds_count", route="version") == 1


GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"

CONTENT = {"name": "ü", "amount": 3}


@asynccontextmanager
async def connected(*, status: int = 200, closes: bool = False):
    """To a listener that gives an answer of this kind."""

    async def handler(_: web.BaseRequest) -> web.StreamResponse:
        answer = JsonResponse(CONTENT, status)
        if closes:
            answer.force_close()
        return answer

    async with server.serve_http(handler, "127.0.0.1", 0, ServerLimits()) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        yield reader, writer
        writer.close()


async def head_of(reader: asyncio.StreamReader) -> bytes:
    return await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE)


def fields(head: bytes) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in head.decode("ascii").strip().split("\r\n")[1:])


async def test_head_says_what_follows_and_when_it_was_said():
    async with connected(status=201) as (reader, writer):
        asked = clock.utc_now()
        writer.write(GET)
        head = await head_of(reader)
        said = fields(head)
        assert head.startswith(b"HTTP/1.1 201 Created\r\n")
        assert said.keys() == {"Content-Type", "Content-Length", "Date", "Connection"}
        assert said["Content-Type"] == "application/json"
        assert json.loads(await reader.readexactly(int(said["Content-Length"]))) == CONTENT
        # Whole seconds, and perhaps the ones of a moment ago.
        assert asked - 2 * make.SECOND < parsedate_to_datetime(said["Date"]) <= clock.utc_now()


@pytest.mark.parametrize(
    "start, closes, said",
    [
        pytest.param(b"GET / HTTP/1.1\r\n", False, "keep-alive", id="as usual"),
        pytest.param(b"GET / HTTP/1.1\r\n", True, "close", id="handler closes"),
        pytest.param(b"GET / HTTP/1.1\r\nConnection: close\r\n", False, "close", id="client does"),
        pytest.param(b"GET / HTTP/1.0\r\n", False, "close", id="old client"),
        pytest.param(
            b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n", False, "keep-alive", id="old, stays"
        ),
    ],
)
async def test_connection_stays_open_if_both_sides_want_it(start, closes, said):
    async with connected(closes=closes) as (reader, writer):
        writer.write(start + b"Host: x\r\n\r\n")
        head = fields(await head_of(reader))
        assert head["Connection"] == said
        await reader.readexactly(int(head["Content-Length"]))
        if said == "close":
            assert await asyncio.wait_for(reader.read(), PATIENCE) == b""


async def test_several_calls_on_one_connection_are_answered_in_turn():
    async with connected() as (reader, writer):
        writer.write(3 * GET)
        for _ in range(3):
            head = fields(await head_of(reader))
            assert json.loads(await reader.readexactly(int(head["Content-Length"]))) == CONTENT


async def test_who_asks_for_the_head_alone_gets_no_body():
    async with connected() as (reader, writer):
        writer.write(b"HEAD / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert int(fields(await head_of(reader))["Content-Length"]) > 0
        assert await asyncio.wait_for(reader.read(), PATIENCE) == b""


@pytest.mark.parametrize(
    "found, page",
    [
        pytest.param([], ([], ""), id="nothing"),
        pytest.param([1, 2], ([1, 2], ""), id="fewer than a page"),
        pytest.param([1, 2, 3], ([1, 2, 3], ""), id="a page and no more"),
        pytest.param([1, 2, 3, 4], ([1, 2, 3], "3"), id="more: after the last that is shown"),
    ],
)
def test_page_says_where_the_next_begins_if_there_is_one(found, page):
    assert paginate(found, 3, str) == page
