"""Leadership and replication of a store that only one broker can use."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

from kubelend.broker.ports import Result, Store
from kubelend.core.errors import StoreFailed
from kubelend.core.records import CommittedChanges, WorkingSet


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
