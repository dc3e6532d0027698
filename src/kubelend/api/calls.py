"""Request and application context of the handlers: bodies, query parameters, authorization, responses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from aiohttp import web

from kubelend.api import reading
from kubelend.api.answers import JsonResponse
from kubelend.api.callers import Authenticator
from kubelend.api.granting import GrantSigner
from kubelend.api.limits import RateLimiter
from kubelend.api.reading import Body
from kubelend.broker.journal import AuditLog
from kubelend.broker.limiting import LimitService
from kubelend.broker.membership import Membership
from kubelend.broker.metrics import Metrics
from kubelend.broker.service import Broker
from kubelend.broker.speakers import AgentSessions
from kubelend.core.errors import InvalidInput
from kubelend.core.models import ClusterId, ReservationId
from kubelend.pki.identities import Caller
from kubelend.wire.conversion import RequestLimits
from kubelend.wire.route import MAX_PAGE_SIZE

Item = TypeVar("Item")

JSON_HEADERS = {"Content-Type": "application/json"}


class AppContext(NamedTuple):
    """Dependencies of the handlers; created once by the composition root."""

    broker: Broker
    metrics: Metrics
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

    async def body(self, kind: type[Body]) -> Body:
        """Reads and decodes the body within the limits of size and time."""
        is_here = self.request.content.is_eof()
        body = await reading.read_body(self.request, kind, self.app.read_timeout)
        if not is_here:
            self.reauthenticate()  # the caller may have been revoked meanwhile
        return body

    async def optional_body(self, kind: type[Body]) -> Body:
        """Reads a body that may be empty."""
        body = await reading.read_optional_body(self.request, kind, self.app.read_timeout)
        self.reauthenticate()
        return body

    def reauthenticate(self) -> None:
        """Authenticates the caller again."""
        self.app.authenticator.recheck(self.request)

    def query_int(self, name: str, default: int, maximum: int) -> int:
        """Returns an integer from the query."""
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


def json_response(body: Any, status: int = 200) -> JsonResponse:
    """Returns a response with a body of `wire.bodies`."""
    return JsonResponse(body, status)
