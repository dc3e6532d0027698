"""Request and application context of the handlers: bodies, query parameters, authorization, responses.

The middleware around every handler adds timing, metrics, and errors as problem responses. Authentication and
the log of rejections are passed in: by `api.app` for the REST API, by `api.enrolment` for joining clients.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import structlog
from aiohttp import hdrs, web
from aiohttp.abc import AbstractStreamWriter
from msgspec import inspect

from kubelend.api.authentication import Authenticator
from kubelend.broker import authorization
from kubelend.broker.agent_sessions import AgentSessions
from kubelend.broker.audit_log import AuditLog
from kubelend.broker.membership import Membership
from kubelend.broker.metrics import BrokerMetrics
from kubelend.broker.service import Broker, LimitService
from kubelend.broker.streams import Subscription
from kubelend.core import lending
from kubelend.core.errors import (
    BodyTooLarge,
    Forbidden,
    IdentityInUse,
    InvalidIdentity,
    InvalidInput,
    KubelendError,
    LimitExceeded,
    MethodNotAllowed,
    NotFound,
    NotLeader,
    Revoked,
    TooSlow,
    Unavailable,
)
from kubelend.core.lifecycle import Role
from kubelend.core.models import ClusterId, Reservation, ReservationId
from kubelend.kits.ratelimit import RateLimiter
from kubelend.pki import identity
from kubelend.pki.grants import GrantSigner
from kubelend.pki.identity import Caller
from kubelend.wire import problems, route, routes
from kubelend.wire.conversion import RequestLimits
from kubelend.wire.route import MAX_PAGE_SIZE

Item = TypeVar("Item")

REQUEST_BYTES_PER_TOKEN, RESPONSE_BYTES_PER_TOKEN = 4096, 16384
"""A larger body or response counts as several calls in the rate limit, because it costs the broker more. Most
have one kilobyte."""
TOKENS_PER_PATTERN = 2
"""What compiling a pattern of a lending policy counts."""

JSON_CONTENT_TYPE: Final = "application/json"
JSON_HEADERS = {"Content-Type": JSON_CONTENT_TYPE}


class AppContext(NamedTuple):
    """Dependencies of the handlers; created once by the composition root."""

    broker: Broker
    metrics: BrokerMetrics
    terms: RequestLimits
    authenticator: Authenticator
    rate_limiter: RateLimiter
    membership: Membership
    limits: LimitService
    audit_log: AuditLog
    grant_signer: GrantSigner
    agent_sessions: AgentSessions
    version: str
    read_timeout: float
    """Seconds within which a body has to arrive."""


class RequestContext:
    """A request of an authenticated caller."""

    __slots__ = ("_path_params", "app", "caller", "request")

    def __init__(
        self,
        request: web.BaseRequest,
        caller: Caller,
        context: AppContext,
        names: Mapping[str, str],
    ) -> None:
        self.request = request
        self.caller = caller
        self.app = context
        self._path_params = names

    @property
    def broker(self) -> Broker:
        return self.app.broker

    @property
    def cluster(self) -> ClusterId:
        """The cluster in the path."""
        return ClusterId(self._path_params["cluster"])

    @property
    def reservation(self) -> ReservationId:
        """The reservation in the path."""
        return ReservationId(self._path_params["reservation"])

    def path_param(self, name: str) -> str:
        """Another parameter of the path."""
        return self._path_params[name]

    async def body(self, kind: type[Body], *, optional: bool = False) -> Body:
        """Reads and decodes the body within the limits of size and time."""
        is_here = self.request.content.is_eof()
        text = await read_body(self.request, self.app.read_timeout)
        if not is_here:
            self.reauthenticate()  # the caller may have been revoked meanwhile
        if cost := len(text) // REQUEST_BYTES_PER_TOKEN:
            self.app.rate_limiter.admit(self.caller.rate_key, cost)
        return decode_body(text, kind, optional=optional)

    @contextmanager
    def charge_patterns(self) -> Iterator[None]:
        """Charges the caller for the patterns that are compiled in here."""
        before = lending.compiled_patterns()
        try:
            yield
        finally:
            cost = TOKENS_PER_PATTERN * (lending.compiled_patterns() - before)
            self.app.rate_limiter.charge(self.caller.rate_key, cost)

    def reauthenticate(self) -> None:
        self.app.authenticator.recheck(self.request)

    def query_int(self, name: str, default: int, maximum: int) -> int:
        text = self.request.query.get(name)
        if text is None:
            return default
        if not (text.isascii() and text.isdigit() and len(text) <= 19 and int(text) <= maximum):
            raise InvalidInput(f"{name}: {text[:24]!r} is not an integer from 0 to {maximum}")
        return int(text)

    def query_bool(self, name: str) -> bool:
        """Returns a boolean from the query; false if absent."""
        text = self.request.query.get(name, "false").lower()
        if text not in {"true", "false"}:
            raise InvalidInput(f"{name}: {text[:24]!r} is neither true nor false")
        return text == "true"

    def page_size(self) -> int:
        return max(1, self.query_int("limit", 100, MAX_PAGE_SIZE))


def paginate(
    found: Sequence[Item], limit: int, key: Callable[[Item], str]
) -> tuple[Sequence[Item], str]:
    """Returns one page and the continue token, which is the `key` of its last item.

    Query one item more than `limit`: it shows whether there is a next page.
    """
    return found[:limit], key(found[limit - 1]) if len(found) > limit else ""


def check_path_name(name: str, noun: str) -> None:
    """Raises `NotFound` for a name in the path that nobody can have."""
    try:
        identity.check_common_name(name)
    except InvalidIdentity as error:
        raise NotFound(f"invalid {noun} {name[:64]!r}", hint=error.message) from None


def check_own_cluster(call: RequestContext, cluster: ClusterId) -> None:
    """Allows a cluster to see only itself; viewers and administrators see all."""
    if call.caller.role is Role.CLUSTER and call.caller.cluster != cluster:
        raise Forbidden(f"{call.caller.name} may not see {cluster}", hint="ask an administrator")


async def visible_reservation(call: RequestContext) -> Reservation:
    """Returns the reservation in the path to its clusters, viewers and administrators."""
    if call.caller.role is not Role.CLUSTER:
        return await call.broker.reservation(call.reservation)
    return await authorization.visible_to(call.broker, call.reservation, call.caller.cluster)


async def owned_reservation(call: RequestContext) -> Reservation:
    """Returns the reservation in the path to its requester and administrators, for a change."""
    if call.caller.role is Role.ADMIN:
        call.broker.check_leader()
        return await call.broker.reservation(call.reservation)
    return await authorization.owned_by(call.broker, call.reservation, call.caller.cluster)


SESSION_ROUTES = frozenset(found.name for found in routes.ROUTES if IdentityInUse in found.errors)
"""Routes that require the agent session. Certificate renewal does not."""


def claim_agent_session(
    sessions: AgentSessions, name: str, instance: str, caller: Caller, remote: str | None
) -> None:
    """Claims or touches the session of an agent; raises `IdentityInUse` while another one is active."""
    if caller.role is not Role.CLUSTER:
        return
    if name in SESSION_ROUTES:
        sessions.claim(caller.cluster, instance, _request_origin(caller, remote))
    else:
        sessions.touch(caller.cluster, instance)


def hold_agent_session(
    call: RequestContext, subscription: Subscription
) -> AbstractContextManager[None]:
    """Holds the agent session while its stream is open."""
    instance, caller = call.request.headers.get(route.AGENT_HEADER), call.caller
    if not instance:
        return nullcontext()
    origin = _request_origin(caller, call.request.remote)
    return call.app.agent_sessions.hold_open(caller.cluster, instance, origin, subscription)


def _request_origin(caller: Caller, remote: str | None) -> str:
    """Returns the proxy's name, or the remote address without one."""
    return f"through {caller.proxy}" if caller.via else f"from {remote or 'an unknown address'}"


Body = TypeVar("Body")

_HINT_SMALLER_BODY = "send a smaller body"


async def read_body(request: web.BaseRequest, timeout: float) -> bytes:
    """Reads the body, which has to arrive within `timeout` seconds."""
    content = request.content
    if content.is_eof() and content.exception() is None:
        text = content.read_nowait()
        _check_body_size(len(text), request.client_max_size)
        return text
    return await _wait_for_body(request, timeout)


def decode_body(text: bytes, kind: type[Body], *, optional: bool = False) -> Body:
    """Decodes a body; an optional one may be empty."""
    if optional and not text:
        return kind()
    try:
        return _decode_body(text, kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidInput(f"body: {error}") from None


def _decode_body(text: bytes, kind: type[Body]) -> Body:
    """A null in an optional field is the same as no field, as clients in Go send it."""
    try:
        body: Body = _body_decoder(kind).decode(text)
    except msgspec.ValidationError:
        if b"null" not in text:
            raise
        given = _without_null_fields(msgspec.json.decode(text), inspect.type_info(kind))
        body = _body_decoder(kind).decode(msgspec.json.encode(given))
    return body


def _without_null_fields(given: Any, kind: inspect.Type) -> Any:
    """Drops the nulls of known fields, which mean no value, at any depth; all other nulls are errors."""
    match kind:
        case inspect.Metadata():
            return _without_null_fields(given, kind.type)
        case inspect.UnionType():
            kinds = [one for one in kind.types if isinstance(one, inspect.StructType)]
            return _without_null_fields(given, kinds[0]) if kinds else given
        case inspect.ListType() if isinstance(given, list):
            return [_without_null_fields(one, kind.item_type) for one in given]
        case inspect.StructType() if isinstance(given, dict):
            types = {field.encode_name: field.type for field in kind.fields}
            return {
                name: _without_null_fields(value, types[name]) if name in types else value
                for name, value in given.items()
                if value is not None or name not in types
            }
    return given


_body_decoder: Callable[[Any], msgspec.json.Decoder[Any]] = lru_cache(maxsize=None)(
    msgspec.json.Decoder
)


def _check_body_size(size: int, largest: int) -> None:
    if size > largest:
        raise BodyTooLarge(f"body: {size} bytes are more than {largest}", hint=_HINT_SMALLER_BODY)


async def _wait_for_body(request: web.BaseRequest, timeout: float) -> bytes:
    _check_body_size(request.content_length or 0, request.client_max_size)
    try:
        async with asyncio.timeout(timeout):
            # Some clients send this before a large body.
            if request.headers.get("Expect", "").lower() == "100-continue":
                await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                request.writer.output_size = 0  # the final response has not begun
            return await request.read()
    except TimeoutError:
        raise TooSlow(
            "body: timed out while reading", hint="send the body without pauses"
        ) from None
    except web.HTTPRequestEntityTooLarge as error:
        raise BodyTooLarge(f"body: {error.text}", hint=_HINT_SMALLER_BODY) from None
    except web.RequestPayloadError:
        # Otherwise the server would wait for the rest, and log our response.
        request.content.feed_eof()
        raise InvalidInput("body: invalid content or transfer encoding") from None


_encode_json = msgspec.json.Encoder().encode


class JsonResponse(web.StreamResponse):
    """A response with a body of `wire.bodies`; can be sent once."""

    def __init__(self, body: Any, status: int = HTTPStatus.OK) -> None:
        super().__init__(status=status)
        self.body = _encode_json(body)
        self._keeps_alive = True

    @property
    def keep_alive(self) -> bool:
        return self._keeps_alive

    def force_close(self) -> None:
        self._keeps_alive = False

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter:
        self._keeps_alive = self._keeps_alive and request.keep_alive
        head = _response_head(self.status, self._keeps_alive, int(time.time())) % len(self.body)
        await request.writer.write(head if request.method == hdrs.METH_HEAD else head + self.body)
        return request.writer

    async def write_eof(self, data: bytes = b"") -> None:
        """Does nothing: `prepare` has sent everything."""


@lru_cache(maxsize=64)
def _response_head(status: int, stays_open: bool, now: int) -> bytes:
    lines = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
        f"Content-Type: {JSON_CONTENT_TYPE}",
        "Content-Length: %d",
        f"Date: {formatdate(now, usegmt=True)}",
        f"Connection: {'keep-alive' if stays_open else 'close'}",
    )
    return "\r\n".join((*lines, "", "")).encode("ascii")


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
