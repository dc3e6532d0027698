"""Objects as files in a directory, `<directory>/<plural>/<namespace>.<name>.yaml`. Used by one
thread at a time.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final, cast

import msgspec
import structlog

from kubelend.agent.ports import Deleted
from kubelend.core.errors import InvalidInput, InvalidSettings, StoreFailed, Unavailable
from kubelend.sources import disks, documents, names, revisions
from kubelend.sources.disks import Signature
from kubelend.wire.objects import KINDS, Kind, Object

SETTLE: Final = timedelta(milliseconds=50)

GONE: Final = ".gone"
GONE_FOR: Final = 60.0
"""Seconds for which the file of a deleted object is kept, hidden: see `_move_to_deleted`."""

_SUFFIX: Final = ".yaml"
_LONGEST: Final = 255 - len("..new")

log = structlog.get_logger("kubelend.objects")


class Restless(Exception):
    """The file is being modified; retry when it has settled. Carries part of a sentence."""


class _Entry(msgspec.Struct):
    """What is known of one file."""

    found: Object | None = None
    """Its last valid content."""
    signature: Signature | None = None
    """Of the file when it was last read or written."""
    missed_since: float | None = None


class Folder:
    """All objects of one cluster."""

    def __init__(self, directory: Path, now: datetime, settle: timedelta = SETTLE) -> None:
        self.now = now
        """Set it before each call: the clock belongs to another thread."""
        self._directory = directory
        self._settle = settle.total_seconds()
        self._entries: defaultdict[type[Object], dict[str, _Entry]] = defaultdict(dict)
        self._restless: defaultdict[type[Object], set[str]] = defaultdict(set)
        self._problems: Mapping[str, str] = {}
        self._changes: list[Object | Deleted] = []
        self._prepare()

    @property
    def problems(self) -> Mapping[str, str]:
        """The errors of files that are ignored, by their path in the directory.

        Safe to read from any thread: the mapping is replaced, never changed.
        """
        return self._problems

    def take_changes(self) -> list[Object | Deleted]:
        """All changes of objects since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    # -- reading

    def scan(self, kind: type[Object]) -> bool:
        """Read what has changed on the disk; True if files are busy."""
        seen = disks.signatures(self._directory / kind.plural, (_SUFFIX, ".yml"))
        entries = self._entries[kind]
        changed = {
            name for name in seen if name not in entries or entries[name].signature != seen[name]
        } | (entries.keys() - seen.keys())
        if changed:
            with disks.locked(self._directory):
                for name in sorted(changed):
                    self._look(kind, name)
        return bool(self._restless[kind])

    def glance(self, kind: type[Object], key: str) -> None:
        """Read what has changed of one object."""
        name = _file_name(key)
        entry = self._entries[kind].get(name)
        if disks.signature(self._path(kind, name)) != (entry.signature if entry else None):
            with disks.locked(self._directory):
                self._look(kind, name)

    # -- writing files objects

    def apply(self, wanted: Kind) -> Kind:
        name = _file_name(wanted.key)
        with disks.locked(self._directory):
            kept = self._current(type(wanted), name)
            return self._keep(kept, revisions.apply(kept, wanted, self.now))

    def set_status(self, wanted: Kind) -> Kind | None:
        name = _file_name(wanted.key)
        with disks.locked(self._directory):
            kept = self._current(type(wanted), name)
            changed = revisions.set_status(kept, wanted)
            return None if changed is None else self._keep(kept, changed)

    def delete(self, kind: type[Object], key: str) -> None:
        name = _file_name(key)
        with disks.locked(self._directory):
            kept = self._current(kind, name)
            if kept is not None:
                self._keep(kept, revisions.delete(kept, self.now))

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
        self._look(kind, name)
        if name in self._restless[kind]:
            raise Restless(f"{self._path(kind, name)} is being written")
        if problem := self._problems.get(f"{kind.plural}/{name}"):
            raise Unavailable(
                f"{self._path(kind, name)}: {problem}", hint="correct or remove the file"
            )
        entry = self._entries[kind].get(name)
        return None if entry is None else cast(Kind | None, entry.found)

    def _look(self, kind: type[Object], name: str) -> None:
        self._restless[kind].discard(name)
        entry = self._entries[kind].setdefault(name, _Entry())
        seen = disks.signature(self._path(kind, name))
        if seen is None:
            self._missed(kind, name, entry)
        elif seen == entry.signature:
            entry.missed_since = None
        elif 0 <= seen.age() < self._settle:
            self._restless[kind].add(name)
        else:
            entry.missed_since = None
            self._read(kind, name, seen)

    def _read(self, kind: type[Object], name: str, seen: Signature) -> None:
        found, problem = None, ""
        try:
            found = self._parse(kind, name, seen)
        except InvalidInput as error:
            problem = str(error)
        if disks.signature(self._path(kind, name)) != seen:  # modified while it was read
            self._restless[kind].add(name)
            return
        self._report(kind, name, problem)
        if found is None:
            self._entries[kind][name].signature = seen
        else:
            self._take(found, self._entries[kind][name], seen)

    def _parse(self, kind: type[Object], name: str, seen: Signature) -> Object:
        if not name.endswith(_SUFFIX):
            raise InvalidInput(f"ignored: the file name must end in {_SUFFIX}")
        if not seen.is_file:
            raise InvalidInput("not a regular file")
        text = disks.read(self._path(kind, name), documents.LARGEST)
        found = documents.parse(text, kind)
        if _file_name(found.key) != name:
            raise InvalidInput(
                f"metadata: is {found.key}", hint=f"rename the file to {_file_name(found.key)}"
            )
        return found

    def _take(self, found: Object, entry: _Entry, seen: Signature) -> None:
        meant = revisions.found_edited(entry.found, found, self.now)
        if revisions.is_over(meant):  # its last finalizer was removed by hand
            self._bury(meant)
        elif meant != found:
            self._write(meant)
        else:
            self._note(meant)
            entry.signature = seen

    def _missed(self, kind: type[Object], name: str, entry: _Entry) -> None:
        if (
            disks.signature(self._directory / kind.plural) is None
        ):  # an unmounted disk is not a deletion
            raise StoreFailed(f"{self._directory / kind.plural} does not exist")
        now = time.monotonic()
        if entry.missed_since is None:
            entry.missed_since = now
        if entry.found is None:
            self._forget(kind, name)
        elif not self._is_buried(entry.found) and now - entry.missed_since < self._settle:
            self._restless[kind].add(name)
        else:
            self._removed(entry.found)

    def _removed(self, found: Object) -> None:
        """The file was removed: the object is deleted, unless it has finalizers that no other
        process has handled.
        """
        if found.metadata.finalizers and not self._is_buried(found):
            self._write(revisions.delete(found, self.now))
        else:
            self._forget(type(found), _file_name(found.key))
            self._changes.append(Deleted(found))

    def _report(self, kind: type[Object], name: str, problem: str) -> None:
        path = f"{kind.plural}/{name}"
        if not problem and path in self._problems:
            self._problems = {one: why for one, why in self._problems.items() if one != path}
        elif problem and self._problems.get(path) != problem:
            self._problems = {**self._problems, path: problem}
            log.warning(
                "Ignoring invalid object file", file=str(self._path(kind, name)), error=problem
            )

    # -- writing

    def _keep(self, kept: Object | None, wanted: Kind) -> Kind:
        if revisions.is_over(wanted):
            self._bury(wanted)
        elif wanted is not kept:
            self._write(wanted)
        return wanted

    def _write(self, found: Object) -> None:
        path = self._path(type(found), _file_name(found.key))
        signature = disks.write(path, documents.dump(found))
        self._note(found)
        self._entries[type(found)][path.name].signature = signature

    def _note(self, found: Object) -> None:
        entry = self._entries[type(found)].setdefault(_file_name(found.key), _Entry())
        if entry.found != found:
            self._changes.append(found)
        entry.found, entry.missed_since = found, None

    def _bury(self, found: Object) -> None:
        """Move the file to the hidden directory, where it is kept for a while.

        Another process may have last read it with finalizers, and would restore a file that was simply
        removed.
        """
        name, graveyard = _file_name(found.key), self._directory / GONE / found.plural
        disks.move(self._path(type(found), name), graveyard / name)
        self._forget(type(found), name)
        self._changes.append(Deleted(found))
        for old, seen in disks.signatures(graveyard, (_SUFFIX,)).items():
            if seen.age() > GONE_FOR:
                disks.discard(graveyard / old)

    def _is_buried(self, found: Object) -> bool:
        grave = self._directory / GONE / found.plural / _file_name(found.key)
        if disks.signature(grave) is None:
            return False
        try:
            buried = documents.parse(disks.read(grave, documents.LARGEST), type(found))
        except InvalidInput:
            return False
        return buried.metadata.uid == found.metadata.uid

    def _forget(self, kind: type[Object], name: str) -> None:
        self._entries[kind].pop(name, None)
        self._report(kind, name, "")

    def _path(self, kind: type[Object], name: str) -> Path:
        return self._directory / kind.plural / name


def _file_name(key: str) -> str:
    """Namespaces have no dots, so the first one is the separator."""
    found = names.parse(key)
    name = f"{found.namespace}.{found.name}{_SUFFIX}"
    if len(name) > _LONGEST:
        raise InvalidInput(f"{key} is too long for a file name")
    return name
