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
from kubelend.broker.leadership import NO_REPLICA, SINGLE_REPLICA
from kubelend.broker.metrics import Metrics, PlacementOutcome
from kubelend.broker.ports import Clock, Leadership, OpenStore, Replica
from kubelend.broker.writer import CURRENT_ACTOR, LedgerWriter
from kubelend.core import commands, explanations, quotas
from kubelend.core.commands import Command
from kubelend.core.decision import NoFit
from kubelend.core.errors import (
    Conflict,
    KeyReused,
    NotFound,
    QueueFull,
    QuotaExceeded,
    reservation_not_found,
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


class BrokerRules(msgspec.Struct, frozen=True):
    """Limits of time and number that apply to all clusters."""

    stale_after: timedelta = timedelta(minutes=10)
    """Age after which an advertisement is stale."""
    retention: timedelta = timedelta(hours=1)
    """How long a finished reservation stays in memory before it is archived."""
    max_waiting: int = 1000
    """Maximum number of requests waiting for capacity."""
    lost_after: timedelta = timedelta(minutes=5)
    """How long a provider may be stale before its reservations fail over; zero disables failover."""


class Broker(LedgerWriter):
    """The broker. Use `run` as a root task; call the rest once `unready` is None."""

    def __init__(
        self,
        open_store: OpenStore,
        clock: Clock,
        rules: BrokerRules,
        metrics: Metrics,
        leadership: Leadership = SINGLE_REPLICA,
        replica: Replica = NO_REPLICA,
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
                views.cluster_view(ledger, cluster),
                views.held_reservations(ledger, cluster.id),
            ),
        )

    async def holds(self, provider: ClusterId) -> list[Reservation]:
        """Returns the reservations that a provider has to hold and that are not active yet."""
        return await self.read(lambda ledger: views.held_reservations(ledger, provider))

    async def acknowledge(self, reservation: ReservationId, provider: ClusterId) -> Reservation:
        return await self._change_one(
            reservation,
            lambda ledger, now: commands.acknowledge(ledger, reservation, provider, now),
        )

    async def refuse(
        self, reservation: ReservationId, provider: ClusterId, reason: str
    ) -> Reservation:
        return await self._change_one(
            reservation,
            lambda ledger, now: commands.refuse(ledger, reservation, provider, reason, now),
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
            self._metrics.observe_placement(_placement_outcome(seen), time.perf_counter() - began)
            return seen

        try:
            answer = await self.change(
                lambda ledger, now: commands.reserve(ledger, request, new_id, limit, now), view
            )
            if isinstance(answer, NoFit):
                self._metrics.count_placement_failure(answer.explanation)
                raise explanations.no_capacity_error(answer.explanation)
        except _REJECTIONS as error:
            change_log.log_rejected(request, error, CURRENT_ACTOR.get())
            raise
        return answer

    async def activate(self, reservation: ReservationId) -> Reservation:
        return await self._change_one(
            reservation, lambda ledger, now: commands.activate(ledger, reservation, now)
        )

    async def renew(self, reservation: ReservationId, duration: timedelta | None) -> Reservation:
        def command(ledger: Ledger, now: datetime) -> Command[None]:
            longer = duration or ledger.reservation(reservation).request.duration
            return commands.renew(ledger, reservation, longer, now)

        try:
            return await self._change_one(reservation, command)
        except QuotaExceeded as error:
            change_log.log_renewal_rejected(reservation, error, CURRENT_ACTOR.get())
            raise

    async def release(self, reservation: ReservationId, reason: Reason) -> Reservation:
        try:
            return await self._change_one(
                reservation, lambda ledger, now: commands.release(ledger, reservation, reason, now)
            )
        except NotFound:  # it may be archived
            return await self.reservation(reservation)

    async def release_and_archive(self, reservation: ReservationId, reason: Reason) -> None:
        """Releases a reservation if it is not finished and archives it; its name can be used again."""
        await self.change(
            lambda ledger, now: commands.purge_reservation(ledger, reservation, reason, now),
            lambda _, answer: answer,
        )

    async def explain(self, request: Request, limit: int) -> explanations.Explanation:
        """Explains where a request would be placed now; changes nothing."""
        return await self._explain(request, None, limit)

    async def explain_reservation(self, found: Reservation, limit: int) -> explanations.Explanation:
        """Explains where the request of this reservation would fit now, in addition to what it holds."""
        return await self._explain(found.request, found, limit)

    # -- administrators

    async def cordon(self, cluster: ClusterId, reason: str) -> views.ClusterView:
        return await self.change(
            lambda ledger, now: commands.cordon(ledger, cluster, reason, now), views.cluster_view
        )

    async def uncordon(self, cluster: ClusterId) -> views.ClusterView:
        return await self.change(
            lambda ledger, now: commands.uncordon(ledger, cluster, now), views.cluster_view
        )

    async def drain(
        self, cluster: ClusterId, reason: str
    ) -> tuple[views.ClusterView, list[Reservation]]:
        view, drained = await self.change(
            lambda ledger, now: commands.drain(ledger, cluster, reason, now),
            lambda ledger, drained: (
                views.cluster_view(ledger, ledger.cluster(cluster)),
                [ledger.reservation(found) for found in drained],
            ),
        )
        change_log.log_drained(cluster, len(drained), CURRENT_ACTOR.get())
        return view, drained

    async def remove(self, cluster: ClusterId) -> None:
        await self.change(
            lambda ledger, now: commands.remove_cluster(ledger, cluster, now),
            lambda _, answer: answer,
        )

    async def withdraw(self, cluster: ClusterId) -> None:
        """Removes the advertisement of a cluster; its reservations stay."""
        await self.change(
            lambda ledger, now: commands.withdraw_offer(ledger, cluster, now),
            lambda _, answer: answer,
        )

    # -- queries

    async def cluster(self, cluster: ClusterId) -> views.ClusterView:
        return await self.read(lambda ledger: views.cluster_view(ledger, ledger.cluster(cluster)))

    async def clusters(self, after: str, limit: int) -> list[views.ClusterView]:
        """Returns a page of clusters, ordered by ID."""

        def page(ledger: Ledger) -> list[views.ClusterView]:
            ids = ledger.fleet.page(after, limit)
            return [views.cluster_view(ledger, ledger.cluster(cluster)) for cluster in ids]

        return await self.read(page)

    async def reservation(self, reservation: ReservationId) -> Reservation:
        """Returns one reservation, also an archived one."""
        here = await self.read(lambda ledger: ledger.reservations.get(reservation))
        archived = here or await self.query_store(lambda store: store.archived(reservation))
        if archived is None:
            raise reservation_not_found(reservation)
        return archived

    async def reservations(
        self,
        matches: Callable[[Reservation], bool],
        cluster: ClusterId | None,
        page: views.PageRequest,
    ) -> list[Reservation]:
        """Returns a page of the matching reservations in memory, oldest first."""

        return await self.read(
            lambda ledger: views.reservations_page(ledger, matches, cluster, page)
        )

    async def unpaged_reservations(
        self, matches: Callable[[Reservation], bool], cluster: ClusterId, max_finished: int
    ) -> list[Reservation]:
        """Returns all matching unfinished reservations of a cluster, and the newest finished ones."""
        return await self.read(
            lambda ledger: views.unpaged_reservations(ledger, matches, cluster, max_finished)
        )

    @asynccontextmanager
    async def stream(
        self, cluster: ClusterId, after: int | None, via: str = ""
    ) -> AsyncIterator[views.StreamStart]:
        """Opens a subscription to changes, with the state that the cluster has to receive first.

        `via` is the proxy of the connection, if any.
        """
        ledger, _ = self.current()
        feed = self.streams.open(cluster, ledger.revision, via)
        self._metrics.stream_opened()
        try:
            opening = views.start_stream(ledger, feed, after)
            await self.wait_durable()
            yield opening
        finally:
            self._metrics.stream_closed()
            self.streams.close(feed)

    async def _explain(
        self, request: Request, found: Reservation | None, limit: int
    ) -> explanations.Explanation:
        ledger, now = self.current()
        question = quotas.query_for_request(ledger, request, now)
        if found is not None:
            question = replace(question, ticket=found.ticket, excluded_before=found.left)
        explanation = explanations.explain_placement(question, ledger.fleet, limit)
        exceeds = quotas.quota_violations(ledger, request, found)
        await self.wait_durable()
        return replace(explanation, quota=exceeds)

    async def _change_one(
        self, found: ReservationId, command: Callable[[Ledger, datetime], Command[None]]
    ) -> Reservation:
        return await self.change(command, lambda ledger, _: ledger.reservation(found))


def _placement_outcome(answer: Reservation | NoFit) -> PlacementOutcome:
    if isinstance(answer, NoFit):
        return "rejected"
    return "queued" if answer.phase is Phase.PENDING else "placed"
