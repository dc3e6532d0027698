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
import secrets
import uuid
from datetime import datetime
from typing import Final, Protocol, cast

import msgspec
from msgspec.structs import replace

from kubelend.core.errors import Conflict
from kubelend.wire.objects import Kind, Metadata, Object

_NUMBER: Final = re.compile("[0-9]{1,18}", re.ASCII)


def apply(kept: Kind | None, wanted: Kind, now: datetime) -> Kind:
    """The object to store; `stored` itself if nothing changes."""
    check(kept, wanted)
    return created(wanted, now) if kept is None else _revised(kept, edited(kept, wanted))


def edited(kept: Kind, wanted: Kind) -> Kind:
    """The stored object with the changeable fields of the wanted one; uid, generation and version
    stay.
    """
    finalizers = wanted.metadata.finalizers
    if (
        kept.metadata.deletion_timestamp is not None
    ):  # no new finalizers on an object that is being deleted
        finalizers = tuple(name for name in finalizers if name in kept.metadata.finalizers)
    metadata = replace(
        kept.metadata,
        labels=wanted.metadata.labels,
        annotations=wanted.metadata.annotations,
        finalizers=finalizers,
    )
    return replace(kept, metadata=metadata, spec=spec_of(wanted))


def set_status(kept: Kind | None, wanted: Kind) -> Kind | None:
    """The object to store; None if it is gone or has another `uid`; `stored` itself if nothing
    changes.
    """
    if kept is None or wanted.metadata.uid not in ("", kept.metadata.uid):
        return None
    check(kept, wanted)
    return _revised(kept, replace(kept, status=status_of(wanted)))


def delete(kept: Kind, now: datetime) -> Kind:
    """The object to store until its finalizers are removed; `stored` itself if it is being deleted
    already.
    """
    if kept.metadata.deletion_timestamp is not None:
        return kept
    return _revised(kept, _with(kept, replace(kept.metadata, deletion_timestamp=now)))


def is_over(found: Object) -> bool:
    """Whether it is being deleted and has no finalizers left."""
    return found.metadata.deletion_timestamp is not None and not found.metadata.finalizers


def created(wanted: Kind, now: datetime) -> Kind:
    """A new object, with server-set metadata."""
    new = blank(wanted)
    metadata = replace(
        new.metadata,
        uid=_new_uid(wanted),
        generation=1,
        resource_version=_version(1, wanted),
        creation_timestamp=now,
    )
    return _with(new, metadata)


def blank(wanted: Kind) -> Kind:
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


def found_edited(kept: Kind | None, found: Kind, now: datetime) -> Kind:
    """The object that a file means, whose stored object was `stored`. `found` itself if it is
    complete.
    """
    if not is_ours(found):
        return created(found, now) if kept is None else _rewritten(kept, found)
    if kept is None or kept.metadata.uid != found.metadata.uid:
        return _checked(found)
    if kept.metadata.resource_version != found.metadata.resource_version:
        return _checked(found)
    metadata = replace(
        kept.metadata,
        finalizers=found.metadata.finalizers,
        labels=found.metadata.labels,
        annotations=found.metadata.annotations,
    )
    return _revised(kept, _with(found, metadata))


def is_ours(found: Object) -> bool:
    """Whether a store created it under this name; otherwise it was written by hand."""
    return found.metadata.uid.replace("-", "").endswith(_mark(found).hex())


def is_untouched(found: Object) -> bool:
    """Whether a store wrote its spec."""
    _, _, digest = found.metadata.resource_version.partition("-")
    return is_ours(found) and digest == _digest(found)


def check(kept: Object | None, wanted: Object) -> None:
    """`Conflict` if `wanted` is based on another object, or on an older version, than the stored
    one.
    """
    uid, version = wanted.metadata.uid, wanted.metadata.resource_version
    if kept is None:
        if uid:
            raise conflict(wanted, "was deleted")
    elif uid not in ("", kept.metadata.uid):
        raise conflict(wanted, "was recreated")
    elif version not in ("", kept.metadata.resource_version):
        raise conflict(wanted)


def conflict(wanted: Object, problem: str = "was modified") -> Conflict:
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


def _rewritten(kept: Kind, found: Kind) -> Kind:
    """Written by hand over the old file: what a person does not write stays, above all finalizers."""
    metadata = replace(
        kept.metadata, labels=found.metadata.labels, annotations=found.metadata.annotations
    )
    return _revised(kept, replace(kept, metadata=metadata, spec=spec_of(found)))


def _checked(found: Kind) -> Kind:
    """As another store wrote it, or as a person has edited it since."""
    if is_untouched(found):
        return found
    metadata = found.metadata
    bumped = replace(
        metadata,
        generation=metadata.generation + 1,
        resource_version=_version(_number(metadata) + 1, found),
    )
    return _with(found, bumped)


def _revised(kept: Kind, wanted: Kind) -> Kind:
    if wanted == kept:
        return kept
    generation = kept.metadata.generation + (spec_of(wanted) != spec_of(kept))
    version = _version(_number(kept.metadata) + 1, wanted)
    return _with(wanted, replace(wanted.metadata, generation=generation, resource_version=version))


def _with(found: Kind, metadata: Metadata) -> Kind:
    return replace(found, metadata=metadata)


def _default_status(wanted: Object) -> object:
    (field,) = (field for field in msgspec.structs.fields(wanted) if field.name == "status")
    return field.default


def _new_uid(wanted: Object) -> str:
    # The UUID's version bits are in the random part, so the digest stays intact.
    return str(uuid.UUID(bytes=secrets.token_bytes(10) + _mark(wanted), version=4))


def _mark(found: Object) -> bytes:
    return hashlib.blake2b(f"{found.plural}/{found.key}".encode(), digest_size=6).digest()


def _version(number: int, found: Object) -> str:
    return f"{number}-{_digest(found)}"


def _digest(found: Object) -> str:
    text = msgspec.json.encode(spec_of(found), order="deterministic")
    return hashlib.blake2b(text, digest_size=4).hexdigest()


def _number(metadata: Metadata) -> int:
    number, _, _ = metadata.resource_version.partition("-")
    return int(number) if _NUMBER.fullmatch(number) else 0
