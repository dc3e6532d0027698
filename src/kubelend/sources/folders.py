"""Objects as files, `<directory>/<plural>/<namespace>.<name>.yaml`, which people may write and remove too.

`files.FileObjects` has one thread that calls this; nothing here may be called by two at a time. What others
do to the files is taken for what it means: a new file is a new object, an edited one a changed object, and a
removed one a deleted object. A file that was written a moment ago is left alone until it rests, for its
writer may not be done; so is a file that was there a moment ago and is not, for editors save like that.
Nothing here waits for that: it would keep all other objects waiting, and other processes too.
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
"""Seconds for which the file of a deleted object is still there, hidden: see `_bury`."""

_SUFFIX: Final = ".yaml"
_LONGEST: Final = 255 - len("..new")

log = structlog.get_logger("kubelend.objects")


class Restless(Exception):
    """Somebody is at the file: it is read, and may be written, when it rests. Carries a sentence part."""


class _Entry(msgspec.Struct):
    """What is known of one file."""

    found: Object | None = None
    """What it said when it last made sense."""
    signature: Signature | None = None
    """How it looked when it was last read or written."""
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
        """What is wrong with files that are ignored, by their path in the directory.

        Any thread may ask: what it gets is never changed, but replaced.
        """
        return self._problems

    def take_changes(self) -> list[Object | Deleted]:
        """All that became of objects since the last call, in its order."""
        changes, self._changes = self._changes, []
        return changes

    # -- looking

    def scan(self, kind: type[Object]) -> bool:
        """Take in what has changed on the disk; True if something there does not rest yet."""
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
        """Take in what has changed of one object."""
        name = _file_name(key)
        entry = self._entries[kind].get(name)
        if disks.signature(self._path(kind, name)) != (entry.signature if entry else None):
            with disks.locked(self._directory):
                self._look(kind, name)

    # -- changing

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
                f"{self._directory} cannot be made: {error.strerror}",
                hint="choose a directory that this user may write to",
            ) from error

    # -- what others did to a file

    def _current(self, kind: type[Kind], name: str) -> Kind | None:
        """The object as its file says it now: nobody's edit is to be overwritten unread."""
        self._look(kind, name)
        if name in self._restless[kind]:
            raise Restless(f"{self._path(kind, name)} is being written")
        if problem := self._problems.get(f"{kind.plural}/{name}"):
            raise Unavailable(f"{self._path(kind, name)} {problem}", hint="correct or remove it")
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
        if disks.signature(self._path(kind, name)) != seen:  # written while we read it
            self._restless[kind].add(name)
            return
        self._report(kind, name, problem)
        if found is None:
            self._entries[kind][name].signature = seen
        else:
            self._take(found, self._entries[kind][name], seen)

    def _parse(self, kind: type[Object], name: str, seen: Signature) -> Object:
        if not name.endswith(_SUFFIX):
            raise InvalidInput(f"is not read: its name is to end in {_SUFFIX}")
        if not seen.is_file:
            raise InvalidInput("is no file")
        text = disks.read(self._path(kind, name), documents.LARGEST)
        found = documents.parse(text, kind)
        if _file_name(found.key) != name:
            raise InvalidInput(
                f"metadata: says {found.key}", hint=f"name the file {_file_name(found.key)}"
            )
        return found

    def _take(self, found: Object, entry: _Entry, seen: Signature) -> None:
        meant = revisions.found_edited(entry.found, found, self.now)
        if revisions.is_over(meant):  # its last finalizer was edited away
            self._bury(meant)
        elif meant != found:
            self._write(meant)
        else:
            self._note(meant)
            entry.signature = seen

    def _missed(self, kind: type[Object], name: str, entry: _Entry) -> None:
        if disks.signature(self._directory / kind.plural) is None:  # no disk is no deletion
            raise StoreFailed(f"{self._directory / kind.plural} is gone")
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
        """Somebody removed its file: gone, unless finalizers are left and no other store has seen to them."""
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
            log.warning("file ignored", file=str(self._path(kind, name)), problem=problem)

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
        """Move its file out of sight, where it stays for a while.

        Another store has perhaps last seen it with finalizers, and would take its file for one that was
        removed too early, and put it back.
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
    """Namespaces have no dots, so the first one parts the two."""
    found = names.parse(key)
    name = f"{found.namespace}.{found.name}{_SUFFIX}"
    if len(name) > _LONGEST:
        raise InvalidInput(f"{key} is too long for the name of a file")
    return name
