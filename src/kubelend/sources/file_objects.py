"""Local objects as YAML files in a directory: what people request, and what the agent stores.

    requests/<namespace>.<name>.yaml     manifests of ResourceRequests, which the agent only reads
    <plural>/<namespace>.<name>.yaml     objects with their status, which only the agent writes

A manifest creates an object; its changes change the object's spec, and its removal deletes the object.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import structlog
import yaml

from kubelend.agent import health
from kubelend.core.errors import InvalidInput, InvalidSettings, Unavailable
from kubelend.kits import files
from kubelend.kits.files import FileState
from kubelend.sources import object_semantics
from kubelend.sources.memory_objects import MemoryObjects, WatchQueue
from kubelend.wire import strict_yaml
from kubelend.wire.objects import GROUP, KINDS, VERSION, Kind, Object, ResourceRequest

REQUESTS_DIRECTORY: Final = "requests"

POLL_INTERVAL: Final = timedelta(milliseconds=200)
SETTLE_TIME: Final = timedelta(milliseconds=50)
"""A manifest is read, or counts as removed, when two scans at this interval have found it the same:
editors write files in several steps."""

_FILE_SUFFIX: Final = ".yaml"
_MAX_FILE_NAME_LENGTH: Final = 255 - len("..new")

log = structlog.get_logger("kubelend.objects")


class _Manifest(NamedTuple):
    """A manifest as it was last read."""

    state: FileState | None = None
    """None before it is read for the first time."""
    wanted: ResourceRequest | None = None
    problem: str = ""
    """Why it is ignored; `wanted` is None then."""


class FileObjects(MemoryObjects):
    """`agent.ports.LocalObjects` of one process: read at the start, and written on each change."""

    def __init__(
        self,
        directory: Path,
        clock: Callable[[], datetime],
        poll: timedelta = POLL_INTERVAL,
        settle: timedelta = SETTLE_TIME,
    ) -> None:
        """`poll` is the interval between scans of the manifests, `settle` that while some are changing."""
        super().__init__(clock)
        self._directory = directory
        self._intervals = {True: poll.total_seconds(), False: settle.total_seconds()}
        self._scan_due = 0.0
        self._scan_error = ""
        self._states: dict[str, FileState] = {}
        """Of all manifests, as of the last scan."""
        self._manifests: dict[str, _Manifest] = {}
        """By name; also of those that were there when the stored objects were written."""
        self._lock = ExitStack()
        self._open()

    @property
    def problem(self) -> str:
        """The files that cannot be used, each with its error; empty if there are none."""
        ignored = (
            f"{REQUESTS_DIRECTORY}/{name}: {one.problem}"
            for name, one in sorted(self._manifests.items())
            if one.problem
        )
        return health.join_errors([*filter(None, [self._scan_error]), *ignored])

    def scan(self) -> bool:
        """Reads the manifests and applies them to the objects; False if some are being changed."""
        requests = self._directory / REQUESTS_DIRECTORY
        before, self._states = self._states, files.file_states(requests, (_FILE_SUFFIX, ".yml"))
        is_settled = before == self._states
        for name in sorted(self._manifests.keys() | self._states.keys()):
            state = self._states.get(name)
            if state != before.get(name):
                continue
            if state is None:
                self._on_removed(name)
            else:
                self._apply_manifest(name, state)
        return is_settled

    def close(self) -> None:
        """Releases the directory for another process."""
        self._lock.close()

    def _open(self) -> None:
        try:
            for name in (REQUESTS_DIRECTORY, *(kind.plural for kind in KINDS)):
                (self._directory / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidSettings(
                f"{self._directory} cannot be created: {error.strerror}",
                hint="choose a directory that this user may write to",
            ) from error
        self._lock.enter_context(files.lock_directory(self._directory))
        for kind in KINDS:
            for path in (self._directory / kind.plural).glob(f"[!.]*{_FILE_SUFFIX}"):
                self._load(path, kind)

    def _load(self, path: Path, kind: type[Object]) -> None:
        try:
            found = parse_object(path.read_bytes(), kind)
        except (InvalidInput, OSError) as error:
            raise InvalidSettings(f"{path}: {error}", hint="correct or remove the file") from error
        if not found.metadata.uid:
            hint = f"move manifests to {self._directory / REQUESTS_DIRECTORY}"
            raise InvalidSettings(f"{path}: not written by an agent", hint=hint)
        self._store.put(found)
        if kind is ResourceRequest:
            self._manifests[path.name] = _Manifest()

    # -- manifests

    async def _wait_for_event(self, kind: type[Kind], queue: WatchQueue[Kind]) -> None:
        """Also scans the manifests when that is due; one scan serves all watches."""
        if kind is not ResourceRequest:
            await super()._wait_for_event(kind, queue)
            return
        loop = asyncio.get_running_loop()
        await queue.wait(max(self._scan_due - loop.time(), 0))
        if loop.time() >= self._scan_due:
            is_settled = self._scan_and_report()
            self._scan_due = loop.time() + self._intervals[is_settled]

    def _scan_and_report(self) -> bool:
        try:
            is_settled, error = self.scan(), ""
        except Unavailable as failure:
            is_settled, error = True, str(failure)
        if error and error != self._scan_error:
            log.warning("Scan of object files failed, will retry", error=error)
        self._scan_error = error
        return is_settled

    def _apply_manifest(self, name: str, state: FileState) -> None:
        manifest = self._manifests.get(name)
        if manifest is None or manifest.state != state:
            manifest = self._manifests[name] = self._read_manifest(name, state)
        if manifest.wanted is None:
            return
        stored = self._store.find(ResourceRequest, manifest.wanted.key)
        # While the previous object is being deleted, its successor waits.
        if stored is not None and stored.metadata.deletion_timestamp is not None:
            return
        try:
            changed = object_semantics.apply_manifest(stored, manifest.wanted, self._clock())
        except InvalidInput as error:
            self._manifests[name] = self._reject(name, state, error)
        else:
            self._save(stored, changed)

    def _read_manifest(self, name: str, state: FileState) -> _Manifest:
        path = self._directory / REQUESTS_DIRECTORY / name
        try:
            return _Manifest(state, _parse_manifest(path, state))
        except InvalidInput as error:
            return self._reject(name, state, error)

    def _reject(self, name: str, state: FileState, error: InvalidInput) -> _Manifest:
        """A manifest that is ignored until it changes."""
        problem, before = str(error), self._manifests.get(name)
        if before is None or before.problem != problem:
            path = self._directory / REQUESTS_DIRECTORY / name
            log.warning("Ignoring invalid object file", file=str(path), error=problem)
        return _Manifest(state, problem=problem)

    def _on_removed(self, name: str) -> None:
        for stored in self._store.list(ResourceRequest):
            if _file_name(stored.key) == name:
                self._save(stored, object_semantics.mark_deleted(stored, self._clock()))
        del self._manifests[name]

    # -- objects

    def _save(self, stored: Object | None, wanted: Kind) -> Kind:
        """Writes the file first: what others have seen is not lost."""
        path = object_path(self._directory, type(wanted), wanted.key)
        if object_semantics.is_removable(wanted):
            files.unlink_file(path)
        elif wanted is not stored:
            files.replace_file(path, dump_object(wanted))
        return super()._save(stored, wanted)


def object_path(directory: Path, kind: type[Object], key: str) -> Path:
    """Returns the file that an agent writes an object to."""
    return directory / kind.plural / _file_name(key)


def read_object(directory: Path, kind: type[Kind], key: str) -> Kind | None:
    """Returns an object of the agent that uses the directory, in another process; None if there is none."""
    try:
        return parse_object(object_path(directory, kind, key).read_bytes(), kind)
    except FileNotFoundError:
        return None


def _parse_manifest(path: Path, state: FileState) -> ResourceRequest:
    if path.suffix != _FILE_SUFFIX:
        raise InvalidInput(f"ignored: the file name must end in {_FILE_SUFFIX}")
    if not state.is_file:
        raise InvalidInput("not a regular file")
    text = files.read_limited(path, strict_yaml.MAX_BYTES)
    found = parse_manifest(text, ResourceRequest)
    if (name := _file_name(found.key)) != path.name:
        raise InvalidInput(f"metadata: is {found.key}", hint=f"rename the file to {name}")
    return found


def _file_name(key: str) -> str:
    """Namespaces have no dots, so the first one is the separator."""
    found = object_semantics.parse_object_key(key)
    name = f"{found.namespace}.{found.name}{_FILE_SUFFIX}"
    if len(name) > _MAX_FILE_NAME_LENGTH:
        raise InvalidInput(f"{key} is too long for a file name")
    return name


API_VERSION: Final = f"{GROUP}/{VERSION}"


def parse_object(text: bytes, kind: type[Kind]) -> Kind:
    """The object in a file."""
    return strict_yaml.convert_record(_load_object(text, kind), kind)


def parse_manifest(text: bytes, kind: type[Kind]) -> Kind:
    """The object in a file that a person has written: unknown fields of the spec are errors."""
    raw = _load_object(text, kind)
    found = strict_yaml.convert_record(raw, kind)
    for path in strict_yaml.unknown_fields(
        raw.get("spec"), object_semantics.spec_of(found), "spec"
    ):
        raise InvalidInput(f"{path}: unknown field of {kind.kind}")
    return found


_Dumper: Final[Any] = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
"""The C class is ten times faster; not every build of PyYAML has it."""


def dump_object(found: Object) -> bytes:
    """The object as the content of its file."""
    parts: dict[str, Any] = msgspec.to_builtins(found)
    whole = {"apiVersion": API_VERSION, "kind": found.kind, **parts}
    return yaml.dump(whole, Dumper=_Dumper, sort_keys=False, allow_unicode=True, encoding="utf-8")


def _load_object(text: bytes, kind: type[Object]) -> dict[Any, Any]:
    raw = strict_yaml.load_yaml(text)
    if not isinstance(raw, dict):
        raise InvalidInput("not an object", hint="write apiVersion, kind, metadata and spec")
    for field, wanted in (("apiVersion", API_VERSION), ("kind", kind.kind)):
        if raw.get(field) != wanted:
            raise InvalidInput(f"{field}: must be {wanted}")
    return raw
