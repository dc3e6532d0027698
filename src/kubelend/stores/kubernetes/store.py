"""The Kubernetes store: the broker's custom resources are its state, and one object is the commit point.

Kubernetes has no transaction over several objects. A commit is one conditional write of the head, which
contains all its changes; the objects are written afterwards, while other commits follow, and the next load
finishes what was left.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import (
    AsyncGenerator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, closing, suppress
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import structlog
from msgspec.structs import replace

from kubelend.core import events
from kubelend.core.audit_log import AuditLine, ChainHead
from kubelend.core.errors import StoreFailed
from kubelend.core.events import Change, CommittedChanges, StoreLag, WorkingSet
from kubelend.core.models import Cluster, ClusterId, Reservation, ReservationId
from kubelend.kits import tasks
from kubelend.kube import leader_election
from kubelend.kube.client import Client
from kubelend.kube.config import KubeConfig
from kubelend.kube.informer import Deleted, Listed, list_and_watch
from kubelend.kube.leader_election import LeaseIdentity
from kubelend.stores import batch as stores_batch
from kubelend.stores.batch import CorruptRecord, Document, WriteBatch
from kubelend.stores.kubernetes import cache as kubernetes_cache
from kubelend.stores.kubernetes import head as kubernetes_head
from kubelend.stores.kubernetes import loader, objects, projection, published, writer
from kubelend.stores.kubernetes.cache import CachedObject, ObjectKey, StaleWrite, StoredObjectCache
from kubelend.stores.kubernetes.head import (
    AuditPosition,
    CommitChanges,
    HeadRecord,
    HeadState,
    PackedChanges,
    RecordWrite,
)
from kubelend.stores.kubernetes.objects import HEAD_NAME, LEDGER_RECORDS, RecordKind
from kubelend.wire.broker_objects import LedgerRecord

log = structlog.get_logger("kubelend.store")


class KubernetesLedger:
    """The ledger in one namespace. Call `head.acquire` first to write, or `head.read` to read."""

    def __init__(self, client: Client, namespace: str, archive_for: timedelta) -> None:
        self.head = HeadRecord(client, namespace)
        self._client = client
        self._namespace = namespace
        self._archive_for = archive_for
        self._cache = StoredObjectCache(client, namespace)
        self._audit_segments = kubernetes_head.AuditSegments(client, namespace)
        self._pending = writer.PendingCommits(self._apply)
        self._unfinished: set[str] | None = None
        """Names of the objects of unfinished reservations; None before they are known."""

    async def acquire(self) -> None:
        """Become the only writer."""
        await self.head.acquire()
        state = self.head.state
        for packed, changes in zip(state.changes, state.pending, strict=True):
            self._pending.add(packed, changes)

    async def load(self) -> WorkingSet:
        """The working set; finishes the last commits."""
        if self._unfinished is not None:
            await self.flush()
        state = self.head.state
        found = await loader.load_objects(self._cache, state)
        self._unfinished = loader.unfinished_reservations(found.records)
        await self.head.check_fencing()
        await self.flush()
        placeholders = loader.abandoned_placeholders(found, self.head.state)
        self._log_without_record(found.without_record.intersection(key for key, _ in placeholders))
        await tasks.gather_limited(self._delete_placeholder, placeholders)
        await self.head.collect_garbage()
        records = loader.working_set(found.records, self.head.state.revision)
        if self.head.state.sequence:
            return records
        return records._replace(left=await published.read_left(self._client, self._namespace))

    async def flush(self) -> None:
        """Wait until the objects have all that is committed."""
        await self._pending.wait()

    def lag(self) -> StoreLag:
        return self._pending.lag(self.head.state.sequence)

    async def stop(self) -> None:
        """Stop writing objects."""
        self._cache.is_closed = True
        await self._pending.stop()

    async def read_only(self) -> WorkingSet:
        """The working set as a consistent snapshot, without writing anything."""
        records, _ = await loader.snapshot(self.head, self._cache)
        return records

    async def commit(self, changes: Sequence[Change], revision: int) -> None:
        is_loaded = self._unfinished is not None
        await self._pending.wait(writer.MAX_PENDING_WRITES if is_loaded else 0)
        state, batch = self.head.state, stores_batch.fold(changes)
        stores_batch.check_revision(state.revision, revision)
        known = {**self._pending_reservations(), **batch.reservations} if batch.archived else {}
        finish_times = {one: await self._finish_time(one, known.get(one)) for one in batch.archived}
        limit = state.kept_from
        if finish_times:
            current = stores_batch.compute_retention_limit(finish_times.values(), self._archive_for)
            limit = max(current, limit or current)
        archiving = Archiving(finish_times, limit)
        after, made = state_after(
            state, self._pending.packed, batch, revision, archiving, self._cache
        )
        cut = await self._audit_segments.chain_head_at(after, batch.truncate_to)
        await self._write_head(replace(after, start=AuditPosition.of(cut)) if cut else after, batch)
        self._pending.add(self.head.state.changes[-1], made)
        self._pending.start()

    async def archived(self, reservation: ReservationId) -> Reservation | None:
        """The last commits may have changes that are not in the objects yet."""
        state = self.head.state
        if (write := self._pending_writes().get(reservation)) is not None:
            found = await self._archived_by(write)
        else:
            found = await self._find_reservation(reservation, is_archived=True)
        finished_at = found and found.finished_at
        is_retained = finished_at and finished_at >= (state.kept_from or stores_batch.MIN_TIME)
        return found if is_retained else None

    async def archive(self) -> list[Reservation]:
        """All archived reservations."""
        state, labels = self.head.state, f"{objects.ARCHIVED_LABEL}=true"
        resource, at = objects.STORED_RESERVATIONS, self.head.read_version
        listed = await self._client.list(resource, self._namespace, labels=labels, at=at)
        found: dict[str, Reservation | None] = {}
        for one in listed.objects:
            record: Reservation = loader.decode_stored_record("reservation", one)
            found[record.id] = record
        for name, write in self._pending_writes().items():
            found[name] = await self._archived_by(write)
        limit = state.kept_from or stores_batch.MIN_TIME
        known = (one for one in found.values() if one and one.finished_at)
        return [one for one in known if one.finished_at and one.finished_at >= limit]

    async def lines(self, after: int, limit: int) -> list[AuditLine]:
        try:
            return await self._audit_segments.read(
                self.head.state, after, limit, self.head.read_version
            )
        except CorruptRecord:
            if not self.head.read_version:  # a new leader may have truncated the audit log
                await self.head.check_fencing()
            raise

    async def _write_head(self, after: HeadState, batch: WriteBatch) -> None:
        """Before the first load the number of unfinished reservations is unknown."""
        if self._unfinished is None and not self.head.state.sequence:  # a new store has none
            self._unfinished = set()
        known = set() if self._unfinished is None else self._unfinished
        changes = _unfinished_changes(batch)
        begun = {name for name, is_unfinished in changes.items() if is_unfinished} - known
        ended = {name for name, is_unfinished in changes.items() if not is_unfinished} & known
        number = 0 if self._unfinished is None else len(known) + len(begun) - len(ended)
        await self.head.write(replace(after, unfinished=number))
        known |= begun
        known -= ended

    async def _apply(self, commits: Sequence[CommitChanges], limit: int) -> None:
        """Apply commits to the objects, `limit` writes at a time."""
        pending = kubernetes_head.pending_writes(commits)
        await writer.apply_writes(self._cache, pending, self.head.check_fencing, limit)
        for commit in commits:
            await self._audit_segments.create_segments(commit, self.head.state)
        await self._audit_segments.delete_truncated(self.head.state)
        swept_until = await loader.sweep_archive(self._cache, self.head.state)
        # Stored with the next commit. After a restart before that the sweep is repeated.
        self.head.state = replace(self.head.state, swept_until=swept_until)

    async def _finish_time(self, reservation: ReservationId, last: Reservation | None) -> datetime:
        if last is None and (known := self._cache.finished_at(reservation)) is not None:
            return known
        last = last or await self._find_reservation(reservation)
        return stores_batch.finish_time(reservation, last)

    def _pending_writes(self) -> dict[str, RecordWrite]:
        """Of reservations, by ID."""
        is_reader = self.head.read_version != ""
        commits = self.head.state.pending if is_reader else self._pending.commits
        pending = kubernetes_head.pending_writes(commits)
        return {write.id: write for _, write in pending if write.kind == "reservation"}

    def _pending_reservations(self) -> dict[ReservationId, Reservation]:
        return {
            ReservationId(name): projection.decode_record_text(write.kind, write.text)
            for name, write in self._pending_writes().items()
            if write.text
        }

    async def _find_reservation(
        self, reservation: ReservationId, *, is_archived: bool = False
    ) -> Reservation | None:
        name = objects.record_object_name("reservation", reservation)
        found = await self._client.find(objects.STORED_RESERVATIONS, name, self._namespace)
        if found is None or found.record is None or found.is_archived is not is_archived:
            return None
        record: Reservation = loader.decode_stored_record("reservation", found)
        return record

    async def _archived_by(self, write: RecordWrite) -> Reservation | None:
        if not write.is_archived:
            return None
        if write.text:
            record: Reservation = projection.decode_record_text("reservation", write.text)
            return record
        moved = ReservationId(write.id)
        found = await self._find_reservation(moved, is_archived=True)
        return found or await self._find_reservation(moved)

    def _log_without_record(self, without_record: Iterable[ObjectKey]) -> None:
        for key in without_record:
            log.warning(
                "Deleting ClusterAdvertisement without a stored record",
                name=key[1],
                namespace=self._namespace,
                hint="cordon the cluster again if it was cordoned",
            )

    async def _delete_placeholder(self, placeholder: tuple[ObjectKey, CachedObject]) -> None:
        with suppress(StaleWrite):  # changed by others
            await writer.delete_object(self._cache, *placeholder)


ClientFactory = Callable[[KubeConfig], AbstractAsyncContextManager[Client]]
CallResult = TypeVar("CallResult")

_CLOSE_ITERATIONS: Final = 10
"""Iterations of the event loop until all closed sockets are released."""


class KubernetesStore:
    """Stores records in one namespace of a cluster."""

    def __init__(self, access: KubeConfig, namespace: str, *, is_writable: bool) -> None:
        self._access = access
        self._namespace = namespace
        self._is_writable = is_writable
        self._loop: LoopThread | None = LoopThread()
        self._stack = AsyncExitStack()
        self._ledger: KubernetesLedger | None = None

    @classmethod
    def open(
        cls,
        access: KubeConfig,
        namespace: str,
        *,
        archive_for: timedelta = stores_batch.ARCHIVE_FOR,
        connect: ClientFactory = Client.open,
    ) -> KubernetesStore:
        """Open the store for writing, or create it. A broker that had it open can no longer write."""
        store = cls(access, namespace, is_writable=True)
        store.connect(archive_for, connect)
        return store

    @classmethod
    def open_readonly(
        cls, access: KubeConfig, namespace: str, *, connect: ClientFactory = Client.open
    ) -> KubernetesStore:
        """Open an existing store, also while a broker uses it; writes nothing."""
        store = cls(access, namespace, is_writable=False)
        store.connect(stores_batch.ARCHIVE_FOR, connect)
        return store

    def connect(self, archive_for: timedelta, connect: ClientFactory) -> None:
        """Connect, and read the head."""

        async def acquire() -> None:
            client = await self._stack.enter_async_context(connect(self._access))
            self._ledger = ledger = KubernetesLedger(client, self._namespace, archive_for)
            await (ledger.acquire() if self._is_writable else ledger.head.read())

        try:
            self._run(acquire())
        except BaseException:
            self.close()
            raise

    @classmethod
    def leave(
        cls,
        access: KubeConfig,
        namespace: str,
        now: Callable[[], datetime],
        timeout: timedelta = leader_election.ACQUIRE_TIMEOUT,
    ) -> int:
        """Leave the objects to the published Go broker; returns how many reservations are live."""
        store = cls(access, namespace, is_writable=True)
        try:
            return store._run(_leave(access, namespace, now, timeout))
        finally:
            store.close()

    def hold_lease(self, now: Callable[[], datetime], timeout: timedelta) -> None:
        """Until the store is closed, so that no broker leads."""
        own = LeaseIdentity("migrate-store", self._namespace)

        async def acquire() -> None:
            client = await self._stack.enter_async_context(Client.open(self._access))
            held = leader_election.hold_lease(client, own, now, timeout)
            await self._stack.enter_async_context(held)

        self._run(acquire())

    def load(self) -> WorkingSet:
        ledger = self._open_ledger()
        return self._run(ledger.load() if self._is_writable else ledger.read_only())

    def commit(self, changes: Sequence[Change], revision: int) -> None:
        self._run(self._open_ledger().commit(changes, revision))

    def prepare(self, changes: Sequence[Change], revision: int) -> Callable[[], None]:
        return partial(self.commit, changes, revision)

    def archived(self, reservation: ReservationId) -> Reservation | None:
        return self._run(self._open_ledger().archived(reservation))

    def archive(self) -> list[Reservation]:
        return self._run(self._open_ledger().archive())

    def audit_lines(self, after: int, limit: int) -> list[AuditLine]:
        return self._run(self._open_ledger().lines(after, limit))

    def audit_log_bounds(self) -> tuple[ChainHead, ChainHead]:
        state = self._open_ledger().head.state
        return state.start.head, state.end.head

    def check_fencing(self) -> None:
        self._run(self._open_ledger().head.check_fencing())

    def flush(self) -> None:
        self._run(self._open_ledger().flush())

    def lag(self) -> StoreLag:
        return StoreLag() if self._ledger is None else self._ledger.lag()

    def close(self) -> None:
        loop, ledger = self._loop, self._ledger
        self._loop = self._ledger = None
        if loop is not None:
            with closing(loop):
                loop.run(self._disconnect(ledger))

    async def _disconnect(self, ledger: KubernetesLedger | None) -> None:
        if ledger is not None:
            await ledger.stop()
        await self._stack.aclose()
        for _ in range(_CLOSE_ITERATIONS):  # the loop releases sockets after they are closed
            await asyncio.sleep(0)

    def _open_ledger(self) -> KubernetesLedger:
        if self._ledger is None:
            raise StoreFailed("the store is closed", hint="open it again")
        return self._ledger

    def _run(self, work: Coroutine[Any, Any, CallResult]) -> CallResult:
        if self._loop is None:
            raise StoreFailed("the store is closed", hint="open it again")
        with objects.translate_api_errors(self._access.server, self._namespace):
            return self._loop.run(work)


async def _leave(
    access: KubeConfig, namespace: str, now: Callable[[], datetime], timeout: timedelta
) -> int:
    """As the leader, so that no broker runs meanwhile."""
    own = LeaseIdentity("migrate-back", namespace)
    async with (
        Client.open(access) as client,
        leader_election.hold_lease(client, own, now, timeout),
    ):
        if await client.find(LEDGER_RECORDS, HEAD_NAME, namespace) is not None:
            ledger = KubernetesLedger(client, namespace, stores_batch.ARCHIVE_FOR)
            await ledger.acquire()
            try:
                if ledger.head.state.sequence:
                    await ledger.load()  # which finishes the last commits
            finally:
                await ledger.stop()
        return await published.leave(client, namespace)


class LoopThread:
    """An event loop in a thread of its own, which writes objects also while nobody calls the store."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="objects", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, CallResult]) -> CallResult:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Archiving(NamedTuple):
    """The reservations that a commit archives, and the retention limit after it."""

    finish_times: Mapping[ReservationId, datetime]
    retention_limit: datetime | None


def state_after(
    state: HeadState,
    pending: tuple[PackedChanges, ...],
    batch: WriteBatch,
    revision: int,
    archiving: Archiving,
    cache: StoredObjectCache,
) -> tuple[HeadState, CommitChanges]:
    """The state after this commit, before the audit log is truncated, and its changes."""
    chained = [kubernetes_head.ChainedLine.of(line) for line in batch.chained_lines(state.end.head)]
    waiting, moved = kubernetes_head.split_log_tail(state, chained)
    start = state.start
    if batch.copied_log is not None:
        # Not into the head: the first line may be in the middle of a block, which `create_segments` handles.
        waiting, moved = (), tuple(chained)
        start = AuditPosition.of(batch.copied_log.start)
    last = chained[-1] if chained else None
    changes = CommitChanges(
        state.sequence + 1, tuple(_record_writes(batch, archiving, cache)), moved
    )
    after = replace(
        state,
        sequence=state.sequence + 1,
        revision=revision,
        end=AuditPosition(last.number, last.digest) if last else state.end,
        start=start,
        lines=waiting,
        cut_from=state.cut_from if pending else start.number,
        kept_from=archiving.retention_limit,
        swept_until=state.swept_until
        or (archiving.retention_limit and loader.start_of_hour(archiving.retention_limit)),
        changes=(*pending, PackedChanges.of(changes)),
    )
    return after, changes


def _unfinished_changes(batch: WriteBatch) -> dict[str, bool]:
    """By object name, whether reservations are unfinished after the commit."""
    changes = {one.id: one.finished_at is None for one in batch.reservations.values()}
    changes |= dict.fromkeys(batch.archived, False)
    return {objects.record_object_name("reservation", one): is_on for one, is_on in changes.items()}


def _record_writes(
    batch: WriteBatch, archiving: Archiving, cache: StoredObjectCache
) -> Iterator[RecordWrite]:
    for cluster, advertised in batch.clusters.items():
        yield from _record_write("cluster", cluster, advertised, cache)
    for reservation, found in batch.reservations.items():
        if reservation not in archiving.finish_times:
            yield from _record_write("reservation", reservation, found, cache)
    for archived in archiving.finish_times:
        yield from _archive_writes(archived, batch.reservations.get(archived), archiving, cache)
    for (kind, name), document in batch.documents.items():
        yield from _record_write(kind, name, document, cache)


def _archive_writes(
    id: ReservationId, found: Reservation | None, archiving: Archiving, cache: StoredObjectCache
) -> Iterator[RecordWrite]:
    """A reservation older than the retention limit is deleted at once."""
    finished_at = archiving.finish_times[id]
    if archiving.retention_limit is not None and finished_at < archiving.retention_limit:
        yield RecordWrite("reservation", id)
    elif found is None:
        yield RecordWrite("reservation", id, finished_at=finished_at)
    else:
        for write in _record_write("reservation", id, found, cache):
            yield replace(write, finished_at=finished_at)


def _record_write(
    kind: RecordKind,
    id: str,
    found: Cluster | Reservation | Document | None,
    cache: StoredObjectCache,
) -> Iterator[RecordWrite]:
    if found is not None:
        _, _, text = stores_batch.encode_record(found)
        write = RecordWrite(kind, id, msgspec.Raw(text))
        yield replace(
            write, existed_before=cache.cached(kubernetes_cache.object_key(write)) is not None
        )
    elif _is_encodable(id):
        yield RecordWrite(kind, id)


def _is_encodable(id: str) -> bool:
    """An ID with surrogates was never stored, so there is nothing to delete."""
    try:
        id.encode()
    except UnicodeEncodeError:
        return False
    return True


QueryResult = TypeVar("QueryResult")


class KubernetesReplica:
    """Follows the store of one namespace, commit by commit."""

    def __init__(self, access: KubeConfig, namespace: str) -> None:
        self._access = access
        self._namespace = namespace

    async def follow(self) -> AsyncGenerator[WorkingSet | CommittedChanges, None]:
        with objects.translate_api_errors(self._access.server, self._namespace):
            async with Client.open(self._access) as client:
                only, report = f"metadata.name={HEAD_NAME}", _raise_watch_error
                heads = list_and_watch(
                    client, LEDGER_RECORDS, self._namespace, fields=only, report=report
                )
                async with aclosing(heads), aclosing(self._commits(client, heads)) as commits:
                    async for commit in commits:
                        yield commit

    async def query(self, query: Callable[[KubernetesStore], QueryResult]) -> QueryResult:
        def run() -> QueryResult:
            with closing(KubernetesStore.open_readonly(self._access, self._namespace)) as store:
                return query(store)

        return await asyncio.to_thread(run)

    async def _commits(
        self, client: Client, heads: AsyncGenerator[object, None]
    ) -> AsyncGenerator[WorkingSet | CommittedChanges, None]:
        epoch, sequence = 0, 0
        async for found in heads:
            if isinstance(found, Deleted):
                raise objects.head_deleted_error()
            if isinstance(found, Listed) and not found.objects:
                continue  # no broker has led here yet
            if isinstance(found, LedgerRecord):
                state = kubernetes_head.state_from_object(found)
                if state.epoch <= epoch and state.sequence <= sequence:
                    continue  # already replicated
                last = state.changes[-1] if state.changes else PackedChanges()
                if (state.epoch, state.sequence) == (epoch, sequence + 1) and last.text:
                    sequence = state.sequence
                    writes = last.unpack().writes
                    changes = [one for write in writes for one in _replicated_change(write)]
                    yield CommittedChanges(changes, state.revision)
                    continue
            # Also after a change of leader, which does not report what was deleted before it loaded.
            head = HeadRecord(client, self._namespace)
            cache = StoredObjectCache(client, self._namespace)
            records, sequence = await loader.snapshot(head, cache)
            epoch = head.state.epoch
            yield records


def _raise_watch_error(error: str) -> None:
    """Ends the watch instead of retrying: meanwhile the follower has to report that it cannot replicate."""
    if error:
        raise StoreFailed(error)


def _replicated_change(write: RecordWrite) -> Iterator[Change]:
    if write.text:
        yield projection.decode_record_text(write.kind, write.text)
    if write.text and not write.is_archived:
        return
    match write.kind:
        case "cluster":
            yield events.ClusterDeleted(ClusterId(write.id))
        case "reservation":
            yield events.Archived(ReservationId(write.id))
        case "member" | "token" | "limits":
            yield events.RecordDeleted(write.kind, write.id)
