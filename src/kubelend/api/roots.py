"""The root of a call: what surrounds every handler, on whichever listener it came in.

Here alone a call is timed and counted, an error becomes a problem body, and what nobody expected is logged
and answered, so that the next call is served. Who may come in, and what is told of who may not, is for those
who use it to say: `api.binding` for the REST interface, `api.enrolment` for newcomers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping

import msgspec
import structlog
from aiohttp import web

from kubelend.broker.metrics import Metrics
from kubelend.core.errors import (
    BodyTooLarge,
    KubelendError,
    LimitExceeded,
    MethodNotAllowed,
    NotLeader,
    Revoked,
    TooSlow,
    Unavailable,
)
from kubelend.pki import forwarding
from kubelend.pki.identities import Caller
from kubelend.wire import problems

OK = 200
GONE = 499
"""What is counted for a client that did not wait for its answer; nobody is sent it."""
UNKNOWN_ROUTE = "unknown"
RETRY_AFTER = "2"
"""Seconds after which to ask a broker again that cannot answer now."""

log = structlog.get_logger("kubelend.api")


class Visit:
    """A request, and what is known of it so far: a refusal tells as much as was found out before it."""

    __slots__ = ("caller", "names", "request", "route")

    def __init__(self, request: web.BaseRequest) -> None:
        self.request = request
        self.route = UNKNOWN_ROUTE
        self.names: Mapping[str, str] = {}
        """What its path names."""
        self.caller: Caller | None = None


HttpHandler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
Enter = Callable[[Visit], Awaitable[web.StreamResponse]]
"""Lets a visit in and gives it to its handler. No coroutine itself: every call would pay for one more."""
Refused = Callable[[Visit, KubelendError], None]


def root(enter: Enter, refused: Refused, metrics: Metrics) -> HttpHandler:
    """What the server calls; `refused` is told of every error that has a class."""

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        began = time.perf_counter()
        visit = Visit(request)
        try:
            response = await enter(visit)
        except KubelendError as error:
            metrics.refused(visit.route, error.code)
            refused(visit, error)
            response = problem(error, request)
        except asyncio.CancelledError:
            # The client has gone, as from a stream it does sooner or later; or the broker stops.
            status = OK if request.writer.output_size else GONE
            metrics.answered(visit.route, request.method, status, time.perf_counter() - began)
            raise
        except Exception:  # the root of a call: log, answer, and serve the next
            log.exception("call failed", route=visit.route)
            failure = KubelendError("the broker failed", hint="its log says why")
            response = problem(failure, request)
        took = time.perf_counter() - began
        metrics.answered(visit.route, request.method, response.status, took)
        return response

    return answer


def problem(error: KubelendError, request: web.BaseRequest) -> web.StreamResponse:
    """An error as an answer."""
    body = problems.to_problem(error)
    headers = {"Content-Type": problems.CONTENT_TYPE}
    if isinstance(error, LimitExceeded) and error.retryable:
        headers["Retry-After"] = str(max(1, round(error.retry_after)))
    if isinstance(error, Unavailable):
        headers["Retry-After"] = RETRY_AFTER
    if isinstance(error, MethodNotAllowed):
        headers["Allow"] = ", ".join(error.allowed)
    response = web.Response(body=msgspec.json.encode(body), status=body.status, headers=headers)
    broken = request.content.exception() is not None
    if broken or isinstance(error, TooSlow | BodyTooLarge):
        response.force_close()  # the rest of the body is not waited for
    if isinstance(error, Revoked) and forwarding.HEADER not in request.headers:
        response.force_close()  # a proxy's connection is not its own to lose
    if isinstance(error, NotLeader):
        response.force_close()  # the next one may lead to the broker that does
    return response
