"""Request and application context of the handlers: bodies, query parameters, authorization, responses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from aiohttp import web

from kubelend.api import reading
from kubelend.api.answers import JsonAnswer
from kubelend.api.callers import Callers
from kubelend.api.granting import Granting
from kubelend.api.limits import RateLimiter
from kubelend.api.reading import Body
from kubelend.broker.journal import Journal
from kubelend.broker.limiting import Limiting
from kubelend.broker.membership import Membership
from kubelend.broker.metrics import Metrics
from kubelend.broker.service import Broker
from kubelend.broker.speakers import Speakers
from kubelend.core.errors import InvalidInput
from kubelend.core.models import ClusterId, ReservationId
from kubelend.pki.identities import Caller
from kubelend.wire.conversion import Terms
from kubelend.wire.route import LONGEST_PAGE

Item = TypeVar("Item")

JSON = {"Content-Type": "application/json"}


class Context(NamedTuple):
    """Dependencies of the handlers; created once by the composition root."""

    broker: Broker
    metrics: Metrics
    terms: Terms
    callers: Callers
    limiter: RateLimiter
    membership: Membership
    limiting: Limiting
    journal: Journal
    granting: Granting
    speakers: Speakers
    version: str
    read_timeout: float
    """Seconds within which a body has to arrive."""


class Call:
    """A request of an authenticated caller."""

    __slots__ = ("_names", "caller", "context", "request")

    def __init__(
        self, request: web.BaseRequest, caller: Caller, context: Context, names: Mapping[str, str]
    ) -> None:
        self.request = request
        self.caller = caller
        self.context = context
        self._names = names

    @property
    def broker(self) -> Broker:
        return self.context.broker

    @property
    def cluster(self) -> ClusterId:
        """The cluster in the path."""
        return ClusterId(self._names["cluster"])

    @property
    def reservation(self) -> ReservationId:
        """The reservation in the path."""
        return ReservationId(self._names["reservation"])

    def named(self, what: str) -> str:
        """Another parameter of the path."""
        return self._names[what]

    async def body(self, kind: type[Body]) -> Body:
        """Reads and decodes the body within the limits of size and time."""
        is_here = self.request.content.is_eof()
        body = await reading.body(self.request, kind, self.context.read_timeout)
        if not is_here:
            self.check_again()  # the caller may have been revoked meanwhile
        return body

    async def optional_body(self, kind: type[Body]) -> Body:
        """Reads a body that may be empty."""
        body = await reading.optional_body(self.request, kind, self.context.read_timeout)
        self.check_again()
        return body

    def check_again(self) -> None:
        """Authenticates the caller again."""
        self.context.callers.check_again(self.request)

    def number(self, name: str, default: int, largest: int) -> int:
        """Returns an integer from the query."""
        text = self.request.query.get(name)
        if text is None:
            return default
        if not (text.isascii() and text.isdigit() and len(text) <= 19 and int(text) <= largest):
            raise InvalidInput(f"{name}: {text[:24]!r} is not an integer from 0 to {largest}")
        return int(text)

    def flag(self, name: str) -> bool:
        """Returns a boolean from the query; false if absent."""
        text = self.request.query.get(name, "false").lower()
        if text not in {"true", "false"}:
            raise InvalidInput(f"{name}: {text[:24]!r} is neither true nor false")
        return text == "true"

    def page_size(self) -> int:
        return max(1, self.number("limit", 100, LONGEST_PAGE))


def cut(
    found: Sequence[Item], limit: int, key: Callable[[Item], str]
) -> tuple[Sequence[Item], str]:
    """Returns one page and the continue token, which is the `key` of its last item.

    Query one item more than `limit`: it shows whether there is a next page.
    """
    return found[:limit], key(found[limit - 1]) if len(found) > limit else ""


def json(body: Any, status: int = 200) -> JsonAnswer:
    """Returns a response with a body of `wire.bodies`."""
    return JsonAnswer(body, status)
