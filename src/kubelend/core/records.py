"""The whole working set, as stores load it and as a ledger is restored from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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


class News(NamedTuple):
    """What one commit has changed, for whoever has seen all that was before it."""

    changes: Sequence[Change]
    revision: int
