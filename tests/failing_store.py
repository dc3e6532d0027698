"""A store that a test can stop, slow down and break, and that keeps its contract in between."""

import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import brokers
import waiting
from kubelend.core.audit_log import AuditLine, ChainHead
from kubelend.core.events import Change, StoreLag, WorkingSet
from kubelend.core.models import Reservation, ReservationId
from kubelend.stores.memory import MemoryStore
from waiting import PATIENCE


class FailingStore:
    """Keeps records in memory; `hold` makes commits wait, `broken` makes all fail."""

    def __init__(self) -> None:
        self.kept = MemoryStore()
        self.broken: Exception | None = None
        self.loses_answers = False
        """Whether a commit that is broken is kept all the same, as when a connection is cut at its end."""
        self.commits = 0
        """How many commits have begun."""
        self.prepared = 0
        """How many of them in the event loop."""
        self.unfit: Exception | None = None
        """Why changes cannot even be prepared."""
        self.shown = StoreLag()
        self._passable = threading.Event()
        self._passable.set()

    def hold(self) -> None:
        self._passable.clear()

    def let_go(self) -> None:
        self._passable.set()

    # -- the port

    def load(self) -> WorkingSet:
        self._fail_if_broken()
        return self.kept.load()

    def commit(self, changes: Sequence[Change], revision: int) -> None:
        self.commits += 1
        assert self._passable.wait(PATIENCE), "the test holds this commit for too long"
        if self.broken is None or self.loses_answers:
            self.kept.commit(changes, revision)
        self._fail_if_broken()

    def prepare(self, changes: Sequence[Change], revision: int) -> Callable[[], None]:
        self.prepared += 1
        if self.unfit is not None:
            raise self.unfit
        return partial(self.commit, changes, revision)

    def archived(self, reservation: ReservationId) -> Reservation | None:
        self._fail_if_broken()
        return self.kept.archived(reservation)

    def audit_lines(self, after: int, limit: int) -> list[AuditLine]:
        self._fail_if_broken()
        return self.kept.audit_lines(after, limit)

    def audit_log_bounds(self) -> tuple[ChainHead, ChainHead]:
        self._fail_if_broken()
        return self.kept.audit_log_bounds()

    def check_fencing(self) -> None:
        self._fail_if_broken()

    def lag(self) -> StoreLag:
        return self.shown

    def close(self) -> None:
        """There is nothing to let go of."""

    def _fail_if_broken(self) -> None:
        if self.broken is not None:
            raise self.broken


@asynccontextmanager
async def outage(
    broker: brokers.Running, store: FailingStore, reason: str = "the disk is gone"
) -> AsyncIterator[None]:
    """The broker without its store, which it notices by a commit that fails; ready again at the end."""
    store.broken = brokers.failure(reason)
    answer = await broker.admin().post("members", "cluster", "nobody", "revoke", {})
    assert answer.status == 503
    assert broker.service.unready is not None
    yield
    store.broken = None
    await waiting.until(lambda: broker.service.unready is None)
