"""Semantics of an API server for stores without one: names, uid, generation, resourceVersion,
finalizers. Pure.

`MemoryObjects` and `ObjectDirectory` write what these functions return, and nothing if it is the stored
object. `KubernetesObjects` uses the checks that Kubernetes leaves to clients.

Two digests let a file show what happened to it while no process watched it. A `uid` ends in a digest of
the object's key, so a copy under another name is recognised as another object. A `resourceVersion` ends
in a digest of the spec, so a spec that was edited by hand is recognised.
"""

from __future__ import annotations

import hashlib
import re
import reprlib
import secrets
import uuid
from datetime import datetime
from typing import Final, NamedTuple, Protocol, cast

import msgspec
from msgspec.structs import replace

from kubelend.core.errors import Conflict, InvalidInput
from kubelend.wire.objects import Kind, Metadata, Object

_NUMBER: Final = re.compile("[0-9]{1,18}", re.ASCII)


def apply_to_stored(stored: Kind | None, wanted: Kind, now: datetime) -> Kind:
    """The object to store; `stored` itself if nothing changes."""
    check_precondition(stored, wanted)
    return (
        new_object(wanted, now)
        if stored is None
        else _with_new_version(stored, with_changes(stored, wanted))
    )


def with_changes(stored: Kind, wanted: Kind) -> Kind:
    """The stored object with the changeable fields of the wanted one; uid, generation and version
    stay.
    """
    finalizers = wanted.metadata.finalizers
    if (
        stored.metadata.deletion_timestamp is not None
    ):  # no new finalizers on an object that is being deleted
        finalizers = tuple(name for name in finalizers if name in stored.metadata.finalizers)
    metadata = replace(
        stored.metadata,
        labels=wanted.metadata.labels,
        annotations=wanted.metadata.annotations,
        finalizers=finalizers,
    )
    return replace(stored, metadata=metadata, spec=spec_of(wanted))


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
    return _with_new_version(
        stored, _with_metadata(stored, replace(stored.metadata, deletion_timestamp=now))
    )


def is_removable(found: Object) -> bool:
    """Whether it is being deleted and has no finalizers left."""
    return found.metadata.deletion_timestamp is not None and not found.metadata.finalizers


def new_object(wanted: Kind, now: datetime) -> Kind:
    """A new object, with server-set metadata."""
    new = without_server_fields(wanted)
    metadata = replace(
        new.metadata,
        uid=_new_uid(wanted),
        generation=1,
        resource_version=_resource_version(1, wanted),
        creation_timestamp=now,
    )
    return _with_metadata(new, metadata)


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
    return replace(wanted, metadata=metadata, status=_default_status(wanted))


def apply_file_edit(stored: Kind | None, found: Kind, now: datetime) -> Kind:
    """The object that a file means, whose stored object was `stored`. `found` itself if it is
    complete.
    """
    if not is_created_by_store(found):
        return new_object(found, now) if stored is None else _replaced_by_hand(stored, found)
    if stored is None or stored.metadata.uid != found.metadata.uid:
        return _with_new_version_if_edited(found)
    if stored.metadata.resource_version != found.metadata.resource_version:
        return _with_new_version_if_edited(found)
    metadata = replace(
        stored.metadata,
        finalizers=found.metadata.finalizers,
        labels=found.metadata.labels,
        annotations=found.metadata.annotations,
    )
    return _with_new_version(stored, _with_metadata(found, metadata))


def is_created_by_store(found: Object) -> bool:
    """Whether a store created it under this name; otherwise it was written by hand."""
    return found.metadata.uid.replace("-", "").endswith(_key_digest(found).hex())


def is_unedited(found: Object) -> bool:
    """Whether a store wrote its spec."""
    _, _, digest = found.metadata.resource_version.partition("-")
    return is_created_by_store(found) and digest == _spec_digest(found)


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


def spec_of(found: Object) -> msgspec.Struct:
    return _parts(found).spec


def status_of(found: Object) -> msgspec.Struct:
    return _parts(found).status


class _Parts(Protocol):
    """Fields of every kind."""

    spec: msgspec.Struct
    status: msgspec.Struct


def _parts(found: Object) -> _Parts:
    return cast(_Parts, found)


def _replaced_by_hand(stored: Kind, found: Kind) -> Kind:
    """Written by hand over the old file: what a person does not write stays, above all finalizers."""
    metadata = replace(
        stored.metadata, labels=found.metadata.labels, annotations=found.metadata.annotations
    )
    return _with_new_version(stored, replace(stored, metadata=metadata, spec=spec_of(found)))


def _with_new_version_if_edited(found: Kind) -> Kind:
    """As another store wrote it, or as a person has edited it since."""
    if is_unedited(found):
        return found
    metadata = found.metadata
    bumped = replace(
        metadata,
        generation=metadata.generation + 1,
        resource_version=_resource_version(_version_number(metadata) + 1, found),
    )
    return _with_metadata(found, bumped)


def _with_new_version(stored: Kind, wanted: Kind) -> Kind:
    if wanted == stored:
        return stored
    generation = stored.metadata.generation + (spec_of(wanted) != spec_of(stored))
    version = _resource_version(_version_number(stored.metadata) + 1, wanted)
    return _with_metadata(
        wanted, replace(wanted.metadata, generation=generation, resource_version=version)
    )


def _with_metadata(found: Kind, metadata: Metadata) -> Kind:
    return replace(found, metadata=metadata)


def _default_status(wanted: Object) -> object:
    (field,) = (field for field in msgspec.structs.fields(wanted) if field.name == "status")
    return field.default


def _new_uid(wanted: Object) -> str:
    # The UUID's version bits are in the random part, so the digest stays intact.
    return str(uuid.UUID(bytes=secrets.token_bytes(10) + _key_digest(wanted), version=4))


def _key_digest(found: Object) -> bytes:
    return hashlib.blake2b(f"{found.plural}/{found.key}".encode(), digest_size=6).digest()


def _resource_version(number: int, found: Object) -> str:
    return f"{number}-{_spec_digest(found)}"


def _spec_digest(found: Object) -> str:
    text = msgspec.json.encode(spec_of(found), order="deterministic")
    return hashlib.blake2b(text, digest_size=4).hexdigest()


def _version_number(metadata: Metadata) -> int:
    number, _, _ = metadata.resource_version.partition("-")
    return int(number) if _NUMBER.fullmatch(number) else 0


MAX_LABEL_LENGTH: Final = 63
MAX_NAME_LENGTH: Final = 253

_LABEL: Final = r"[a-z0-9]++(?:-++[a-z0-9]++)*+"
_NAMESPACE: Final = re.compile(_LABEL, re.ASCII)
_NAME: Final = re.compile(rf"{_LABEL}(?:\.{_LABEL})*+", re.ASCII)


class ObjectKey(NamedTuple):
    """Identifies an object of its kind."""

    namespace: str
    name: str

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"


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
