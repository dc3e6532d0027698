"""Codec for API server responses: objects, lists and watch events with types, and errors from Status.

Objects are decoded directly into the type of their resource, with one decoder per resource. An object that
does not fit its type is returned as `UndecodableObject`, so that one invalid object does not block all
others.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, Final, Generic, Literal, NamedTuple

import msgspec

from kubelend.core import errors
from kubelend.kube.resources import Kind, Resource

EventType = Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]


class UndecodableObject(NamedTuple):
    """An object that does not fit its type, identified by its metadata."""

    namespace: str
    name: str
    uid: str
    error: str
    is_deleted: bool = False


class Listing(NamedTuple, Generic[Kind]):
    """Objects at one resource version, and those that cannot be decoded: all, or one page of them."""

    objects: list[Kind]
    undecodable: list[UndecodableObject]
    resource_version: str
    continue_token: str = ""
    """Of the next page; empty on the last one."""


class WatchEvent(NamedTuple, Generic[Kind]):
    """One watch event. A bookmark has no object; it only advances the resource version."""

    type: EventType
    found: Kind | None
    resource_version: str
    undecodable: UndecodableObject | None = None


class Decoder(Generic[Kind]):
    """Decodes the responses for one resource."""

    def __init__(self, resource: Resource[Kind]) -> None:
        self._resource = resource
        self._one: msgspec.json.Decoder[Kind] = msgspec.json.Decoder(resource.type)
        self._page = msgspec.json.Decoder(_Page[resource.type])  # type: ignore[name-defined]  # made at run time

    def decode_object(self, content: bytes) -> Kind:
        try:
            return self._one.decode(content)
        except msgspec.MsgspecError as error:
            raise errors.UnexpectedResponse(f"{self._resource}: {error}") from error

    def decode_page(self, content: bytes) -> Listing[Kind]:
        try:
            found = self._page.decode(content)
        except msgspec.ValidationError:
            return self._decode_page_by_item(content)
        except msgspec.MsgspecError as error:
            raise errors.UnexpectedResponse(f"{self._resource}: {error}") from error
        meta = found.metadata
        return Listing(found.items or [], [], meta.resource_version, meta.continue_)

    def decode_event(self, line: bytes) -> WatchEvent[Kind]:
        """Decode a watch event. An ERROR event, such as `Gone`, is raised."""
        try:
            event = _EVENT_DECODER.decode(line)
            if event.type == "ERROR":
                raise error_from_status(_STATUS_DECODER.decode(event.object))
            meta = _METADATA_DECODER.decode(event.object).metadata
        except msgspec.MsgspecError as error:
            raise errors.UnexpectedResponse(f"a watch of {self._resource}: {error}") from error
        if event.type == "BOOKMARK":
            return WatchEvent("BOOKMARK", None, meta.resource_version)
        found = self._decode_item(event.object, is_deleted=event.type == "DELETED")
        if isinstance(found, UndecodableObject):
            return WatchEvent(event.type, None, meta.resource_version, found)
        return WatchEvent(event.type, found, meta.resource_version)

    def _decode_page_by_item(self, content: bytes) -> Listing[Kind]:
        try:
            found = _RAW_PAGE_DECODER.decode(content)
        except msgspec.MsgspecError as error:
            raise errors.UnexpectedResponse(f"{self._resource}: {error}") from error
        read = [self._decode_item(item) for item in found.items or []]
        objects = [one for one in read if not isinstance(one, UndecodableObject)]
        undecodable = [one for one in read if isinstance(one, UndecodableObject)]
        meta = found.metadata
        return Listing(objects, undecodable, meta.resource_version, meta.continue_)

    def _decode_item(
        self, item: msgspec.Raw, *, is_deleted: bool = False
    ) -> Kind | UndecodableObject:
        try:
            return self._one.decode(item)
        except msgspec.ValidationError as error:
            meta = _METADATA_DECODER.decode(item).metadata
            return UndecodableObject(meta.namespace, meta.name, meta.uid, str(error), is_deleted)


def decoder_for(resource: Resource[Kind]) -> Decoder[Kind]:
    """Return the cached decoder of a resource; creating one costs more than decoding a thousand objects."""
    return _DECODERS.get(resource) or _DECODERS.setdefault(resource, Decoder(resource))


def encode_object(resource: Resource[Kind], found: Kind, *, is_new: bool = False) -> bytes:
    """Encode an object with apiVersion and kind.

    For a new object resourceVersion and UID are dropped, as it may be a copy of an existing one.
    """
    head = {"apiVersion": resource.api_version, "kind": resource.kind}
    body: dict[str, object] = head | msgspec.to_builtins(found)
    if is_new:
        known: dict[str, object] = msgspec.to_builtins(found.metadata)
        body["metadata"] = {name: known[name] for name in known.keys() - _SERVER_SET_FIELDS}
    return msgspec.json.encode(body)


def error_from_response(
    status: int, content: bytes, retry_after: str | None
) -> errors.KubelendError:
    """Return the error of a response, also if it comes from a proxy instead of an API server."""
    try:
        found = _STATUS_DECODER.decode(content)
    except msgspec.MsgspecError:
        text = " ".join(content[:200].decode("utf-8", "replace").split())
        found = Status(message=text)
    error = error_from_status(msgspec.structs.replace(found, code=status))
    if isinstance(error, errors.Unavailable | errors.LimitExceeded):
        # HTTP also allows a date here, but API servers only send seconds.
        is_number = retry_after and retry_after.isascii() and retry_after.isdigit()
        seconds = float(retry_after or 0) if is_number else 0.0
        seconds = seconds or float(found.details.retry_after_seconds)
        error.retry_after = seconds or error.retry_after
    return error


def is_object_not_found(error: errors.KubelendError) -> bool:
    """Whether the object was not found, as opposed to its kind not being defined."""
    return isinstance(error, errors.NotFound) and not error.hint


class _Meta(msgspec.Struct, rename="camel"):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class _MetadataOnly(msgspec.Struct):
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
    """Status object of a failed request."""

    code: int = 0
    reason: str = ""
    message: str = ""
    details: _Details = _Details()


_SERVER_SET_FIELDS: Final = frozenset({"resourceVersion", "uid"})
_DECODERS: Final[dict[Resource[Any], Decoder[Any]]] = {}

_EVENT_DECODER: Final = msgspec.json.Decoder(_Event)
_METADATA_DECODER: Final = msgspec.json.Decoder(_MetadataOnly)
_RAW_PAGE_DECODER: Final = msgspec.json.Decoder(_RawPage)
_STATUS_DECODER: Final = msgspec.json.Decoder(Status)

_ERRORS_BY_STATUS: Final[dict[int, type[errors.KubelendError]]] = {
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


def error_from_status(status: Status) -> errors.KubelendError:
    """Map a Status to an error class by its code; the message is the same."""
    message = status.message or status.reason or f"API server responded with {status.code}"
    if status.code == HTTPStatus.NOT_FOUND and not status.details.name:
        return errors.NotFound(
            message, hint="apply the CRDs, if this kind is not defined in the cluster"
        )
    if status.code == HTTPStatus.UNAUTHORIZED:
        hint = "check the token or certificate of the kubeconfig's user"
        return errors.Unauthenticated(f"API server rejected the credentials: {message}", hint=hint)
    if status.reason == "AlreadyExists":
        return errors.AlreadyExists(message)
    if status.code >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return errors.Unavailable(f"API server responded with {status.code}: {message}")
    return _ERRORS_BY_STATUS.get(status.code, errors.UnexpectedResponse)(message)
