"""Read models of the ledger: immutable values for the API."""

from __future__ import annotations

from collections.abc import Callable
from heapq import nlargest
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

from kubelend.broker.feeds import Subscription
from kubelend.core.ledger import Ledger
from kubelend.core.lending import EffectivePolicy
from kubelend.core.lifecycle import Phase
from kubelend.core.models import Cluster, ClusterId, Reservation
from kubelend.core.resources import Resources

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
    since = (
        after
        if after is not None and ledger.compacted_revision <= after <= ledger.revision
        else None
    )
    news = [
        found
        for found in ledger.by_cluster(subscription.cluster)
        if (_is_unfinished(found) if since is None else found.revision > since)
    ]
    news.sort(key=lambda found: found.revision)
    return StreamStart(subscription, news, since is not None)


def _is_unfinished(found: Reservation) -> bool:
    return found.is_live or found.phase is Phase.PENDING
