"""Resources: group, version and names of a kind with the type that objects are decoded into; merge patches.

A type may define only the fields that its users need: others are skipped while decoding, to save memory.
"""

from __future__ import annotations

import builtins
from typing import Any, Generic, Protocol, TypeVar
from urllib.parse import quote

import msgspec

from kubelend.core.errors import InvalidInput
from kubelend.wire import objects


class Metadata(Protocol):
    """Metadata that identifies an object. The namespace of cluster-scoped objects is ignored."""

    @property
    def name(self) -> str: ...

    @property
    def namespace(self) -> str: ...


class Object(Protocol):
    """Any Kubernetes object."""

    @property
    def metadata(self) -> Metadata: ...


Kind = TypeVar("Kind", bound=Object)
OwnKind = TypeVar("OwnKind", bound=objects.Object)


class Resource(msgspec.Struct, Generic[Kind], frozen=True):
    """A resource of the API server and its type."""

    group: str
    """API group; empty for the core group."""
    version: str
    plural: str
    kind: str
    type: builtins.type[Kind]
    namespaced: bool = True
    page_size: int = 0
    """Page size of lists if smaller than the default, for kinds with large objects."""

    @property
    def api_version(self) -> str:
        """`group/version`, or the version alone for the core group."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """URL path of an object; without a name of the collection, without a namespace of all."""
        if self.namespaced and name and not namespace:
            raise InvalidInput(f"{self.plural} {name!r}: namespace is required")
        parts = ["apis" if self.group else "api", self.api_version]
        if self.namespaced and namespace:
            parts += ["namespaces", quote(namespace, safe="")]
        parts.append(self.plural)
        if name:
            parts += [quote(name, safe=":")]
        if subresource:
            parts.append(subresource)
        return "/" + "/".join(parts)

    def __str__(self) -> str:
        return f"{self.plural}.{self.group}" if self.group else self.plural


def resource_for(kind: type[OwnKind], *, namespaced: bool = True) -> Resource[OwnKind]:
    """Return the resource of one of our own kinds."""
    return Resource(kind.group, kind.version, kind.plural, kind.kind, kind, namespaced)


Json = dict[str, Any]


def merge_patch(before: Json, after: Json) -> Json:
    """Return the merge patch from `before` to `after`; empty if equal. Lists are replaced as a whole."""
    change: Json = dict.fromkeys(name for name in before if name not in after)
    for name, value in after.items():
        known = before.get(name)
        if isinstance(value, dict) and isinstance(known, dict):
            if inner := merge_patch(known, value):
                change[name] = inner
        elif name not in before or known != value:
            change[name] = value
    return change
