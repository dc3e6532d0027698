"""Read models of the ledger: immutable values for the API."""

from __future__ import annotations

from collections.abc import Callable
from heapq import nlargest
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

from kubelend.broker.feeds import Feed
from kubelend.core.ledger import Ledger
from kubelend.core.lending import Lending
from kubelend.core.lifecycle import Phase
from kubelend.core.models import Cluster, ClusterId, Reservation
from kubelend.core.resources import Resources

_TICKET = attrgetter("ticket")


class ClusterView(NamedTuple):
    """A cluster with the totals of its reservations."""

    cluster: Cluster
    reserved: Resources
    lent: int
    holds: Lending | None
    """The effective lending policy, if any."""


class Page(NamedTuple):
    """A slice of a list: at most `limit` items after the ticket `after`."""

    after: int
    limit: int


class Opening(NamedTuple):
    """The start of a stream. Unless resumed, `news` holds all unfinished reservations."""

    feed: Feed
    news: list[Reservation]
    resumed: bool


def of_cluster(ledger: Ledger, cluster: Cluster) -> ClusterView:
    name = cluster.id
    holds = ledger.rulebook.lending(name)
    return ClusterView(cluster, ledger.reserved(name), ledger.lent_count(name), holds)


def holds(ledger: Ledger, provider: ClusterId) -> list[Reservation]:
    """Returns the reservations that a provider has to hold and that are not active yet."""
    return [found for found in ledger.lent_by(provider) if found.phase is Phase.RESERVED]


def page_of(
    ledger: Ledger, wanted: Callable[[Reservation], bool], cluster: ClusterId | None, page: Page
) -> list[Reservation]:
    """Returns reservations in the order of creation, which is the order of the ledger."""
    known = ledger.touching(cluster) if cluster else ledger.reservations.values()
    oldest_first = sorted(known, key=_TICKET) if cluster else known
    later = (found for found in oldest_first if found.ticket > page.after)
    return list(islice(filter(wanted, later), page.limit))


def unpaged(
    ledger: Ledger, wanted: Callable[[Reservation], bool], cluster: ClusterId, most_over: int
) -> list[Reservation]:
    """Returns all unfinished and the newest finished ones, for clients without pagination."""
    open_: list[Reservation] = []
    over: list[Reservation] = []
    for found in filter(wanted, ledger.touching(cluster)):
        (open_ if _is_open(found) else over).append(found)
    newest = nlargest(most_over, over, key=_TICKET)
    return sorted([*open_, *newest], key=_TICKET)


def opening(ledger: Ledger, feed: Feed, after: int | None) -> Opening:
    """Returns what changed since `after`, or all unfinished ones if that revision is compacted."""
    since = after if after is not None and ledger.horizon <= after <= ledger.revision else None
    news = [
        found
        for found in ledger.touching(feed.cluster)
        if (_is_open(found) if since is None else found.revision > since)
    ]
    news.sort(key=lambda found: found.revision)
    return Opening(feed, news, since is not None)


def _is_open(found: Reservation) -> bool:
    return found.is_live or found.phase is Phase.PENDING
