"""Use cases of the broker: advertise, reserve, release, cordon and the rest.

Each is a command or a query for the single writer. Policies and quotas are in `LimitService`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import datetime, timedelta

import msgspec
from msgspec.structs import replace

from kubelend.broker import change_log, naming, views
from kubelend.broker.leadership import ALONE, NOBODY
from kubelend.broker.metrics import Metrics, Outcome
from kubelend.broker.ports import Clock, Leadership, OpenStore, Replica
from kubelend.broker.writer import ACTOR, Writer
from kubelend.core import commands, explanations, quotas
from kubelend.core.commands import Command
from kubelend.core.decision import NoFit
from kubelend.core.errors import (
    Conflict,
    KeyReused,
    NotFound,
    QueueFull,
    QuotaExceeded,
    no_reservation,
)
from kubelend.core.ledger import Ledger
from kubelend.core.lifecycle import Phase, Reason
from kubelend.core.models import (
    Advertisement,
    ClusterId,
    Request,
    Reservation,
    ReservationId,
)

_REJECTIONS = (Conflict, KeyReused, QueueFull, QuotaExceeded)
"""The broker's decisions against a request, in contrast to failures and malformed requests."""


class Rules(msgspec.Struct, frozen=True):
    """Limits of time and number that apply to all clusters."""

    stale_after: timedelta = timedelta(minutes=10)
    """Age after which an advertisement is stale."""
    retention: timedelta = timedelta(hours=1)
    """How long a finished reservation stays in memory before it is archived."""
    max_waiting: int = 1000
    """Maximum number of requests waiting for capacity."""
    lost_after: timedelta = timedelta(minutes=5)
    """How long a provider may be stale before its reservations fail over; zero disables failover."""


class Broker(Writer):
    """The broker. Use `run` as a root task; call the rest once `unready` is None."""

    def __init__(
        self,
        open_store: OpenStore,
        clock: Clock,
        rules: Rules,
        metrics: Metrics,
        leadership: Leadership = ALONE,
        replica: Replica = NOBODY,
    ) -> None:
        ends = rules.retention, rules.lost_after
        super().__init__(open_store, clock, metrics, *ends, leadership, replica)
        self._rules = rules

    # -- providers

    async def advertise(
        self, advertisement: Advertisement, certificate_until: datetime | None = None
    ) -> tuple[views.ClusterView, list[Reservation]]:
        """Stores the advertisement of a cluster; returns its view and the reservations it has to hold."""
        stale_after = self._rules.stale_after
        return await self.change(
            lambda ledger, now: commands.advertise(
                ledger, advertisement, stale_after, now, certificate_until
            ),
            lambda ledger, cluster: (
                views.of_cluster(ledger, cluster),
                views.holds(ledger, cluster.id),
            ),
        )

    async def holds(self, provider: ClusterId) -> list[Reservation]:
        """Returns the reservations that a provider has to hold and that are not active yet."""
        return await self.read(lambda ledger: views.holds(ledger, provider))

    async def acknowledge(self, found: ReservationId, provider: ClusterId) -> Reservation:
        return await self._change_one(
            found, lambda ledger, now: commands.acknowledge(ledger, found, provider, now)
        )

    async def refuse(self, found: ReservationId, provider: ClusterId, why: str) -> Reservation:
        return await self._change_one(
            found, lambda ledger, now: commands.refuse(ledger, found, provider, why, now)
        )

    # -- requesters

    async def reserve(self, request: Request, id: ReservationId | None = None) -> Reservation:
        """Reserves resources in the best cluster, or queues the request if it may wait.

        A caller that names its objects passes `id`; the request is rejected if the ID exists.
        """
        new_id = id or naming.new_reservation_id(request.requester)
        limit = self._rules.max_waiting
        began = time.perf_counter()

        def view(ledger: Ledger, answer: ReservationId | NoFit) -> Reservation | NoFit:
            seen = answer if isinstance(answer, NoFit) else ledger.reservation(answer)
            self._metrics.decided(_outcome(seen), time.perf_counter() - began)
            return seen

        try:
            answer = await self.change(
                lambda ledger, now: commands.reserve(ledger, request, new_id, limit, now), view
            )
            if isinstance(answer, NoFit):
                self._metrics.refused_for_capacity(answer.explanation)
                raise explanations.no_capacity(answer.explanation)
        except _REJECTIONS as error:
            change_log.log_rejected(request, error, ACTOR.get())
            raise
        return answer

    async def activate(self, found: ReservationId) -> Reservation:
        return await self._change_one(
            found, lambda ledger, now: commands.activate(ledger, found, now)
        )

    async def renew(self, found: ReservationId, duration: timedelta | None) -> Reservation:
        def command(ledger: Ledger, now: datetime) -> Command[None]:
            longer = duration or ledger.reservation(found).request.duration
            return commands.renew(ledger, found, longer, now)

        try:
            return await self._change_one(found, command)
        except QuotaExceeded as error:
            change_log.log_renewal_rejected(found, error, ACTOR.get())
            raise

    async def release(self, found: ReservationId, reason: Reason) -> Reservation:
        try:
            return await self._change_one(
                found, lambda ledger, now: commands.release(ledger, found, reason, now)
            )
        except NotFound:  # it may be archived
            return await self.reservation(found)

    async def retire(self, found: ReservationId, reason: Reason) -> None:
        """Releases a reservation if it is not finished and archives it; its name can be used again."""
        await self.change(
            lambda ledger, now: commands.retire(ledger, found, reason, now),
            lambda _, answer: answer,
        )

    async def explain(self, request: Request, limit: int) -> explanations.Explanation:
        """Explains where a request would be placed now; changes nothing."""
        return await self._explained(request, None, limit)

    async def explain_reservation(self, found: Reservation, limit: int) -> explanations.Explanation:
        """Explains where the request of this reservation would fit now, in addition to what it holds."""
        return await self._explained(found.request, found, limit)

    # -- administrators

    async def cordon(self, cluster: ClusterId, why: str) -> views.ClusterView:
        return await self.change(
            lambda ledger, now: commands.cordon(ledger, cluster, why, now), views.of_cluster
        )

    async def uncordon(self, cluster: ClusterId) -> views.ClusterView:
        return await self.change(
            lambda ledger, now: commands.uncordon(ledger, cluster, now), views.of_cluster
        )

    async def drain(
        self, cluster: ClusterId, why: str
    ) -> tuple[views.ClusterView, list[Reservation]]:
        view, drained = await self.change(
            lambda ledger, now: commands.drain(ledger, cluster, why, now),
            lambda ledger, drained: (
                views.of_cluster(ledger, ledger.cluster(cluster)),
                [ledger.reservation(found) for found in drained],
            ),
        )
        change_log.log_drained(cluster, len(drained), ACTOR.get())
        return view, drained

    async def remove(self, cluster: ClusterId) -> None:
        await self.change(
            lambda ledger, now: commands.remove(ledger, cluster, now), lambda _, answer: answer
        )

    async def withdraw(self, cluster: ClusterId) -> None:
        """Removes the advertisement of a cluster; its reservations stay."""
        await self.change(
            lambda ledger, now: commands.withdraw(ledger, cluster, now), lambda _, answer: answer
        )

    # -- queries

    async def cluster(self, cluster: ClusterId) -> views.ClusterView:
        return await self.read(lambda ledger: views.of_cluster(ledger, ledger.cluster(cluster)))

    async def clusters(self, after: str, limit: int) -> list[views.ClusterView]:
        """Returns a page of clusters, ordered by ID."""

        def page(ledger: Ledger) -> list[views.ClusterView]:
            ids = ledger.fleet.page(after, limit)
            return [views.of_cluster(ledger, ledger.cluster(cluster)) for cluster in ids]

        return await self.read(page)

    async def reservation(self, found: ReservationId) -> Reservation:
        """Returns one reservation, also an archived one."""
        here = await self.read(lambda ledger: ledger.reservations.get(found))
        archived = here or await self.ask(lambda store: store.archived(found))
        if archived is None:
            raise no_reservation(found)
        return archived

    async def reservations(
        self, wanted: Callable[[Reservation], bool], cluster: ClusterId | None, page: views.Page
    ) -> list[Reservation]:
        """Returns a page of the matching reservations in memory, oldest first."""

        return await self.read(lambda ledger: views.page_of(ledger, wanted, cluster, page))

    async def unpaged_reservations(
        self, wanted: Callable[[Reservation], bool], cluster: ClusterId, most_over: int
    ) -> list[Reservation]:
        """Returns all matching unfinished reservations of a cluster, and the newest finished ones."""
        return await self.read(lambda ledger: views.unpaged(ledger, wanted, cluster, most_over))

    @asynccontextmanager
    async def stream(
        self, cluster: ClusterId, after: int | None, via: str = ""
    ) -> AsyncIterator[views.Opening]:
        """Opens a subscription to changes, with the state that the cluster has to receive first.

        `via` is the proxy of the connection, if any.
        """
        ledger, _ = self.present()
        feed = self.feeds.open(cluster, ledger.revision, via)
        self._metrics.stream_opened()
        try:
            opening = views.opening(ledger, feed, after)
            await self.settled()
            yield opening
        finally:
            self._metrics.stream_closed()
            self.feeds.close(feed)

    async def _explained(
        self, request: Request, found: Reservation | None, limit: int
    ) -> explanations.Explanation:
        ledger, now = self.present()
        question = quotas.question(ledger, request, now)
        if found is not None:
            question = replace(question, ticket=found.ticket, left=found.left)
        explanation = explanations.explain(question, ledger.fleet, limit)
        exceeds = quotas.excesses(ledger, request, found)
        await self.settled()
        return replace(explanation, quota=exceeds)

    async def _change_one(
        self, found: ReservationId, command: Callable[[Ledger, datetime], Command[None]]
    ) -> Reservation:
        return await self.change(command, lambda ledger, _: ledger.reservation(found))


def _outcome(answer: Reservation | NoFit) -> Outcome:
    if isinstance(answer, NoFit):
        return "rejected"
    return "queued" if answer.phase is Phase.PENDING else "placed"
