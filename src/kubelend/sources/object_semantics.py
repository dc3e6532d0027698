"""Semantics of an API server for stores without one: names, uid, generation, resourceVersion,
finalizers. Pure.

`MemoryObjects` stores what these functions return, and nothing if it is the stored object.
`KubernetesObjects` uses the checks that Kubernetes leaves to clients.
"""

from __future__ import annotations

import re
import reprlib
import uuid
from datetime import datetime
from typing import Any, Final, NamedTuple, Protocol, cast

import msgspec
from msgspec.structs import replace

from kubelend.core.errors import Conflict, InvalidInput
from kubelend.wire import bodies, json_types
from kubelend.wire.objects import Kind, Metadata, Object


def apply_to_stored(stored: Kind | None, wanted: Kind, now: datetime) -> Kind:
    """The object to store; `stored` itself if nothing changes."""
    check_precondition(stored, wanted)
    if stored is None:
        return new_object(wanted, now)
    _check_immutable_fields(stored, wanted)
    return _with_new_version(stored, with_changes(stored, wanted))


def apply_manifest(stored: Kind | None, manifest: Kind, now: datetime) -> Kind:
    """As `apply_to_stored`, for what a person has written: the finalizers of the stored object stay."""
    if stored is None:
        return new_object(manifest, now)
    _check_immutable_fields(stored, manifest)
    wanted = _with_metadata(manifest, finalizers=stored.metadata.finalizers)
    return _with_new_version(stored, with_changes(stored, wanted))


def _check_immutable_fields(stored: Object, wanted: Object) -> None:
    """`InvalidInput` if a field differs that the rules of the CRD protect."""
    before, after = spec_of(stored), spec_of(wanted)
    for name in wanted.immutable_fields:
        if getattr(before, name) != getattr(after, name):
            field = bodies.camel_case(name)
            raise InvalidInput(f"spec.{field}: cannot be changed", hint=json_types.RECREATE)


def with_changes(stored: Kind, wanted: Kind) -> Kind:
    """The stored object with the changeable fields of the wanted one; uid, generation and version
    stay.
    """
    finalizers = wanted.metadata.finalizers
    if stored.metadata.deletion_timestamp is not None:  # being deleted: no new finalizers
        finalizers = tuple(name for name in finalizers if name in stored.metadata.finalizers)
    changed = _with_metadata(
        stored,
        labels=wanted.metadata.labels,
        annotations=wanted.metadata.annotations,
        finalizers=finalizers,
    )
    return replace(changed, spec=spec_of(wanted))


def apply_status_to_stored(stored: Kind | None, wanted: Kind) -> Kind | None:
    """The object to store; None if it is gone or has another `uid`; `stored` itself if nothing
    changes.
    """
    if stored is None or wanted.metadata.uid not in ("", stored.metadata.uid):
        return None
    check_precondition(stored, wanted)
    return _with_new_version(stored, replace(stored, status=status_of(wanted)))


def mark_deleted(stored: Kind, now: datetime) -> Kind:
    """The object to store until its finalizers are removed; `stored` itself if it is being deleted
    already.
    """
    if stored.metadata.deletion_timestamp is not None:
        return stored
    return _with_new_version(stored, _with_metadata(stored, deletion_timestamp=now))


def is_removable(found: Object) -> bool:
    """Whether it is being deleted and has no finalizers left."""
    return found.metadata.deletion_timestamp is not None and not found.metadata.finalizers


def new_object(wanted: Kind, now: datetime) -> Kind:
    """A new object, with server-set metadata."""
    return _with_metadata(
        without_server_fields(wanted),
        uid=str(uuid.uuid4()),
        generation=1,
        resource_version="1",
        creation_timestamp=now,
    )


def without_server_fields(wanted: Kind) -> Kind:
    """A new object without server-set metadata and status."""
    given = wanted.metadata
    metadata = Metadata(
        given.name,
        given.namespace,
        finalizers=given.finalizers,
        labels=given.labels,
        annotations=given.annotations,
    )
    (status,) = (field for field in msgspec.structs.fields(wanted) if field.name == "status")
    return replace(wanted, metadata=metadata, status=status.default)


def check_precondition(stored: Object | None, wanted: Object) -> None:
    """`Conflict` if `wanted` is based on another object, or on an older version, than the stored
    one.
    """
    uid, version = wanted.metadata.uid, wanted.metadata.resource_version
    if stored is None:
        if uid:
            raise conflict_error(wanted, "was deleted")
    elif uid not in ("", stored.metadata.uid):
        raise conflict_error(wanted, "was recreated")
    elif version not in ("", stored.metadata.resource_version):
        raise conflict_error(wanted)


def conflict_error(wanted: Object, problem: str = "was modified") -> Conflict:
    return Conflict(f"{wanted.kind} {wanted.key} {problem}", hint="read the object again")


class _Parts(Protocol):
    """Fields of every kind."""

    spec: msgspec.Struct
    status: msgspec.Struct


def spec_of(found: Object) -> msgspec.Struct:
    return cast(_Parts, found).spec


def status_of(found: Object) -> msgspec.Struct:
    return cast(_Parts, found).status


def _with_new_version(stored: Kind, wanted: Kind) -> Kind:
    if wanted == stored:
        return stored
    generation = stored.metadata.generation + (spec_of(wanted) != spec_of(stored))
    version = str(int(stored.metadata.resource_version) + 1)
    return _with_metadata(wanted, generation=generation, resource_version=version)


def _with_metadata(found: Kind, **fields: Any) -> Kind:
    return replace(found, metadata=replace(found.metadata, **fields))


MAX_LABEL_LENGTH: Final = 63
MAX_NAME_LENGTH: Final = 253

_LABEL: Final = r"[a-z0-9]++(?:-++[a-z0-9]++)*+"
_NAMESPACE: Final = re.compile(_LABEL, re.ASCII)
_NAME: Final = re.compile(rf"{_LABEL}(?:\.{_LABEL})*+", re.ASCII)


class ObjectKey(NamedTuple):
    """Identifies an object of its kind."""

    namespace: str
    name: str


def parse_object_key(key: str) -> ObjectKey:
    """The parts of `namespace/name`, or `InvalidInput`."""
    namespace, _, name = key.partition("/")
    if len(namespace) > MAX_LABEL_LENGTH or not _NAMESPACE.fullmatch(namespace):
        raise InvalidInput(
            f"{reprlib.repr(namespace)} is not a valid namespace",
            hint=f"use lower-case letters, digits and dashes, at most {MAX_LABEL_LENGTH}",
        )
    if len(name) > MAX_NAME_LENGTH or not _NAME.fullmatch(name):
        raise InvalidInput(
            f"{reprlib.repr(name)} is not a valid object name",
            hint=f"use lower-case letters, digits, dashes and dots, at most {MAX_NAME_LENGTH}",
        )
    return ObjectKey(namespace, name)
