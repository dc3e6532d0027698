"""Backups and migrations of stores.

A backup is one archive with a consistent copy of the store, as an SQLite file, and the keys that belong to
it. It is made while a broker runs, and audited before it counts as one. A restore verifies the archive,
moves what is in the way aside, and records the revision of the copy, so that the broker accepts the older
store (see `sqlite_file`). A Kubernetes store is restored into an empty namespace.

A migration copies a store that no broker uses into an empty one, with its archive, its revision and its
audit log byte by byte, in one commit: the target has all of it or nothing.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import msgspec
from msgspec.structs import replace

from kubelend.core.audit import DELETED_ACTION
from kubelend.core.audit_log import BROKER_ACTOR, AuditEntry
from kubelend.core.errors import InvalidInput, InvalidSettings, StoreFailed
from kubelend.core.events import Archived, AuditLogCopied, Change, WorkingSet
from kubelend.core.models import Reservation
from kubelend.kits import files
from kubelend.kube import leader_election
from kubelend.stores import factory, sqlite_file
from kubelend.stores.factory import AnyStore, StoreAudit
from kubelend.stores.kubernetes.objects import requesting_uid
from kubelend.stores.kubernetes.store import KubernetesStore

STORE_MEMBER: Final = "store.db"
MANIFEST_MEMBER: Final = "manifest.json"
FORMAT: Final = 1
CHUNK: Final = 1 << 20


class Manifest(msgspec.Struct, frozen=True, rename="camel"):
    """What is in a backup. The last member of the archive, so that a torn one has none."""

    created_at: datetime
    revision: int
    reservations: int
    """How many there were that had not ended."""
    digests: dict[str, str]
    """SHA-256 of each member."""
    format: int = FORMAT


def create(store: str, output: Path, keys: Mapping[str, Path], now: datetime) -> Manifest:
    """Back up a store and its keys (by member name) into a new file that only its owner can read."""
    if output.exists():
        raise InvalidSettings(f"{output} already exists", hint="choose another name")
    with _working_directory(output.parent) as directory:
        copy = directory / STORE_MEMBER
        path = factory.file_path(store)
        if path is None:
            path = directory / "copy.db"
            with closing(factory.open_readonly(store)) as source, _open_empty(str(path)) as target:
                _copy_contents(source, target, now)
        _copy_database(path, copy)
        revision, live = _audited(copy)
        members = {STORE_MEMBER: copy, **_copy_keys(keys, directory)}
        digests = {name: _digest(path) for name, path in members.items()}
        manifest = Manifest(now, revision, live, digests)
        archive = directory / "backup.tar"
        _write_archive(archive, members, manifest)
        # A hard link fails if the name was taken meanwhile.
        output.hardlink_to(archive)
    files.sync_directory(output.parent)
    return manifest


def restore(
    backup: Path, store: str, keys: Mapping[str, Path], now: Callable[[], datetime]
) -> list[Path]:
    """Put the store and the keys of a backup in their places; returns the files that were moved aside.

    `keys` are the places of members other than the store; what the backup does not have stays as it is.
    """
    path = factory.file_path(store)
    if path is None:
        with _verified(backup, Path(tempfile.gettempdir())) as (directory, manifest):
            migrate(str(directory / STORE_MEMBER), store, now)
            return _restore_keys(directory, _places_of(keys, manifest), now())
    path = Path(os.path.realpath(path))
    with (
        _verified(backup, path.parent) as (directory, manifest),
        sqlite_file.locked(path) as lock,
    ):
        places = _places_of(keys, manifest)
        moved = [_moved_aside(one, now()) for one in [path, *_logs_of(path)] if one.exists()]
        moved += _restore_keys(directory, places, now())
        (directory / STORE_MEMBER).rename(path)
        sqlite_file.write_revision(lock, manifest.revision)
    files.sync_directory(path.parent)
    return moved


def _places_of(keys: Mapping[str, Path], manifest: Manifest) -> dict[str, Path]:
    """Where the keys in the backup belong; checked before anything is changed."""
    places = {name: path for name, path in keys.items() if name in manifest.digests}
    for path in places.values():
        if not path.parent.is_dir():
            raise InvalidSettings(f"{path.parent} does not exist", hint="create the directory")
    return places


def _restore_keys(directory: Path, places: Mapping[str, Path], now: datetime) -> list[Path]:
    moved = [_moved_aside(path, now) for path in places.values() if path.exists()]
    for name, path in places.items():
        files.write_atomic(path, (directory / name).read_bytes(), mode=files.PRIVATE_MODE)
    return moved


class StoreContents(NamedTuple):
    """All that a store has."""

    records: WorkingSet
    archive: list[Reservation]
    log: AuditLogCopied

    @classmethod
    def of(cls, store: AnyStore) -> StoreContents:
        records, (start, end) = store.load(), store.audit_log_bounds()
        lines = tuple(factory.read_audit_log(store, start.number, end.number))
        return cls(records, store.archive(), AuditLogCopied(start, lines))

    @property
    def is_empty(self) -> bool:
        left = self.records.left.reservations  # of another broker, which are to be taken over
        return not (self.changes[1:] or self.log.lines or self.records.revision or left)

    @property
    def changes(self) -> list[Change]:
        """What to commit into an empty store."""
        found = self.records
        records: list[Change] = [*found.clusters, *found.reservations, *self.archive]
        documents: list[Change] = [*found.members, *found.tokens, *found.limits]
        return [self.log, *records, *documents, *(Archived(one.id) for one in self.archive)]

    def for_new_objects(self) -> StoreContents:
        """The objects that requested them do not exist in the target, and the broker is to create them."""

        def without_uid(found: Reservation) -> Reservation:
            request = replace(found.request, key=None)
            return replace(found, request=request) if requesting_uid(found) else found

        reservations = list(map(without_uid, self.records.reservations))
        records = self.records._replace(reservations=reservations)
        return self._replace(records=records, archive=list(map(without_uid, self.archive)))


def migrate(
    source: str,
    target: str,
    now: Callable[[], datetime],
    timeout: timedelta = leader_election.ACQUIRE_TIMEOUT,
) -> StoreContents:
    """Copy a store that no broker uses into an empty one, and compare both."""
    factory.open_readonly(source).close()  # to write, a missing one would be created
    with (
        factory.lead(source, now, timeout),
        factory.lead(target, now, timeout),
        closing(factory.open_store(source, may_create=False)) as opened,
        _open_empty(target) as empty,
    ):
        if StoreContents.of(opened).is_empty:
            raise InvalidSettings(f"{source} is empty", hint="check the store")
        return _copy_contents(opened, empty, now())


def _copy_contents(source: AnyStore, target: AnyStore, now: datetime) -> StoreContents:
    contents = StoreContents.of(source)
    found = factory.audit_opened(source, may_delete=isinstance(source, KubernetesStore))
    _check(found, "source")
    if isinstance(target, KubernetesStore):
        contents = contents.for_new_objects()
    # Without a line, they would be missing in a store from which nobody can delete them.
    deleted = [
        AuditEntry(now, BROKER_ACTOR, DELETED_ACTION, f"reservation/{one}") for one in found.deleted
    ]
    target.commit([*contents.changes, *deleted], contents.records.revision)
    _compare(StoreContents.of(target), contents)
    _check(factory.audit_opened(target, may_delete=False), "copy")
    return contents


def _compare(copy: StoreContents, source: StoreContents) -> None:
    log = copy.log, source.log
    is_same = (
        _by_id(copy) == _by_id(source)
        and copy.records.revision == source.records.revision
        and log[0].start == log[1].start
        and log[0].lines[: len(log[1].lines)] == log[1].lines
    )
    if not is_same:
        raise StoreFailed("the copy differs from the source", hint="do not use the copy")


def _by_id(found: StoreContents) -> list[dict[str, object]]:
    """Stores return records in any order."""
    records = found.records
    lists: tuple[Iterable[Any], ...] = (
        *(records.clusters, records.reservations, records.members, records.tokens, records.limits),
        found.archive,
    )
    return [{one.id: one for one in each} for each in lists]


def _check(found: StoreAudit, name: str) -> None:
    if found.violations:
        raise StoreFailed(
            f"the {name} has {len(found.violations)} violations, the first: {found.violations[0]}",
            hint="see `kubelend audit check`",
        )


@contextmanager
def _open_empty(url: str) -> Iterator[AnyStore]:
    with closing(factory.open_store(url)) as opened:
        if not StoreContents.of(opened).is_empty:
            raise InvalidSettings(f"{url} is not empty", hint="choose an empty store")
        yield opened


def verify(backup: Path) -> Manifest:
    """Check that a backup is complete and that its store is sound."""
    with _verified(backup, Path(tempfile.gettempdir())) as (_, manifest):
        return manifest


@contextmanager
def _verified(backup: Path, parent: Path) -> Iterator[tuple[Path, Manifest]]:
    """The directory with the extracted members, which is removed at the end."""
    with _working_directory(parent) as directory:
        manifest = _extract(backup, directory)
        _audited(directory / STORE_MEMBER)
        yield directory, manifest


def _copy_keys(keys: Mapping[str, Path], directory: Path) -> dict[str, Path]:
    """Read once: they may be rotated meanwhile."""
    copies = {name: directory / name for name in keys}
    for name, path in keys.items():
        files.write_atomic(copies[name], files.read_file(path), mode=files.PRIVATE_MODE)
    return copies


def _copy_database(store: Path, copy: Path) -> None:
    with closing(sqlite_file.open_reader(store)) as opened:
        os.close(os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL, files.PRIVATE_MODE))
        with closing(sqlite3.connect(copy)) as target:
            opened.connection.backup(target)
            # The copy has no log beside it, wherever it is opened.
            target.execute("PRAGMA journal_mode = DELETE")


def _audited(copy: Path) -> tuple[int, int]:
    """Revision and number of live reservations of a copy; `StoreFailed` if it violates an invariant."""
    found = factory.audit_store(str(copy))
    _check(found, "store")
    live = sum(1 for each in found.ledger.reservations.values() if each.finished_at is None)
    return found.ledger.revision, live


def _write_archive(archive: Path, members: Mapping[str, Path], manifest: Manifest) -> None:
    with tarfile.open(archive, "x") as tar:
        archive.chmod(files.PRIVATE_MODE)
        for name, path in members.items():
            tar.add(path, name, recursive=False, filter=_private)
        text = archive.with_name(MANIFEST_MEMBER)
        text.write_bytes(msgspec.json.encode(manifest))
        tar.add(text, MANIFEST_MEMBER, filter=_private)
    with archive.open("rb") as file:
        os.fsync(file.fileno())


def _private(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.mode, member.uid, member.gid = files.PRIVATE_MODE, 0, 0
    member.uname = member.gname = ""
    return member


def _extract(backup: Path, directory: Path) -> Manifest:
    """Extract the members that the manifest names, and compare their digests with it."""
    with _invalid_archive(backup), tarfile.open(backup, "r:") as tar:
        manifest = msgspec.json.decode(_member(tar, MANIFEST_MEMBER).read(), type=Manifest)
        if manifest.format != FORMAT or STORE_MEMBER not in manifest.digests:
            raise InvalidInput(
                f"{backup} has format {manifest.format}", hint="use a newer version of Kubelend"
            )
        for name, expected in manifest.digests.items():
            if not name.replace(".", "").replace("-", "").isalnum():
                raise InvalidInput(f"{backup} contains a member with the name {name!r}")
            _copy_out(_member(tar, name), directory / name)
            if _digest(directory / name) != expected:
                raise InvalidInput(f"{backup} is damaged: {name} does not match its digest")
        return manifest


def _member(tar: tarfile.TarFile, name: str) -> IO[bytes]:
    found = tar.extractfile(name)
    if found is None:
        raise KeyError(name)
    return found


def _copy_out(source: IO[bytes], path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, files.PRIVATE_MODE)
    with os.fdopen(descriptor, "wb") as target:
        while chunk := source.read(CHUNK):
            target.write(chunk)
        target.flush()
        os.fsync(target.fileno())


@contextmanager
def _invalid_archive(backup: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise InvalidInput(f"{backup} does not exist", hint="check the path") from None
    except (tarfile.TarError, KeyError, EOFError, msgspec.MsgspecError) as error:
        raise InvalidInput(
            f"{backup} is not a complete backup: {error}", hint="use another one"
        ) from error


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _logs_of(store: Path) -> list[Path]:
    return [store.with_name(f"{store.name}{end}") for end in ("-wal", "-shm")]


def _moved_aside(path: Path, now: datetime) -> Path:
    aside = path.with_name(f"{path.name}.before-restore-{now:%Y%m%dT%H%M%SZ}")
    path.rename(aside)
    return aside


@contextmanager
def _working_directory(parent: Path) -> Iterator[Path]:
    """Beside the result, because a rename does not cross file systems; readable by the owner only."""
    with ExitStack() as stack:
        try:
            name = stack.enter_context(tempfile.TemporaryDirectory(prefix=".backup-", dir=parent))
        except OSError as error:
            raise InvalidSettings(
                f"{parent} cannot be written: {error.strerror}", hint="choose another directory"
            ) from error
        yield Path(name)
