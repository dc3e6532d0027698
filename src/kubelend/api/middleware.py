"""Middleware around every handler: timing, metrics, and errors as problem responses.

Authentication and the log of rejections are passed in: by `api.app` for the REST API, by `api.enrolment`
for joining clients.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus

import msgspec
import structlog
from aiohttp import web

from kubelend.broker.metrics import BrokerMetrics
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
from kubelend.pki import identity
from kubelend.pki.identity import Caller
from kubelend.wire import problems

CLIENT_CLOSED_REQUEST = 499
"""Status in metrics for a client that disconnected before the response; never sent."""
UNKNOWN_ROUTE = "unknown"
RETRY_AFTER_SECONDS = "2"
"""Seconds in the Retry-After header of a broker that is unavailable."""

log = structlog.get_logger("kubelend.api")


class RequestScope:
    """A request and what is known about it so far, for the log of a rejection."""

    __slots__ = ("caller", "path_params", "request", "route")

    def __init__(self, request: web.BaseRequest) -> None:
        self.request = request
        self.route = UNKNOWN_ROUTE
        self.path_params: Mapping[str, str] = {}
        """Parameters of the path."""
        self.caller: Caller | None = None


HttpHandler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
Dispatch = Callable[[RequestScope], Awaitable[web.StreamResponse]]
"""Authenticates a request and calls its handler. Not a coroutine, to save one per request."""
OnRejected = Callable[[RequestScope, KubelendError], None]
OnAnswered = Callable[[RequestScope, web.StreamResponse], None]


def handle(
    dispatch: Dispatch,
    on_rejected: OnRejected,
    metrics: BrokerMetrics,
    on_answered: OnAnswered = lambda *_: None,
) -> HttpHandler:
    """Returns the handler for the server; `on_rejected` is called for every `KubelendError`."""

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        began = time.perf_counter()
        scope = RequestScope(request)
        try:
            response = await dispatch(scope)
            on_answered(scope, response)
        except KubelendError as error:
            metrics.count_rejected_request(scope.route, error.code)
            on_rejected(scope, error)
            response = error_response(error, request)
        except asyncio.CancelledError:
            # The client disconnected, which is how streams end, or the broker is stopping.
            status = HTTPStatus.OK if request.writer.output_size else CLIENT_CLOSED_REQUEST
            metrics.observe_request(
                scope.route, request.method, status, time.perf_counter() - began
            )
            raise
        except Exception:  # log, respond, and serve the next request
            log.exception("Request failed", route=scope.route)
            failure = KubelendError("internal error", hint="see the log of the broker")
            response = error_response(failure, request)
        took = time.perf_counter() - began
        metrics.observe_request(scope.route, request.method, response.status, took)
        return response

    return answer


def error_response(error: KubelendError, request: web.BaseRequest) -> web.StreamResponse:
    body = problems.to_problem(error)
    headers = {"Content-Type": problems.CONTENT_TYPE}
    if isinstance(error, LimitExceeded) and error.retryable:
        headers["Retry-After"] = str(max(1, round(error.retry_after)))
    if isinstance(error, Unavailable):
        headers["Retry-After"] = RETRY_AFTER_SECONDS
    if isinstance(error, MethodNotAllowed):
        headers["Allow"] = ", ".join(error.allowed)
    response = web.Response(body=msgspec.json.encode(body), status=body.status, headers=headers)
    broken = request.content.exception() is not None
    if broken or isinstance(error, TooSlow | BodyTooLarge):
        response.force_close()  # do not wait for the rest of the body
    if isinstance(error, Revoked) and identity.CLIENT_CERT_HEADER not in request.headers:
        response.force_close()  # a proxy's connection is shared by many callers
    if isinstance(error, NotLeader):
        response.force_close()  # the next connection may reach the leader
    return response
