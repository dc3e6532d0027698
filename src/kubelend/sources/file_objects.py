"""Local objects as YAML files, `<directory>/<plural>/<namespace>.<name>.yaml`.

`ObjectDirectory` reads and writes the files, used by one thread at a time. `FileObjects` calls it from the
event loop and scans the files for changes.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final, Generic, NamedTuple, TypeVar, cast

import msgspec
import structlog

from kubelend.agent.ports import Deleted, Listed
from kubelend.core.errors import (
    InvalidInput,
    InvalidSettings,
    KubelendError,
    StoreFailed,
    Unavailable,
)
from kubelend.kits import files as kits_files
from kubelend.kits.files import FileState
from kubelend.sources import object_semantics, yaml_documents
from kubelend.sources.memory_objects import WatchableStore, WatchQueue
from kubelend.wire.objects import KINDS, Kind, Object

SETTLE_TIME: Final = timedelta(milliseconds=50)

DELETED_DIRECTORY: Final = ".gone"
DELETED_RETENTION_SECONDS: Final = 60.0
"""Seconds for which the file of a deleted object is retained, hidden: see `_move_to_deleted`."""

_FILE_SUFFIX: Final = ".yaml"
_MAX_FILE_NAME_LENGTH: Final = 255 - len("..new")

log = structlog.get_logger("kubelend.objects")


class FileBusy(Exception):
    """The file is being modified; retry when it has settled. Carries part of a sentence."""


class _FileEntry(msgspec.Struct):
    """What is known of one file."""

    found: Object | None = None
    """Its last valid content."""
    signature: FileState | None = None
    """Of the file when it was last read or written."""
    missing_since: float | None = None


class ObjectDirectory:
    """All objects of one cluster."""

    def __init__(self, directory: Path, now: datetime, settle: timedelta = SETTLE_TIME) -> None:
        self.now = now
        """Set it before each call: the clock belongs to another thread."""
        self._directory = directory
        self._settle = settle.total_seconds()
        self._entries: defaultdict[type[Object], dict[str, _FileEntry]] = defaultdict(dict)
        self._busy: defaultdict[type[Object], set[str]] = defaultdict(set)
        self._problems: Mapping[str, str] = {}
        self._changes: list[Object | Deleted] = []
        self._prepare()

    @property
    def problems(self) -> Mapping[str, str]:
        """The errors of files that are ignored, by their path in the directory.

        Safe to read from any thread: the mapping is replaced, never changed.
        """
        return self._problems

    def pop_changes(self) -> list[Object | Deleted]:
        """All changes of objects since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    # -- reading

    def scan(self, kind: type[Object]) -> bool:
        """Read what has changed on the disk; True if files are busy."""
        seen = kits_files.file_states(self._directory / kind.plural, (_FILE_SUFFIX, ".yml"))
        entries = self._entries[kind]
        changed = {
            name for name in seen if name not in entries or entries[name].signature != seen[name]
        } | (entries.keys() - seen.keys())
        if changed:
            with kits_files.lock_directory_waiting(self._directory):
                for name in sorted(changed):
                    self._refresh_file(kind, name)
        return bool(self._busy[kind])

    def refresh(self, kind: type[Object], key: str) -> None:
        """Read what has changed of one object."""
        name = _file_name(key)
        entry = self._entries[kind].get(name)
        if kits_files.file_state(self._path(kind, name)) != (entry.signature if entry else None):
            with kits_files.lock_directory_waiting(self._directory):
                self._refresh_file(kind, name)

    # -- writing objects

    def apply(self, wanted: Kind) -> Kind:
        name = _file_name(wanted.key)
        with kits_files.lock_directory_waiting(self._directory):
            stored = self._current(type(wanted), name)
            return self._save(stored, object_semantics.apply_to_stored(stored, wanted, self.now))

    def set_status(self, wanted: Kind) -> Kind | None:
        name = _file_name(wanted.key)
        with kits_files.lock_directory_waiting(self._directory):
            stored = self._current(type(wanted), name)
            changed = object_semantics.apply_status_to_stored(stored, wanted)
            return None if changed is None else self._save(stored, changed)

    def delete(self, kind: type[Object], key: str) -> None:
        name = _file_name(key)
        with kits_files.lock_directory_waiting(self._directory):
            stored = self._current(kind, name)
            if stored is not None:
                self._save(stored, object_semantics.mark_deleted(stored, self.now))

    def _prepare(self) -> None:
        try:
            for kind in KINDS:
                (self._directory / kind.plural).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidSettings(
                f"{self._directory} cannot be created: {error.strerror}",
                hint="choose a directory that this user may write to",
            ) from error

    # -- changes made by others

    def _current(self, kind: type[Kind], name: str) -> Kind | None:
        """The object as its file has it now: an edit must not be overwritten unread."""
        self._refresh_file(kind, name)
        if name in self._busy[kind]:
            raise FileBusy(f"{self._path(kind, name)} is being written")
        if problem := self._problems.get(f"{kind.plural}/{name}"):
            raise Unavailable(
                f"{self._path(kind, name)}: {problem}", hint="correct or remove the file"
            )
        entry = self._entries[kind].get(name)
        return None if entry is None else cast(Kind | None, entry.found)

    def _refresh_file(self, kind: type[Object], name: str) -> None:
        self._busy[kind].discard(name)
        entry = self._entries[kind].setdefault(name, _FileEntry())
        seen = kits_files.file_state(self._path(kind, name))
        if seen is None:
            self._on_missing(kind, name, entry)
        elif seen == entry.signature:
            entry.missing_since = None
        elif 0 <= seen.age() < self._settle:
            self._busy[kind].add(name)
        else:
            entry.missing_since = None
            self._read(kind, name, seen)

    def _read(self, kind: type[Object], name: str, seen: FileState) -> None:
        found, problem = None, ""
        try:
            found = self._parse(kind, name, seen)
        except InvalidInput as error:
            problem = str(error)
        if kits_files.file_state(self._path(kind, name)) != seen:  # modified while it was read
            self._busy[kind].add(name)
            return
        self._set_problem(kind, name, problem)
        if found is None:
            self._entries[kind][name].signature = seen
        else:
            self._apply_file(found, self._entries[kind][name], seen)

    def _parse(self, kind: type[Object], name: str, seen: FileState) -> Object:
        if not name.endswith(_FILE_SUFFIX):
            raise InvalidInput(f"ignored: the file name must end in {_FILE_SUFFIX}")
        if not seen.is_file:
            raise InvalidInput("not a regular file")
        text = kits_files.read_limited(self._path(kind, name), yaml_documents.MAX_BYTES)
        found = yaml_documents.parse_object(text, kind)
        if _file_name(found.key) != name:
            raise InvalidInput(
                f"metadata: is {found.key}", hint=f"rename the file to {_file_name(found.key)}"
            )
        return found

    def _apply_file(self, found: Object, entry: _FileEntry, seen: FileState) -> None:
        meant = object_semantics.apply_file_edit(entry.found, found, self.now)
        if object_semantics.is_removable(meant):  # its last finalizer was removed by hand
            self._move_to_deleted(meant)
        elif meant != found:
            self._write(meant)
        else:
            self._record(meant)
            entry.signature = seen

    def _on_missing(self, kind: type[Object], name: str, entry: _FileEntry) -> None:
        if (
            kits_files.file_state(self._directory / kind.plural) is None
        ):  # an unmounted disk is not a deletion
            raise StoreFailed(f"{self._directory / kind.plural} does not exist")
        now = time.monotonic()
        if entry.missing_since is None:
            entry.missing_since = now
        if entry.found is None:
            self._drop_entry(kind, name)
        elif not self._is_in_deleted(entry.found) and now - entry.missing_since < self._settle:
            self._busy[kind].add(name)
        else:
            self._on_removed(entry.found)

    def _on_removed(self, found: Object) -> None:
        """The file was removed: the object is deleted, unless it has finalizers that no other
        process has handled.
        """
        if found.metadata.finalizers and not self._is_in_deleted(found):
            self._write(object_semantics.mark_deleted(found, self.now))
        else:
            self._drop_entry(type(found), _file_name(found.key))
            self._changes.append(Deleted(found))

    def _set_problem(self, kind: type[Object], name: str, problem: str) -> None:
        path = f"{kind.plural}/{name}"
        if not problem and path in self._problems:
            self._problems = {one: error for one, error in self._problems.items() if one != path}
        elif problem and self._problems.get(path) != problem:
            self._problems = {**self._problems, path: problem}
            log.warning(
                "Ignoring invalid object file", file=str(self._path(kind, name)), error=problem
            )

    # -- writing

    def _save(self, stored: Object | None, wanted: Kind) -> Kind:
        if object_semantics.is_removable(wanted):
            self._move_to_deleted(wanted)
        elif wanted is not stored:
            self._write(wanted)
        return wanted

    def _write(self, found: Object) -> None:
        path = self._path(type(found), _file_name(found.key))
        signature = kits_files.replace_file(path, yaml_documents.dump_object(found))
        self._record(found)
        self._entries[type(found)][path.name].signature = signature

    def _record(self, found: Object) -> None:
        entry = self._entries[type(found)].setdefault(_file_name(found.key), _FileEntry())
        if entry.found != found:
            self._changes.append(found)
        entry.found, entry.missing_since = found, None

    def _move_to_deleted(self, found: Object) -> None:
        """Move the file to the hidden directory, where it is retained for a while.

        Another process may have last read it with finalizers, and would restore a file that was simply
        removed.
        """
        name, deleted_directory = (
            _file_name(found.key),
            self._directory / DELETED_DIRECTORY / found.plural,
        )
        kits_files.move_file(self._path(type(found), name), deleted_directory / name)
        self._drop_entry(type(found), name)
        self._changes.append(Deleted(found))
        for old, seen in kits_files.file_states(deleted_directory, (_FILE_SUFFIX,)).items():
            if seen.age() > DELETED_RETENTION_SECONDS:
                kits_files.unlink_file(deleted_directory / old)

    def _is_in_deleted(self, found: Object) -> bool:
        path = self._directory / DELETED_DIRECTORY / found.plural / _file_name(found.key)
        if kits_files.file_state(path) is None:
            return False
        try:
            deleted = yaml_documents.parse_object(
                kits_files.read_limited(path, yaml_documents.MAX_BYTES), type(found)
            )
        except InvalidInput:
            return False
        return deleted.metadata.uid == found.metadata.uid

    def _drop_entry(self, kind: type[Object], name: str) -> None:
        self._entries[kind].pop(name, None)
        self._set_problem(kind, name, "")

    def _path(self, kind: type[Object], name: str) -> Path:
        return self._directory / kind.plural / name


def _file_name(key: str) -> str:
    """Namespaces have no dots, so the first one is the separator."""
    found = object_semantics.parse_object_key(key)
    name = f"{found.namespace}.{found.name}{_FILE_SUFFIX}"
    if len(name) > _MAX_FILE_NAME_LENGTH:
        raise InvalidInput(f"{key} is too long for a file name")
    return name


POLL_INTERVAL: Final = timedelta(milliseconds=200)

BUSY_TIMEOUT: Final = 0.5
"""Seconds that a write waits for a busy file; then the caller retries."""

FIRST_SCAN_TIMEOUT: Final = 2.0
"""Seconds that the first scan of a kind waits for busy files, so that the first list is complete."""

CLOSE_TIMEOUT: Final = 2.0
MAX_ERRORS_LISTED: Final = 3
"""How many errors are listed; the others are counted."""


JobValue = TypeVar("JobValue")


class FileObjects:
    """`agent.ports.LocalObjects` in a directory of YAML files."""

    def __init__(
        self,
        directory: Path,
        clock: Callable[[], datetime],
        poll: timedelta = POLL_INTERVAL,
        settle: timedelta = SETTLE_TIME,
    ) -> None:
        """`poll`: how often watches scan the disk. `settle`: how long a file is unmodified before it
        is read.
        """
        self._clock = clock
        self._directory = ObjectDirectory(directory, clock(), settle)
        self._poll = poll.total_seconds()
        self._busy_delay = min(self._poll, settle.total_seconds())
        self._retry_delay = min(max(settle.total_seconds() / 4, 0.001), 0.02)
        self._store = WatchableStore()
        self._worker = ThreadPoolExecutor(1, "objects")
        self._is_closed = False
        self._scanned: set[type[Object]] = set()
        self._due: dict[type[Object], float] = {}
        self._scan_errors: dict[type[Object], str] = {}

    @property
    def problem(self) -> str:
        """The files that cannot be used, each with its error; empty if there are none.

        As of the last scan, so it is cheap to read.
        """
        files = [f"{file}: {error}" for file, error in sorted(self._directory.problems.items())]
        errors = [*sorted(set(self._scan_errors.values())), *files]
        more = (
            [f"and {len(errors) - MAX_ERRORS_LISTED} more"]
            if len(errors) > MAX_ERRORS_LISTED
            else []
        )
        return "; ".join([*errors[:MAX_ERRORS_LISTED], *more])

    async def list(self, kind: type[Kind]) -> list[Kind]:
        await self._scan(kind)
        return self._store.list(kind)

    async def find(self, kind: type[Kind], key: str) -> Kind | None:
        await self._run(lambda: self._directory.refresh(kind, key))
        return self._store.find(kind, key)

    async def apply(self, wanted: Kind) -> Kind:
        return await self._run_until_settled(lambda: self._directory.apply(wanted))

    async def set_status(self, wanted: Kind) -> Kind | None:
        return await self._run_until_settled(lambda: self._directory.set_status(wanted))

    async def delete(self, kind: type[Kind], key: str) -> None:
        await self._run_until_settled(lambda: self._directory.delete(kind, key))

    async def watch(self, kind: type[Kind]) -> AsyncGenerator[Kind | Deleted | Listed, None]:
        await self._scan_and_report(kind)
        while kind in self._scan_errors:
            await asyncio.sleep(self._poll)
            await self._scan_and_report(kind)
        with self._store.subscribe(kind) as news:
            yield Listed(self._store.list(kind))
            while True:
                while (change := news.pop()) is not None:
                    yield change
                await self._wait_for_change(kind, news)

    async def close(self) -> None:
        """Finish running jobs and stop the thread. Does not wait for a disk that hangs."""
        if self._is_closed:
            return
        self._is_closed = True
        last = asyncio.wrap_future(self._worker.submit(lambda: None))
        self._worker.shutdown(wait=False)
        await asyncio.wait([last], timeout=CLOSE_TIMEOUT)
        last.cancel()  # its result must not reach a closed event loop

    async def _run_until_settled(self, job: Callable[[], JobValue]) -> JobValue:
        """Retries while the file is busy, without blocking other objects."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + BUSY_TIMEOUT
        while True:
            try:
                return await self._run(job)
            except FileBusy as error:
                if loop.time() >= deadline:
                    raise Unavailable(str(error), hint="the agent will retry") from error
            await asyncio.sleep(self._retry_delay)

    async def _scan(self, kind: type[Object]) -> bool:
        """Scan the disk; True if files are busy."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + FIRST_SCAN_TIMEOUT
        while await self._run(lambda: self._directory.scan(kind)):
            if kind in self._scanned or loop.time() >= deadline:
                self._scanned.add(kind)
                return True
            await asyncio.sleep(self._retry_delay)
        self._scanned.add(kind)
        return False

    async def _scan_and_report(self, kind: type[Object]) -> None:
        """Scan the disk and report errors; scan sooner again if files are busy."""
        loop = asyncio.get_running_loop()
        self._due[kind] = loop.time() + self._poll
        try:
            is_busy = await self._scan(kind)
        except Unavailable as error:
            self._report(kind, str(error))
            return
        self._scan_errors.pop(kind, None)
        if is_busy:
            self._due[kind] = loop.time() + self._busy_delay

    async def _wait_for_change(self, kind: type[Object], watch: WatchQueue[Kind]) -> None:
        """For a change made here, or until the next scan is due; one scan serves all watches."""
        loop = asyncio.get_running_loop()
        await watch.wait(max(self._due[kind] - loop.time(), 0))
        if loop.time() >= self._due[kind]:
            await self._scan_and_report(kind)

    def _report(self, kind: type[Object], error: str) -> None:
        if self._scan_errors.get(kind) != error:
            self._scan_errors[kind] = error
            log.warning("Scan of object files failed, will retry", kind=kind.kind, error=error)

    async def _run(self, job: Callable[[], JobValue]) -> JobValue:
        """Run a job in the thread. Once started it completes and reaches the watches, even if the
        caller is cancelled.
        """
        if self._is_closed:
            raise Unavailable("the object store is closed")
        now, loop = self._clock(), asyncio.get_running_loop()
        future = loop.run_in_executor(self._worker, self._run_in_thread, job, now)
        future.add_done_callback(self._publish_changes)
        done = await asyncio.shield(future)
        if done.error is not None:
            raise done.error
        return cast(JobValue, done.result)

    def _run_in_thread(self, job: Callable[[], JobValue], now: datetime) -> _JobResult[JobValue]:
        self._directory.now = now
        try:
            answer, error = job(), None
        except KubelendError as problem:
            answer, error = None, problem
        return _JobResult(answer, error, self._directory.pop_changes())

    def _publish_changes(self, future: asyncio.Future[_JobResult[JobValue]]) -> None:
        if future.cancelled() or future.exception() is not None:
            return
        for change in future.result().changes:
            if isinstance(change, Deleted):
                self._store.delete(cast(Object, change.last_state))
            else:
                self._store.put(change)


class _JobResult(NamedTuple, Generic[JobValue]):
    """Result or error of a job, and what it changed either way."""

    result: JobValue | None
    error: KubelendError | None
    changes: list[Object | Deleted]
