"""The whole working set, as stores load it and as a ledger is restored from it."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from msgspec.structs import replace

from kubelend.core.events import Change
from kubelend.core.limits import Limits
from kubelend.core.members import Member, Token
from kubelend.core.models import Cluster, Reservation


class Records(NamedTuple):
    """All that is at hand. What is archived is not, and neither is the journal."""

    clusters: Sequence[Cluster]
    reservations: Sequence[Reservation]
    revision: int
    members: Sequence[Member] = ()
    tokens: Sequence[Token] = ()
    limits: Sequence[Limits] = ()

    def in_order(self) -> list[Reservation]:
        """The reservations, oldest first; none is promised a cluster that is not there.

        A cluster may have been taken away while no broker looked: then its waiter looks for another.
        """
        offered_or_none = {None, *(cluster.id for cluster in self.clusters)}
        known = (
            found if found.earmark in offered_or_none else replace(found, earmark=None)
            for found in self.reservations
        )
        return sorted(known, key=attrgetter("ticket"))


class News(NamedTuple):
    """What one commit has changed, for whoever has seen all that was before it."""

    changes: Sequence[Change]
    revision: int
