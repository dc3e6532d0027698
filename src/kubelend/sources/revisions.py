"""What becomes of an object when it is made, changed, deleted or found edited: the rules of Kubernetes.

Pure, and the same wherever objects are kept: `memory.MemoryObjects` and `folders.Folder` write what these
functions return, and nothing if that is what they have. `kube_objects` takes from here what Kubernetes leaves
to its callers: which object was meant, and what a change leaves alone.

Two marks let a file tell by itself what happened to it while nobody looked. A `uid` ends in a digest of the
object's name, so a copy under another name is seen to be another object. A `resourceVersion` ends in a digest
of the spec, so a spec that was edited by hand is seen to be another one.
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
    """As it is to be kept. The very `kept` if that is equal."""
    check(kept, wanted)
    return created(wanted, now) if kept is None else _revised(kept, edited(kept, wanted))


def edited(kept: Kind, wanted: Kind) -> Kind:
    """The kept one with all that may be changed about it as wanted; its marks are left as they were."""
    finalizers = wanted.metadata.finalizers
    if kept.metadata.deletion_timestamp is not None:  # nothing new may keep it from going
        finalizers = tuple(name for name in finalizers if name in kept.metadata.finalizers)
    metadata = replace(
        kept.metadata,
        labels=wanted.metadata.labels,
        annotations=wanted.metadata.annotations,
        finalizers=finalizers,
    )
    return replace(kept, metadata=metadata, spec=spec_of(wanted))


def set_status(kept: Kind | None, wanted: Kind) -> Kind | None:
    """As it is to be kept; None if it is gone, or is another. The very `kept` if that is equal."""
    if kept is None or wanted.metadata.uid not in ("", kept.metadata.uid):
        return None
    check(kept, wanted)
    return _revised(kept, replace(kept, status=status_of(wanted)))


def delete(kept: Kind, now: datetime) -> Kind:
    """As it is to be kept until its finalizers are gone. The very `kept` if it goes already."""
    if kept.metadata.deletion_timestamp is not None:
        return kept
    return _revised(kept, _with(kept, replace(kept.metadata, deletion_timestamp=now)))


def is_over(found: Object) -> bool:
    """Whether somebody wants it gone and nothing keeps it."""
    return found.metadata.deletion_timestamp is not None and not found.metadata.finalizers


def created(wanted: Kind, now: datetime) -> Kind:
    """A new object, with the marks of one."""
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
    """As one asks for a new object: whatever else its metadata and its status said is not true of it."""
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
    """What a file's text means, of an object that was `kept`. The very `found` if it is complete."""
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
    """Whether a store has made it, under this name; else somebody has written it by hand."""
    return found.metadata.uid.replace("-", "").endswith(_mark(found).hex())


def is_untouched(found: Object) -> bool:
    """Whether its spec is what a store has written."""
    _, _, digest = found.metadata.resource_version.partition("-")
    return is_ours(found) and digest == _digest(found)


def check(kept: Object | None, wanted: Object) -> None:
    """`Conflict` if `wanted` was made of another object, or of an older version, than the kept one."""
    uid, version = wanted.metadata.uid, wanted.metadata.resource_version
    if kept is None:
        if uid:
            raise conflict(wanted, "is gone")
    elif uid not in ("", kept.metadata.uid):
        raise conflict(wanted, "is another one now")
    elif version not in ("", kept.metadata.resource_version):
        raise conflict(wanted)


def conflict(wanted: Object, problem: str = "has been changed by somebody else") -> Conflict:
    return Conflict(f"{wanted.kind} {wanted.key} {problem}", hint="read it anew")


def spec_of(found: Object) -> msgspec.Struct:
    return _parts(found).spec


def status_of(found: Object) -> msgspec.Struct:
    return _parts(found).status


class _Parts(Protocol):
    """What every kind has, with a type of its own."""

    spec: msgspec.Struct
    status: msgspec.Struct


def _parts(found: Object) -> _Parts:
    return cast(_Parts, found)


def _rewritten(kept: Kind, found: Kind) -> Kind:
    """By hand, over the old one: what a person does not write stays, finalizers above all."""
    metadata = replace(
        kept.metadata, labels=found.metadata.labels, annotations=found.metadata.annotations
    )
    return _revised(kept, replace(kept, metadata=metadata, spec=spec_of(found)))


def _checked(found: Kind) -> Kind:
    """As another store has written it, or a person has edited it since."""
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
    # The version's bits lie in the random part, so that the mark stays whole.
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
