"""What an API server says: bytes in, records or errors out. `kube.client` reads its answers with it.

Objects are decoded straight into the type of their resource, with one decoder for each. One that does not
fit its type does not spoil the others of its list: it is handed on as `Unreadable`, for somebody else's
mistake in one object must not stop the work on all.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, Final, Generic, Literal, NamedTuple

import msgspec

from kubelend.core import errors
from kubelend.kube.resources import Kind, Resource

EventType = Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]


class Unreadable(NamedTuple):
    """An object that does not fit its type, by what every object has."""

    namespace: str
    name: str
    uid: str
    problem: str
    is_deleted: bool = False


class Page(NamedTuple, Generic[Kind]):
    """A part of a list; `next` asks for the one after it, and is empty in the last."""

    objects: list[Kind]
    unreadable: list[Unreadable]
    resource_version: str
    next: str


class Seen(NamedTuple, Generic[Kind]):
    """One event of a watch. With a bookmark nothing was found, but all up to its version has been seen."""

    type: EventType
    found: Kind | None
    resource_version: str
    unreadable: Unreadable | None = None


class Decoder(Generic[Kind]):
    """Reads the answers about one resource."""

    def __init__(self, resource: Resource[Kind]) -> None:
        self._resource = resource
        self._one: msgspec.json.Decoder[Kind] = msgspec.json.Decoder(resource.type)
        self._page = msgspec.json.Decoder(_Page[resource.type])  # type: ignore[name-defined]  # made at run time

    def one(self, content: bytes) -> Kind:
        try:
            return self._one.decode(content)
        except msgspec.MsgspecError as problem:
            raise errors.UnexpectedAnswer(f"{self._resource}: {problem}") from problem

    def page(self, content: bytes) -> Page[Kind]:
        try:
            found = self._page.decode(content)
        except msgspec.ValidationError:
            return self._page_by_parts(content)
        except msgspec.MsgspecError as problem:
            raise errors.UnexpectedAnswer(f"{self._resource}: {problem}") from problem
        meta = found.metadata
        return Page(found.items or [], [], meta.resource_version, meta.continue_)

    def event(self, line: bytes) -> Seen[Kind]:
        """`Gone`, and whatever else ends a watch with an event of its own, is raised."""
        try:
            event = _EVENTS.decode(line)
            if event.type == "ERROR":
                raise error_of(_STATUSES.decode(event.object))
            meta = _HEADS.decode(event.object).metadata
        except msgspec.MsgspecError as problem:
            raise errors.UnexpectedAnswer(f"a watch of {self._resource}: {problem}") from problem
        if event.type == "BOOKMARK":
            return Seen("BOOKMARK", None, meta.resource_version)
        found = self._read(event.object, is_deleted=event.type == "DELETED")
        if isinstance(found, Unreadable):
            return Seen(event.type, None, meta.resource_version, found)
        return Seen(event.type, found, meta.resource_version)

    def _page_by_parts(self, content: bytes) -> Page[Kind]:
        try:
            found = _PAGES.decode(content)
        except msgspec.MsgspecError as problem:
            raise errors.UnexpectedAnswer(f"{self._resource}: {problem}") from problem
        read = [self._read(item) for item in found.items or []]
        return Page(
            [one for one in read if not isinstance(one, Unreadable)],
            [one for one in read if isinstance(one, Unreadable)],
            found.metadata.resource_version,
            found.metadata.continue_,
        )

    def _read(self, item: msgspec.Raw, *, is_deleted: bool = False) -> Kind | Unreadable:
        try:
            return self._one.decode(item)
        except msgspec.ValidationError as problem:
            meta = _HEADS.decode(item).metadata
            return Unreadable(meta.namespace, meta.name, meta.uid, str(problem), is_deleted)


def decoder(resource: Resource[Kind]) -> Decoder[Kind]:
    """The one of this resource: to make it costs more than to decode a thousand objects."""
    found = _DECODERS.get(resource)
    if found is None:
        found = _DECODERS[resource] = Decoder(resource)
    return found


def encode(resource: Resource[Kind], found: Kind, *, is_new: bool = False) -> bytes:
    """The object as it is sent, with what every object must say of itself.

    A new one may be made of one that was there before: it has no version and no UID yet.
    """
    head = {"apiVersion": resource.api_version, "kind": resource.kind}
    body: dict[str, object] = head | msgspec.to_builtins(found)
    if is_new:
        known: dict[str, object] = msgspec.to_builtins(found.metadata)
        body["metadata"] = {name: known[name] for name in known.keys() - _SERVERS_OWN}
    return msgspec.json.encode(body)


def failure(status: int, content: bytes, retry_after: str | None) -> errors.KubelendError:
    """The error that an answer stands for, also if it is not of an API server but of a proxy before it."""
    try:
        said = _STATUSES.decode(content)
    except msgspec.MsgspecError:
        text = " ".join(content[:200].decode("utf-8", "replace").split())
        said = Status(message=text)
    error = error_of(msgspec.structs.replace(said, code=status))
    if isinstance(error, errors.Unavailable | errors.LimitExceeded):
        told = _seconds(retry_after) or float(said.details.retry_after_seconds)
        error.retry_after = told or error.retry_after
    return error


def is_missing_object(error: errors.KubelendError) -> bool:
    """Whether it was the object that was not found, and not its whole kind, which has no definition here."""
    return isinstance(error, errors.NotFound) and not error.hint


class _Meta(msgspec.Struct, rename="camel"):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class _Head(msgspec.Struct):
    metadata: _Meta


class _Page(msgspec.Struct, Generic[Kind]):
    metadata: _Meta
    items: list[Kind] | None = None


class _RawPage(msgspec.Struct):
    metadata: _Meta
    items: list[msgspec.Raw] | None = None


class _Event(msgspec.Struct):
    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"]
    object: msgspec.Raw


class _Details(msgspec.Struct, frozen=True, rename="camel"):
    name: str = ""
    retry_after_seconds: int = 0


class Status(msgspec.Struct, rename="camel"):
    """Kubernetes' record of what went wrong."""

    code: int = 0
    reason: str = ""
    message: str = ""
    details: _Details = _Details()


_SERVERS_OWN: Final = frozenset({"resourceVersion", "uid"})
_DECODERS: Final[dict[Resource[Any], Decoder[Any]]] = {}

_EVENTS: Final = msgspec.json.Decoder(_Event)
_HEADS: Final = msgspec.json.Decoder(_Head)
_PAGES: Final = msgspec.json.Decoder(_RawPage)
_STATUSES: Final = msgspec.json.Decoder(Status)

_CLASSES: Final[dict[int, type[errors.KubelendError]]] = {
    HTTPStatus.BAD_REQUEST: errors.InvalidInput,
    HTTPStatus.UNPROCESSABLE_ENTITY: errors.InvalidInput,
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: errors.InvalidInput,
    HTTPStatus.UNAUTHORIZED: errors.Unauthenticated,
    HTTPStatus.FORBIDDEN: errors.Forbidden,
    HTTPStatus.NOT_FOUND: errors.NotFound,
    HTTPStatus.METHOD_NOT_ALLOWED: errors.MethodNotAllowed,
    HTTPStatus.CONFLICT: errors.Conflict,
    HTTPStatus.GONE: errors.Gone,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: errors.BodyTooLarge,
    HTTPStatus.TOO_MANY_REQUESTS: errors.RateLimited,
}


def error_of(said: Status) -> errors.KubelendError:
    """By the status; the server's own words are the message."""
    message = said.message or said.reason or f"the API server answered {said.code}"
    if said.code == HTTPStatus.NOT_FOUND and not said.details.name:
        return errors.NotFound(message, hint="is this kind defined there? apply the CRDs")
    if said.code == HTTPStatus.UNAUTHORIZED:
        hint = "check the token or certificate of the kubeconfig's user"
        return errors.Unauthenticated(f"the API server answered: {message}", hint=hint)
    if said.reason == "AlreadyExists":
        return errors.AlreadyExists(message)
    if said.code >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return errors.Unavailable(f"the API server answered {said.code}: {message}")
    return _CLASSES.get(said.code, errors.UnexpectedAnswer)(message)


def _seconds(header: str | None) -> float:
    # It may be a date as well; an API server's never is.
    return float(header) if header and header.isascii() and header.isdigit() else 0.0
