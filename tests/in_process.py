"""A broker in this very process, spoken to without a network: for tests and simulations.

Bodies are encoded and read again as if they had been sent, and errors take the way of a problem document,
so that a caller cannot tell it from HTTP: it sees the same classes, the same words, the same instructions.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from datetime import timedelta
from typing import TypeVar

import msgspec

from kubelend.broker import authorization, streams
from kubelend.broker.service import Broker, PageRequest, StreamStart
from kubelend.broker.streams import Instruction, Subscription
from kubelend.broker.writer import CURRENT_ACTOR
from kubelend.communicators import factory
from kubelend.core import durations
from kubelend.core.audit_log import Actor
from kubelend.core.errors import (
    BrokerUnreachable,
    InvalidInput,
    KubelendError,
    LimitExceeded,
    NotReady,
)
from kubelend.core.lifecycle import FINAL, Reason, Role
from kubelend.core.models import ClusterId, Reservation, ReservationId
from kubelend.wire import bodies, conversion, problems, route
from kubelend.wire.conversion import RequestLimits

Body = TypeVar("Body", bound=bodies.Body)
Granting = Callable[[Reservation, ClusterId], Awaitable[str | None]]

TERMS = RequestLimits(timedelta(hours=1), timedelta(days=30), timedelta(hours=1))
PAGE = 1000
LOOK_UP_EVERY = 15.0
"""Seconds after which a stream without news looks whether it still is one."""


class InProcessCommunicator:
    """One cluster's conversation with a broker whose `run` is a task of the same loop."""

    def __init__(
        self,
        broker: Broker,
        cluster: str,
        *,
        terms: RequestLimits = TERMS,
        timeout: timedelta = timedelta(seconds=30),
        granting: Granting | None = None,
    ) -> None:
        """`granting` signs what instructions carry; without it they carry none."""
        self._broker = broker
        self._cluster = ClusterId(cluster)
        self._terms = terms
        self._timeout = timeout
        self._granting = granting
        self._last_event: int | None = None
        self._feeds: set[Subscription] = set()
        self._is_closed = False

    async def publish(self, advertisement: bodies.Advertisement) -> bodies.PublishResult:
        async with self._call():
            body = _sent(advertisement)
            authorization.check_cluster_id(body.cluster_id, self._cluster)
            offer = conversion.to_advertisement(body, self._cluster, self._broker.clock())
            view, holds = await self._broker.advertise(offer)
            answer = conversion.published_advertisement(body, view.cluster, view.reserved)
            return _sent(
                bodies.PublishResult(answer, list(map(conversion.from_reservation, holds)))
            )

    async def request(self, request: bodies.ReservationRequest, key: str) -> bodies.Reservation:
        async with self._call():
            body = _sent(request)
            wish = conversion.to_request(
                body, self._cluster, route.check_idempotency_key(key), self._terms
            )
            return _body(await self._broker.reserve(wish))

    async def activate(self, reservation: str) -> bodies.Reservation:
        async with self._call():
            found = await self._owned(reservation)
            return _body(await self._broker.activate(authorization.unfinished(found)))

    async def renew(self, reservation: str, duration: str = "") -> bodies.Reservation:
        async with self._call():
            body = _sent(bodies.RenewRequest(duration))
            found = await self._owned(reservation)
            longer = conversion.bounded_duration(body.duration, self._terms) if duration else None
            return _body(await self._broker.renew(authorization.unfinished(found), longer))

    async def release(self, reservation: str) -> bodies.Reservation:
        async with self._call():
            found = await self._owned(reservation)
            return _body(await self._broker.release(found.id, Reason.BY_REQUESTER))

    async def find(self, reservation: str) -> bodies.Reservation:
        async with self._call():
            return _body(
                await authorization.visible_to(
                    self._broker, ReservationId(reservation), self._cluster
                )
            )

    async def instructions(self) -> list[bodies.Reservation]:
        found: list[Reservation] = []
        while True:
            async with self._call():
                after = found[-1].ticket if found else 0
                page = await self._broker.reservations(
                    self._is_own, self._cluster, PageRequest(after, PAGE)
                )
            found += page
            if len(page) < PAGE:
                return list(map(_body, found))

    async def stream(
        self, on_reset: Callable[[], None]
    ) -> AsyncGenerator[bodies.Instruction, None]:
        if self._is_closed:
            raise factory.closed_error()
        with _wired():
            async with self._broker.stream(self._cluster, self._last_event) as opening:
                if not opening.resumed:
                    self._last_event = None
                    on_reset()
                async with aclosing(self._told(opening)) as told:
                    async for instruction in told:
                        self._last_event = instruction.revision
                        yield instruction
        raise self._ended()

    async def acknowledge(self, reservation: str) -> bodies.Reservation:
        async with self._call():
            return _body(
                await authorization.acknowledge_hold(
                    self._broker, ReservationId(reservation), self._cluster
                )
            )

    async def refuse(self, reservation: str, reason: str) -> bodies.Reservation:
        async with self._call():
            why = _sent(bodies.RefuseRequest(reason)).reason
            return _body(
                await authorization.refuse_hold(
                    self._broker, ReservationId(reservation), self._cluster, why
                )
            )

    async def ping(self) -> None:
        async with self._call():
            if self._broker.unready is not None:
                raise NotReady(
                    f"the broker is not ready: {self._broker.unready}", hint="try again later"
                )

    async def close(self) -> None:
        self._is_closed = True
        for feed in self._feeds:
            feed.close()

    @asynccontextmanager
    async def _call(self) -> AsyncIterator[None]:
        if self._is_closed:
            raise factory.closed_error()
        before = CURRENT_ACTOR.set(Actor(self._cluster, Role.CLUSTER, ""))
        try:
            with _wired():
                async with asyncio.timeout(self._timeout.total_seconds()):
                    yield
        except TimeoutError:
            within = durations.format_duration_short(self._timeout)
            raise BrokerUnreachable(f"the broker did not answer within {within}") from None
        finally:
            CURRENT_ACTOR.reset(before)

    def _ended(self) -> BrokerUnreachable:
        if self._is_closed:
            return factory.closed_error()
        return BrokerUnreachable("the broker ended the stream")

    async def _owned(self, reservation: str) -> Reservation:
        return await authorization.owned_by(self._broker, ReservationId(reservation), self._cluster)

    def _is_own(self, found: Reservation) -> bool:
        return found.phase not in FINAL and self._cluster in (found.requester, found.target)

    async def _told(self, opening: StreamStart) -> AsyncGenerator[bodies.Instruction, None]:
        """What a stream says until it is over."""
        feed, news = opening.subscription, opening.changes
        self._feeds.add(feed)
        try:
            while True:
                for instruction in self._instructions(news):
                    yield await self._signed(instruction)
                if feed.closed:
                    return
                news = await feed.read(LOOK_UP_EVERY)
        finally:
            self._feeds.discard(feed)

    def _instructions(self, news: Iterable[Reservation]) -> Iterator[Instruction]:
        for found in news:
            yield from streams.instructions_for(self._cluster, found)

    async def _signed(self, instruction: Instruction) -> bodies.Instruction:
        found = instruction.reservation
        grant = await self._granting(found, self._cluster) if self._granting else None
        return _sent(authorization.instruction_body(instruction, grant or ""))


def _body(found: Reservation) -> bodies.Reservation:
    return _sent(conversion.from_reservation(found))


def _sent(body: Body) -> Body:
    """What arrives when this is sent; what the type forbids is refused as a broker would."""
    try:
        return msgspec.json.decode(msgspec.json.encode(body), type=type(body))
    except msgspec.MsgspecError as problem:
        raise InvalidInput(f"body: {problem}") from None


@contextmanager
def _wired() -> Iterator[None]:
    """Errors as they arrive: what only the broker is to know stays behind."""
    try:
        yield
    except KubelendError as error:
        problem = problems.to_problem(error)
        received = problems.error_from_response(problem.status, msgspec.json.encode(problem))
        if isinstance(error, LimitExceeded) and isinstance(received, LimitExceeded):
            received.retry_after = max(1, round(error.retry_after))
        raise received from None
