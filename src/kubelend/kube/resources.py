"""Kinds of objects: where an API server has them, and the type that they are decoded into.

A type may name only the fields that matter to its reader: others are passed over while decoding, so that a
pod costs what is kept of it and not what the server says about it.
"""

from __future__ import annotations

import builtins
from typing import Generic, Protocol, TypeVar
from urllib.parse import quote

import msgspec

from kubelend.core.errors import InvalidInput
from kubelend.wire import objects


class Metadata(Protocol):
    """What every object can be found by. One of the whole cluster has no namespace that counts."""

    @property
    def name(self) -> str: ...

    @property
    def namespace(self) -> str: ...


class Object(Protocol):
    """What every object has."""

    @property
    def metadata(self) -> Metadata: ...


Kind = TypeVar("Kind", bound=Object)
Own = TypeVar("Own", bound=objects.Object)


class Resource(msgspec.Struct, Generic[Kind], frozen=True):
    """One kind of object."""

    group: str
    """Empty for the oldest kinds: pods, nodes, namespaces."""
    version: str
    plural: str
    kind: str
    type: builtins.type[Kind]
    namespaced: bool = True
    page: int = 0
    """How many a list reads at once, if that is to be less than usual: large ones take memory meanwhile."""

    @property
    def api_version(self) -> str:
        """As objects write it: `group/version`, or the version alone."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """Of one object, or of all without a name; without a namespace of all of them."""
        if self.namespaced and name and not namespace:
            raise InvalidInput(f"{self.plural} {name!r}: of which namespace?")
        parts = ["apis" if self.group else "api", self.api_version]
        if self.namespaced and namespace:
            parts += ["namespaces", quote(namespace, safe="")]
        parts.append(self.plural)
        if name:
            parts += [quote(name, safe=":")]
        if subresource:
            parts.append(subresource)
        return "/" + "/".join(parts)

    def path_of(self, found: Kind, subresource: str = "") -> str:
        return self.path(found.metadata.namespace, found.metadata.name, subresource)

    def __str__(self) -> str:
        return f"{self.plural}.{self.group}" if self.group else self.plural


def of(kind: type[Own], *, namespaced: bool = True) -> Resource[Own]:
    """One of our own kinds, which know where they are kept."""
    return Resource(kind.group, kind.version, kind.plural, kind.kind, kind, namespaced)
