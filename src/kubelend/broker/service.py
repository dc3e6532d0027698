"""Use cases of the broker: advertise, reserve, release, cordon and the rest.

Each is a command or a query for the single writer. Policies and quotas are in `LimitService`.
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from functools import lru_cache
from heapq import nlargest
from itertools import islice
from operator import attrgetter
from random import Random
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import replace

from kubelend.broker import change_log
from kubelend.broker.handshakes import HandshakeRelay
from kubelend.broker.metrics import BrokerMetrics, PlacementOutcome
from kubelend.broker.ports import NO_REPLICA, SINGLE_REPLICA, Clock, Leadership, OpenStore, Replica
from kubelend.broker.streams import Subscription
from kubelend.broker.writer import CURRENT_ACTOR, LedgerWriter
from kubelend.core import commands, explanations, lending, quotas
from kubelend.core.accounts import QuotaUsage
from kubelend.core.commands import Command, WaitLimits
from kubelend.core.errors import (
    Conflict,
    KeyReused,
    NotFound,
    QueueFull,
    QuotaExceeded,
    Unavailable,
    reservation_not_found,
)
from kubelend.core.events import WorkingSet
from kubelend.core.explanations import ExplainOthers, NoFit
from kubelend.core.ledger import Ledger
from kubelend.core.lending import EffectivePolicy, LendingPolicy
from kubelend.core.lifecycle import Phase, Reason
from kubelend.core.models import (
    Advertisement,
    Cluster,
    ClusterId,
    HoldReport,
    Limits,
    Quota,
    Request,
    Reservation,
    ReservationId,
)
from kubelend.core.resources import Resources

_REJECTIONS = (Conflict, KeyReused, QueueFull, QuotaExceeded)
"""The broker's decisions against a request, in contrast to failures and malformed requests."""


RECOVERY_PERIOD: Final = timedelta(minutes=1)
"""After a start: twice the interval in which agents advertise by default."""
RECOVERY_RETRY_SECONDS: Final = 5.0


class BrokerRules(msgspec.Struct, frozen=True):
    """Limits of time and number that apply to all clusters."""

    stale_after: timedelta = timedelta(minutes=10)
    """Age after which an advertisement is stale."""
    retention: timedelta = timedelta(hours=1)
    """How long a finished reservation stays in memory before it is archived."""
    waiting: WaitLimits = WaitLimits()
    """Maximum number of requests waiting for capacity."""
    explain_others: ExplainOthers = ExplainOthers.NAMES
    """What requesters learn about other clusters."""
    lost_after: timedelta = timedelta(minutes=5)
    """How long a provider may be stale before its reservations fail over; zero disables failover."""


class Broker(LedgerWriter):
    """The broker. Use `run` as a root task; call the rest once `unready` is None."""

    def __init__(
        self,
        open_store: OpenStore,
        clock: Clock,
        rules: BrokerRules,
        metrics: BrokerMetrics,
        leadership: Leadership = SINGLE_REPLICA,
        replica: Replica = NO_REPLICA,
    ) -> None:
        super().__init__(
            open_store, clock, metrics, rules.retention, rules.lost_after, leadership, replica
        )
        self._rules = rules
        self.handshakes = HandshakeRelay(self.streams, clock)

    def _restore(self, records: WorkingSet) -> None:
        super()._restore(records)
        self._ledger.explain_others = self._rules.explain_others
        if any(records.left):
            ledger, now = self._ledger, self.clock()
            command = commands.take_over(records.left, self._rules.stale_after, now)
            self._run(ledger, command, now)

    # -- providers

    async def advertise(
        self, advertisement: Advertisement, certificate_until: datetime | None = None
    ) -> tuple[ClusterView, list[Reservation]]:
        """Stores the advertisement of a cluster; returns its view and the reservations it has to hold."""
        stale_after = self._rules.stale_after
        return await self.change(
            lambda ledger, now: commands.advertise(
                ledger, advertisement, stale_after, now, certificate_until
            ),
            lambda ledger, cluster: (
                cluster_view(ledger, cluster),
                held_reservations(ledger, cluster.id),
            ),
        )

    async def holds(self, provider: ClusterId) -> list[Reservation]:
        """Returns the reservations that a provider has to hold and that are not active yet."""
        return await self.read(lambda ledger: held_reservations(ledger, provider))

    async def acknowledge(
        self, reservation: ReservationId, provider: ClusterId, held: HoldReport | None = None
    ) -> Reservation:
        return await self._change_one(
            reservation,
            lambda ledger, now: commands.acknowledge(ledger, reservation, provider, held, now),
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
        new_id = id or new_reservation_id(request.requester)
        limits = self._rules.waiting
        began = time.perf_counter()

        def view(ledger: Ledger, answer: ReservationId | NoFit) -> Reservation | NoFit:
            seen = answer if isinstance(answer, NoFit) else ledger.reservation(answer)
            outcome: PlacementOutcome = "rejected"
            if not isinstance(seen, NoFit):
                outcome = "queued" if seen.phase is Phase.PENDING else "placed"
            self._metrics.observe_placement(outcome, time.perf_counter() - began)
            return seen

        try:
            answer = await self.change(
                lambda ledger, now: commands.reserve(ledger, request, new_id, limits, now), view
            )
            if isinstance(answer, NoFit):
                self._check_has_recovered(request.requester)
                self._metrics.count_placement_failure(answer.explanation)
                shown = self._rules.explain_others.reduce(answer.explanation)
                raise explanations.no_capacity_error(shown)
        except _REJECTIONS as error:
            change_log.log_rejected(request, error, CURRENT_ACTOR.get())
            raise
        return answer

    def _check_has_recovered(self, requester: ClusterId) -> None:
        """After an outage clusters are stale that will advertise again: no reason to reject for good."""
        now = self.clock()
        if now >= self.leading_since + RECOVERY_PERIOD:
            return
        silent = sum(
            one.received_at < self.leading_since and one.is_stale(now) and one.id != requester
            for one in self._ledger.clusters.values()
        )
        if silent:
            raise Unavailable(
                f"{silent} clusters have not advertised since the broker started, and nothing else fits",
                hint="try again in a moment",
                retry_after=RECOVERY_RETRY_SECONDS,
            )

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
        await self.execute(
            lambda ledger, now: commands.purge_reservation(ledger, reservation, reason, now)
        )

    async def explain(
        self,
        request: Request,
        limit: int,
        found: Reservation | None = None,
        others: ExplainOthers | None = None,
    ) -> explanations.Explanation:
        """Explains where a request would be placed now; changes nothing.

        Of the reservation `found`: where it would fit in addition to what it holds. `others` replaces what
        requesters learn about other clusters.
        """
        others = others or self._rules.explain_others
        ledger, now = self.current()
        query = quotas.query_for_request(ledger, request, now)
        if found is not None:
            query = replace(query, ticket=found.ticket, excluded_before=found.left)
        candidates = limit if others is ExplainOthers.NAMES else 0
        explanation = explanations.explain_placement(query, ledger.fleet, candidates)
        exceeds = quotas.quota_violations(ledger, request, found)
        await self.wait_durable()
        return others.reduce(replace(explanation, quota=exceeds))

    # -- administrators

    async def cordon(self, cluster: ClusterId, reason: str) -> ClusterView:
        return await self.change(
            lambda ledger, now: commands.cordon(ledger, cluster, reason, now), cluster_view
        )

    async def uncordon(self, cluster: ClusterId) -> ClusterView:
        return await self.change(
            lambda ledger, now: commands.uncordon(ledger, cluster, now), cluster_view
        )

    async def drain(self, cluster: ClusterId, reason: str) -> tuple[ClusterView, list[Reservation]]:
        view, drained = await self.change(
            lambda ledger, now: commands.drain(ledger, cluster, reason, now),
            lambda ledger, drained: (
                cluster_view(ledger, ledger.cluster(cluster)),
                [ledger.reservation(found) for found in drained],
            ),
        )
        change_log.log_drained(cluster, len(drained), CURRENT_ACTOR.get())
        return view, drained

    async def remove(self, cluster: ClusterId) -> None:
        await self.execute(lambda ledger, now: commands.remove_cluster(ledger, cluster, now))

    async def withdraw(self, cluster: ClusterId) -> None:
        """Removes the advertisement of a cluster; its reservations stay."""
        await self.execute(lambda ledger, now: commands.withdraw_offer(ledger, cluster, now))

    # -- queries

    async def cluster(self, cluster: ClusterId) -> ClusterView:
        return await self.read(lambda ledger: cluster_view(ledger, ledger.cluster(cluster)))

    async def clusters(self, after: str, limit: int) -> list[ClusterView]:
        """Returns a page of clusters, ordered by ID."""

        def page(ledger: Ledger) -> list[ClusterView]:
            ids = ledger.fleet.page(after, limit)
            return [cluster_view(ledger, ledger.cluster(cluster)) for cluster in ids]

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
        page: PageRequest,
    ) -> list[Reservation]:
        """Returns a page of the matching reservations in memory, oldest first."""
        return await self.read(lambda ledger: reservations_page(ledger, matches, cluster, page))

    async def unpaged_reservations(
        self, matches: Callable[[Reservation], bool], cluster: ClusterId, max_finished: int
    ) -> list[Reservation]:
        """Returns all matching unfinished reservations of a cluster, and the newest finished ones."""
        return await self.read(
            lambda ledger: unpaged_reservations(ledger, matches, cluster, max_finished)
        )

    @asynccontextmanager
    async def stream(
        self, cluster: ClusterId, after: int | None, via: str = ""
    ) -> AsyncIterator[StreamStart]:
        """Opens a subscription to changes, with the state that the cluster has to receive first.

        `via` is the proxy of the connection, if any.
        """
        ledger, _ = self.current()
        feed = self.streams.open(cluster, ledger.revision, via)
        self._metrics.stream_opened()
        try:
            opening = start_stream(ledger, feed, after)
            await self.wait_durable()
            yield opening
        finally:
            self._metrics.stream_closed()
            self.streams.close(feed)

    async def _change_one(
        self, found: ReservationId, command: Callable[[Ledger, datetime], Command[None]]
    ) -> Reservation:
        return await self.change(command, lambda ledger, _: ledger.reservation(found))


_ID_RANDOM_BITS = 64
"""The probability of any collision in a billion reservations is below 1/30."""

_MAX_REQUESTER_LENGTH = 63 - len("rsv-") - len("-") - _ID_RANDOM_BITS // 4
_INVALID_IN_LABEL = re.compile(r"[^a-z0-9]+")

_random = Random()  # noqa: S311 - names are not secret


def new_reservation_id(requester: ClusterId) -> ReservationId:
    """Returns `rsv-<requester>-<random>`, which is a DNS label for any requester name."""
    return ReservationId(f"rsv-{_dns_label(requester)}-{_random.getrandbits(_ID_RANDOM_BITS):016x}")


@lru_cache(maxsize=4096)
def _dns_label(requester: ClusterId) -> str:
    label = (
        _INVALID_IN_LABEL.sub("-", requester.lower()).strip("-")[:_MAX_REQUESTER_LENGTH].strip("-")
    )
    return label or "cluster"


class PolicyView(NamedTuple):
    """The policies of a provider: set by an administrator, advertised, and effective."""

    cluster: ClusterId
    admin_policy: LendingPolicy | None
    """Set by an administrator."""
    advertised: LendingPolicy | None
    effective: EffectivePolicy | None


class QuotaView(NamedTuple):
    """Quota and usage of a requester at a point in time; the usage is a copy."""

    cluster: ClusterId
    usage: QuotaUsage
    at: datetime


class LimitService:
    """Reads and sets policies and quotas."""

    def __init__(self, writer: LedgerWriter) -> None:
        self._writer = writer

    # -- policies

    async def policy(self, cluster: ClusterId) -> PolicyView:
        return await self._writer.read(lambda ledger: _known_policy_view(ledger, cluster))

    async def policies(self, after: str, limit: int) -> list[PolicyView]:
        """Returns a page, ordered by cluster ID."""

        def page(ledger: Ledger) -> list[PolicyView]:
            later = (n for n in sorted(ledger.limit_index.clusters_with_policy()) if n > after)
            return [_policy_view(ledger, name) for name in islice(later, limit)]

        return await self._writer.read(page)

    async def set_policy(self, cluster: ClusterId, policy: LendingPolicy) -> PolicyView:
        return await self._writer.change(
            lambda ledger, now: commands.set_policy(ledger, cluster, policy, now),
            lambda ledger, _: _policy_view(ledger, cluster),
        )

    async def clear_policy(self, cluster: ClusterId) -> None:
        await self._writer.execute(lambda ledger, now: commands.clear_policy(ledger, cluster, now))

    # -- quotas

    async def quota(self, cluster: ClusterId) -> QuotaView:
        return await self._writer.read(lambda ledger: self._quota_view(ledger, cluster))

    async def quotas(self, after: str, limit: int) -> list[QuotaView]:
        """Returns a page, ordered by cluster ID."""

        def page(ledger: Ledger) -> list[QuotaView]:
            later = (name for name in sorted(ledger.quota_usages.by_requester) if name > after)
            return [self._quota_view(ledger, name) for name in islice(later, limit)]

        return await self._writer.read(page)

    async def set_quota(self, cluster: ClusterId, quota: Quota) -> QuotaView:
        return await self._writer.change(
            lambda ledger, now: commands.set_quota(ledger, cluster, quota, now),
            lambda ledger, _: self._quota_view(ledger, cluster),
        )

    async def clear_quota(self, cluster: ClusterId) -> None:
        await self._writer.execute(lambda ledger, now: commands.clear_quota(ledger, cluster, now))

    def _quota_view(self, ledger: Ledger, cluster: ClusterId) -> QuotaView:
        account = ledger.quota_usages.get(cluster)
        if account is None:
            raise commands.quota_not_found(cluster)
        return QuotaView(cluster, account.copy(), self._writer.clock())


def _known_policy_view(ledger: Ledger, cluster: ClusterId) -> PolicyView:
    if ledger.limits(cluster) == Limits(cluster):
        ledger.cluster(cluster)  # raises if the cluster is unknown
    return _policy_view(ledger, cluster)


def _policy_view(ledger: Ledger, cluster: ClusterId) -> PolicyView:
    known = ledger.clusters.get(cluster)
    advertised = None if known is None else known.advertisement.policy
    ordered = ledger.limits(cluster).policy
    return PolicyView(cluster, ordered, advertised, lending.effective_policy(advertised, ordered))


_BY_TICKET = attrgetter("ticket")


class ClusterView(NamedTuple):
    """A cluster with the totals of its reservations."""

    cluster: Cluster
    reserved: Resources
    reservation_count: int
    effective_policy: EffectivePolicy | None
    """The effective lending policy, if any."""


class PageRequest(NamedTuple):
    """A slice of a list: at most `limit` items after the ticket `after`."""

    after: int
    limit: int


class StreamStart(NamedTuple):
    """The start of a stream. Unless resumed, `news` holds all unfinished reservations."""

    subscription: Subscription
    changes: list[Reservation]
    resumed: bool


def cluster_view(ledger: Ledger, cluster: Cluster) -> ClusterView:
    name = cluster.id
    holds = ledger.limit_index.effective_policy(name)
    return ClusterView(cluster, ledger.reserved(name), ledger.lent_count(name), holds)


def held_reservations(ledger: Ledger, provider: ClusterId) -> list[Reservation]:
    """Returns the reservations that a provider has to hold and that are not active yet."""
    return [found for found in ledger.lent_by(provider) if found.phase is Phase.RESERVED]


def reservations_page(
    ledger: Ledger,
    matches: Callable[[Reservation], bool],
    cluster: ClusterId | None,
    page: PageRequest,
) -> list[Reservation]:
    """Returns reservations in the order of creation, which is the order of the ledger."""
    known = ledger.by_cluster(cluster) if cluster else ledger.reservations.values()
    oldest_first = sorted(known, key=_BY_TICKET) if cluster else known
    later = (found for found in oldest_first if found.ticket > page.after)
    return list(islice(filter(matches, later), page.limit))


def unpaged_reservations(
    ledger: Ledger, matches: Callable[[Reservation], bool], cluster: ClusterId, max_finished: int
) -> list[Reservation]:
    """Returns all unfinished and the newest finished ones, for clients without pagination."""
    open_: list[Reservation] = []
    over: list[Reservation] = []
    for found in filter(matches, ledger.by_cluster(cluster)):
        (open_ if _is_unfinished(found) else over).append(found)
    newest = nlargest(max_finished, over, key=_BY_TICKET)
    return sorted([*open_, *newest], key=_BY_TICKET)


def start_stream(ledger: Ledger, subscription: Subscription, after: int | None) -> StreamStart:
    """Returns what changed since `after`, or all unfinished ones if that revision is compacted."""
    resumed = after is not None and ledger.compacted_revision <= after <= ledger.revision
    known = ledger.by_cluster(subscription.cluster)
    if after is not None and resumed:
        news = [found for found in known if found.revision > after]
    else:
        news = list(filter(_is_unfinished, known))
    news.sort(key=lambda found: found.revision)
    return StreamStart(subscription, news, resumed)


def _is_unfinished(found: Reservation) -> bool:
    return found.is_live or found.phase is Phase.PENDING
