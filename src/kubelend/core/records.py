"""The records a store loads at startup, and the changes it replicates."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from msgspec.structs import replace

from kubelend.core.events import Change
from kubelend.core.limits import Limits
from kubelend.core.members import Member, Token
from kubelend.core.models import Cluster, Reservation


class WorkingSet(NamedTuple):
    """All live records of a store, from which a ledger is restored; without archived reservations
    and the audit log.
    """

    clusters: Sequence[Cluster]
    reservations: Sequence[Reservation]
    revision: int
    members: Sequence[Member] = ()
    tokens: Sequence[Token] = ()
    limits: Sequence[Limits] = ()

    def reservations_by_age(self) -> list[Reservation]:
        """The reservations, oldest first, without nominations of clusters that no longer exist.

        A cluster may have been deleted while no broker was running; its waiter is nominated again.
        """
        offered_or_none = {None, *(cluster.id for cluster in self.clusters)}
        known = (
            found
            if found.nominated_cluster in offered_or_none
            else replace(found, nominated_cluster=None)
            for found in self.reservations
        )
        return sorted(known, key=attrgetter("ticket"))


class CommittedChanges(NamedTuple):
    """The changes of one commit, for a replica that has applied all earlier ones."""

    changes: Sequence[Change]
    revision: int
