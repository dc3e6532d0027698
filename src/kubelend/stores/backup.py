"""Backups of a file store: one archive with a consistent copy of the store and the keys that belong to it.

A backup is made while a broker runs, and audited before it counts as one. A restore verifies the archive,
moves what is in the way aside, and records the revision of the copy, so that the broker accepts the older
store (see `sqlite_file`).
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from datetime import datetime
from pathlib import Path
from typing import IO, Final

import msgspec

from kubelend.core.errors import InvalidInput, InvalidSettings, StoreFailed
from kubelend.kits import files
from kubelend.stores import factory, sqlite_file

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


def create(store: Path, output: Path, keys: Mapping[str, Path], now: datetime) -> Manifest:
    """Back up a store and its keys (by member name) into a new file that only its owner can read."""
    if output.exists():
        raise InvalidSettings(f"{output} already exists", hint="choose another name")
    with _working_directory(output.parent) as directory:
        copy = directory / STORE_MEMBER
        _copy_database(store, copy)
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


def restore(backup: Path, store: Path, keys: Mapping[str, Path], now: datetime) -> list[Path]:
    """Put the store and the keys of a backup in their places; returns the files that were moved aside.

    `keys` are the places of members other than the store; what the backup does not have stays as it is.
    """
    store = Path(os.path.realpath(store))
    with (
        _verified(backup, store.parent) as (directory, manifest),
        sqlite_file.locked(store) as lock,
    ):
        places = {name: path for name, path in keys.items() if name in manifest.digests}
        for path in places.values():
            if not path.parent.is_dir():
                raise InvalidSettings(f"{path.parent} does not exist", hint="create the directory")
        in_the_way = [store, *_logs_of(store), *places.values()]
        moved = [_moved_aside(path, now) for path in in_the_way if path.exists()]
        for name, path in places.items():
            files.write_atomic(path, (directory / name).read_bytes(), mode=files.PRIVATE_MODE)
        (directory / STORE_MEMBER).rename(store)
        sqlite_file.write_revision(lock, manifest.revision)
    files.sync_directory(store.parent)
    return moved


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
    if found.violations:
        raise StoreFailed(
            f"the store has {len(found.violations)} violations, the first: {found.violations[0]}",
            hint="see `kubelend audit check`",
        )
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
