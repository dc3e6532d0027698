"""YAML that people write: text to plain values, objects to text and back, with errors that say where.

Called by `folders` for the files of local objects and by `descriptions` for simulated clusters. What a
person gets wrong ends in `InvalidInput` that names the field; nothing in a text may harm the process.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, TypeVar

import msgspec
import yaml

from kubelend.core.errors import InvalidInput
from kubelend.sources import revisions
from kubelend.wire import complaints
from kubelend.wire.objects import GROUP, VERSION, Kind, Object

LARGEST: Final = 2**20
"""Bytes; as much as Kubernetes takes, and far more than anybody writes."""

DEEPEST: Final = 64
"""Levels of nesting: the reader calls itself for each, and a few 10,000 would be the end of the process."""

API_VERSION: Final = f"{GROUP}/{VERSION}"

Record = TypeVar("Record")


def values(text: bytes) -> Any:
    """The plain values of one YAML document; times stay texts."""
    if len(text) > LARGEST:
        raise InvalidInput(f"has {len(text)} bytes, more than {LARGEST}")
    try:
        decoded = text.decode()
        _check_shape(decoded)
        return yaml.load(decoded, Loader=_Loader)  # noqa: S506  a subclass of the safe one
    except yaml.MarkedYAMLError as error:
        raise InvalidInput(f"is no YAML: {_where(error)}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise InvalidInput(f"is no YAML: {error}") from error


def record(found: Any, kind: type[Record]) -> Record:
    """The same as a record, or `InvalidInput` that names the field."""
    try:
        return msgspec.convert(found, kind)
    except msgspec.ValidationError as error:
        raise InvalidInput(complaints.readable(error)) from error


def written(found: Any, kind: type[Record]) -> Record:
    """The same of what a person has written: a field that means nothing is a mistake."""
    made = record(found, kind)
    for path in _unknown(found, made, ""):
        raise InvalidInput(f"{path.removeprefix('.')}: is not known here")
    return made


def parse(text: bytes, kind: type[Kind]) -> Kind:
    """The object in a file. What a person has written must not have fields that mean nothing."""
    raw = values(text)
    if not isinstance(raw, dict):
        raise InvalidInput("is no object", hint="write apiVersion, kind, metadata and spec")
    _expect(raw, "apiVersion", API_VERSION)
    _expect(raw, "kind", kind.kind)
    found = record(raw, kind)
    if not revisions.is_untouched(found):
        for path in _unknown(raw.get("spec"), revisions.spec_of(found), "spec"):
            raise InvalidInput(f"{path}: is no field of {kind.kind}")
    return found


def dump(found: Object) -> bytes:
    """The object as a file says it."""
    parts: dict[str, Any] = msgspec.to_builtins(found)
    whole = {"apiVersion": API_VERSION, "kind": found.kind, **parts}
    return yaml.dump(whole, Dumper=_Dumper, sort_keys=False, allow_unicode=True, encoding="utf-8")


# The C ones are ten times as quick; not every build of PyYAML has them.
_BaseLoader: Final[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_Dumper: Final[Any] = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _Loader(_BaseLoader):  # type: ignore[misc]  # which one it is, only this machine knows
    """Leaves times alone: msgspec reads them, quoted or not, and a label may look like one."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in _BaseLoader.yaml_implicit_resolvers.items()
}


def _check_shape(text: str) -> None:
    """Before anything is built of it: aliases can make a small text huge, and depth ends the process."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.AliasEvent):
            raise InvalidInput("has an alias (*)", hint="write it out")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > DEEPEST:
            raise InvalidInput(f"is nested more than {DEEPEST} levels deep")


def _where(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark
    place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return f"{place}{error.problem}"


def _expect(raw: dict[Any, Any], field: str, wanted: str) -> None:
    if raw.get(field) != wanted:
        raise InvalidInput(f"{field}: is to be {wanted}")


def _unknown(raw: Any, read: Any, path: str) -> Iterator[str]:
    if isinstance(raw, dict) and isinstance(read, msgspec.Struct):
        names = {field.encode_name: field.name for field in msgspec.structs.fields(read)}
        for name, value in raw.items():
            if name not in names:
                yield f"{path}.{name}"
            else:
                yield from _unknown(value, getattr(read, names[name]), f"{path}.{name}")
    elif isinstance(raw, list) and isinstance(read, list | tuple):
        for index, (value, part) in enumerate(zip(raw, read, strict=False)):
            yield from _unknown(value, part, f"{path}[{index}]")
