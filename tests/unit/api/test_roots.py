"""The root of a call: whatever becomes of it, it is answered, timed and counted once."""

import json
from collections.abc import Awaitable, Callable

import aiohttp
import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

import make
from kubelend.api import middleware
from kubelend.api.middleware import RequestScope
from kubelend.api.request import JsonResponse
from kubelend.broker.metrics import Metrics
from kubelend.core.errors import Forbidden, KubelendError
from kubelend.transports import server
from kubelend.transports.server import ServerLimits

Ending = Callable[[], JsonResponse]


class Root:
    """A root around a handler that ends like this, at the door or later, and what was told of it."""

    def __init__(self, ending: Ending, *, at_the_door: bool) -> None:
        self.metrics = Metrics()
        self.told: list[tuple[str, KubelendError]] = []
        self._ending, self._at_the_door = ending, at_the_door
        self.handler = middleware.handle(self._enter, self._refused, self.metrics)

    def _enter(self, visit: RequestScope) -> Awaitable[web.StreamResponse]:
        visit.route = "version"
        if self._at_the_door:
            self._ending()
        return self._handle()

    async def _handle(self) -> web.StreamResponse:
        return self._ending()

    def _refused(self, visit: RequestScope, error: KubelendError) -> None:
        self.told.append((visit.route, error))

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
    assert root.told == []


async def test_refusal_is_answered_counted_and_told_with_the_route_it_came_to(at_the_door):
    root = Root(refuses, at_the_door=at_the_door)
    status, body = await root.call()
    assert (status, body["code"]) == (403, "Forbidden")
    assert [(route, type(error)) for route, error in root.told] == [("version", Forbidden)]
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
    assert root.told == []


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
