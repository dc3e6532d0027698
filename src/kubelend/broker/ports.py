"""Interfaces that the broker requires: store, replication, leadership and certificate authority."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple, Protocol, TypeVar

from kubelend.core.audit_log import AuditLine, ChainHead
from kubelend.core.errors import StoreFailed
from kubelend.core.events import Change, CommittedChanges, StoreLag, WorkingSet
from kubelend.core.lifecycle import Role
from kubelend.core.members import Certificate
from kubelend.core.models import Reservation, ReservationId

Result = TypeVar("Result")

Clock = Callable[[], datetime]
"""Returns the current time, timezone-aware, in UTC. Only composition roots choose one."""


OpenStore = Callable[[], "Store"]
"""Opens the store or raises `StoreFailed`; called again after every failure."""


class Store(Protocol):
    """Durable storage of records. Blocking; used by one thread at a time; raises `StoreFailed`."""

    def load(self) -> WorkingSet:
        """Returns the working set: everything but archived reservations and the audit log."""

    def commit(self, changes: Sequence[Change], revision: int) -> None:
        """Writes all of the changes or none, and returns when they are durable.

        The last change of a record wins. `revision` is the ledger's revision after the last change.
        """

    def prepare(self, changes: Sequence[Change], revision: int) -> Callable[[], None]:
        """Prepares a commit; calling the result writes it.

        The first step is fast enough for the event loop, the second may run in a thread. No other call may
        come in between.
        """

    def archived(self, reservation: ReservationId) -> Reservation | None:
        """Returns an archived reservation."""

    def audit_lines(self, after: int, limit: int) -> list[AuditLine]:
        """Returns the audit log lines after this number, oldest first."""

    def audit_log_bounds(self) -> tuple[ChainHead, ChainHead]:
        """Returns the chain heads before the first line (after truncation) and after the last line."""

    def check_fencing(self) -> None:
        """Raises `StoreFailed` if another writer has written since this store last read or wrote."""

    def lag(self) -> StoreLag:
        """How far what users see is behind. Never waits, also while another thread uses the store."""

    def close(self) -> None:
        """Releases files and locks without writing."""


class Replica(Protocol):
    """Replicates the state of the leader to a follower."""

    def follow(self) -> AsyncGenerator[WorkingSet | CommittedChanges, None]:
        """Yields the full working set, then committed changes; the full set again after a gap.

        Runs until closed; raises `StoreFailed` if the store cannot be read.
        """

    async def query(self, query: Callable[[Store], Result]) -> Result:
        """Queries a read-only store for what is not replicated."""


class Leadership(Protocol):
    """Leader election. A lease depends on clocks; safety comes from the store, which fences every writer but
    the last one that opened it.
    """

    @property
    def is_leader(self) -> bool:
        """Whether this broker holds the lease now, by its own clock."""

    @property
    def term(self) -> int:
        """Number of times this broker has become the leader. It changes after any interruption, because
        another broker may have been the leader meanwhile.
        """

    @property
    def leader(self) -> str:
        """Identity of the current leader; empty if unknown."""

    async def wait_for_leadership(self) -> None:
        """Waits until this broker is the leader."""

    async def refresh(self) -> None:
        """Reads the lease now, because another broker seems to be the leader."""


class SigningRequest(NamedTuple):
    """Contents of a certificate signing request. Its sender has the key; nothing proves the name."""

    role: Role
    name: str
    key: str
    """The pin of the public key."""
    public_key: object
    """Opaque to all but the certificate authority."""


class Issued(NamedTuple):
    """An issued certificate as its holder receives it."""

    chain: str
    """PEM: the certificate and the intermediate certificates that its holder has to present."""
    authorities: str
    """PEM: the certificate authorities that its holder has to trust."""
    certificate: Certificate
    not_before: datetime


class CertificateAuthority(Protocol):
    """Signs certificates for members. May be rotated at any time."""

    @property
    def pin(self) -> str:
        """Pin of the CA, by which a joining client verifies the broker."""

    @property
    def authorities(self) -> str:
        """PEM: the certificate authorities that a joining client has to trust."""

    @property
    def lifetime(self) -> timedelta:
        """Lifetime of issued certificates."""

    def parse_csr(self, csr: str) -> SigningRequest:
        """Parses and verifies a certificate signing request; raises `InvalidInput` if it is invalid."""

    def issue(
        self,
        applicant: SigningRequest,
        now: datetime,
        not_before: datetime | None,
        max_lifetime: timedelta | None = None,
    ) -> Issued:
        """Issues a certificate for the applicant, valid from `not_before` and for at most `max_lifetime`."""

    def is_current(self, certificate: Certificate) -> bool:
        """Whether the signing CA has issued it, together with the CAs that are trusted now."""


class SingleReplica:
    """Always the leader: no second broker can open the store."""

    is_leader = True
    term = 0
    leader = ""

    async def wait_for_leadership(self) -> None:
        """Returns at once."""

    async def refresh(self) -> None:
        """Does nothing: there is no other broker."""


class NoReplica:
    """Replication for a broker that is always the leader: there is nothing to follow."""

    async def follow(self) -> AsyncGenerator[WorkingSet | CommittedChanges, None]:
        for changes in _NO_CHANGES:
            yield changes
        raise StoreFailed(_NO_OTHER_BROKER)

    async def query(self, query: Callable[[Store], Result]) -> Result:  # noqa: ARG002
        raise StoreFailed(_NO_OTHER_BROKER)


SINGLE_REPLICA = SingleReplica()
NO_REPLICA = NoReplica()

_NO_CHANGES: tuple[WorkingSet, ...] = ()
_NO_OTHER_BROKER = "no other broker can use this store"
