"""What callers see of the ledger: records that are read in one stretch, and never change again."""

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
    """A cluster with what follows from the reservations on it."""

    cluster: Cluster
    reserved: Resources
    lent: int
    holds: Lending | None
    """The policy that holds for it, if any."""


class Page(NamedTuple):
    """Which part of a long list: at most `limit` after the ticket `after`."""

    after: int
    limit: int


class Opening(NamedTuple):
    """A stream as it starts. Unless it is resumed, `news` is all that is open: anything else is over."""

    feed: Feed
    news: list[Reservation]
    resumed: bool


def of_cluster(ledger: Ledger, cluster: Cluster) -> ClusterView:
    name = cluster.id
    holds = ledger.rulebook.lending(name)
    return ClusterView(cluster, ledger.reserved(name), ledger.lent_count(name), holds)


def holds(ledger: Ledger, provider: ClusterId) -> list[Reservation]:
    """What a provider has to set aside and whose requester has not started yet."""
    return [found for found in ledger.lent_by(provider) if found.phase is Phase.RESERVED]


def page_of(
    ledger: Ledger, wanted: Callable[[Reservation], bool], cluster: ClusterId | None, page: Page
) -> list[Reservation]:
    """Reservations in the order of their creation; the ledger keeps all of them in it."""
    known = ledger.touching(cluster) if cluster else ledger.reservations.values()
    oldest_first = sorted(known, key=_TICKET) if cluster else known
    later = (found for found in oldest_first if found.ticket > page.after)
    return list(islice(filter(wanted, later), page.limit))


def unpaged(
    ledger: Ledger, wanted: Callable[[Reservation], bool], cluster: ClusterId, most_over: int
) -> list[Reservation]:
    """All that is open, and the newest of what is over: for clients that know no pages."""
    open_: list[Reservation] = []
    over: list[Reservation] = []
    for found in filter(wanted, ledger.touching(cluster)):
        (open_ if _is_open(found) else over).append(found)
    newest = nlargest(most_over, over, key=_TICKET)
    return sorted([*open_, *newest], key=_TICKET)


def opening(ledger: Ledger, feed: Feed, after: int | None) -> Opening:
    """What a stream says first: all since `after`, or all that is open if that cannot be told."""
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
