"""Opens a store by the URL in `--store`. The only place that knows all kinds of stores."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from kubelend.core.errors import InvalidSettings
from kubelend.stores import batches, databases, kube_places
from kubelend.stores.memory import MemoryStore
from kubelend.stores.sqlite import SqliteStore

if TYPE_CHECKING:
    from kubelend.stores.kubernetes import KubernetesStore

AnyStore: TypeAlias = "MemoryStore | SqliteStore | KubernetesStore"


def check(url: str) -> None:
    """Reject an invalid URL without opening a store: a retry would not help."""
    kind, rest = _split(url)
    kind.check(rest)


def open_store(
    url: str, *, archive_for: timedelta = batches.ARCHIVE_FOR, namespace: str = ""
) -> AnyStore:
    """Open a broker's store: `memory:`, a path, `sqlite:///absolute/path`, or `kubernetes:`.

    `namespace` is for a Kubernetes store whose URL names none.
    """
    kind, rest = _split(url)
    return kind.open(rest, Terms(archive_for, namespace))


def open_readonly(url: str) -> AnyStore:
    """Open a store for reading; a broker may be using it."""
    kind, rest = _split(url)
    return kind.open_readonly(rest)


def exposures(url: str) -> list[str]:
    """What others can read or replace of an existing store, one sentence each."""
    kind, rest = _split(url)
    return kind.exposures(rest)


def beside(url: str, name: str) -> Path | None:
    """The path of a file beside the store's own; None for a store without a file."""
    kind, rest = _split(url)
    path = kind.path(rest)
    return None if path is None else path.with_name(f"{path.name}-{name}")


def is_of_objects(url: str) -> bool:
    """Whether users can delete single records: a missing reservation then counts as released."""
    kind, _ = _split(url)
    return kind is _KINDS["kubernetes"]


class Terms(NamedTuple):
    """Options for all kinds of stores."""

    archive_for: timedelta
    namespace: str


class _Kind(NamedTuple):
    form: str
    check: Callable[[str], None]
    open: Callable[[str, Terms], AnyStore]
    open_readonly: Callable[[str], AnyStore]
    exposures: Callable[[str], list[str]]
    path: Callable[[str], Path | None]


def _check_memory(rest: str) -> None:
    if rest:
        raise InvalidSettings(f"memory:{rest} is not valid", hint="write memory: alone")


def _open_memory(rest: str, terms: Terms) -> MemoryStore:
    _check_memory(rest)
    return MemoryStore(archive_for=terms.archive_for)


def _read_memory(_: str) -> MemoryStore:
    raise InvalidSettings("a memory store cannot be read by another process", hint="use a file")


def _path(rest: str) -> Path:
    """The path after `sqlite:`, also as a URL with an empty host and an absolute path."""
    if rest.startswith("//"):
        host, slash, path = rest[2:].partition("/")
        if host or not path:
            raise InvalidSettings(
                f"sqlite:{rest} names no file",
                hint="write sqlite:///absolute/path, with three slashes",
            )
        return Path(slash + path.lstrip("/"))
    if not rest:
        raise InvalidSettings("the store's path is empty", hint="name a file")
    return Path(rest)


def _check_sqlite(rest: str) -> None:
    _path(rest)


def _open_sqlite(rest: str, terms: Terms) -> SqliteStore:
    return SqliteStore.open(_path(rest), archive_for=terms.archive_for)


def _read_sqlite(rest: str) -> SqliteStore:
    return SqliteStore.open_readonly(_path(rest))


def _check_kubernetes(rest: str) -> None:
    """Also reads the kubeconfig: a missing file is a configuration error, not an outage."""
    kube_places.parse(rest).access()


def _open_kubernetes(rest: str, terms: Terms) -> KubernetesStore:
    from kubelend.stores.kubernetes import KubernetesStore

    location = kube_places.parse(rest)
    access = location.access()
    namespace = location.namespace_for(access, terms.namespace)
    return KubernetesStore.open(access, namespace, archive_for=terms.archive_for)


def _read_kubernetes(rest: str) -> KubernetesStore:
    from kubelend.stores.kubernetes import KubernetesStore

    location = kube_places.parse(rest)
    access = location.access()
    return KubernetesStore.open_readonly(access, location.namespace_for(access))


_KINDS = {
    "memory": _Kind(
        "memory:", _check_memory, _open_memory, _read_memory, lambda _: [], lambda _: None
    ),
    "sqlite": _Kind(
        "a path or sqlite:///path",
        _check_sqlite,
        _open_sqlite,
        _read_sqlite,
        lambda rest: databases.exposures(_path(rest)),
        _path,
    ),
    "kubernetes": _Kind(
        "kubernetes:",
        _check_kubernetes,
        _open_kubernetes,
        _read_kubernetes,
        lambda _: [],
        lambda _: None,
    ),
}

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+):(.*)", re.ASCII | re.DOTALL)


def _split(url: str) -> tuple[_Kind, str]:
    match = _SCHEME.fullmatch(url)
    scheme, rest = (match[1], match[2]) if match else ("sqlite", url)
    kind = _KINDS.get(scheme)
    if kind is None:
        known = ", ".join(kind.form for kind in _KINDS.values())
        raise InvalidSettings(f"unknown kind of store {scheme}:", hint=f"use one of {known}")
    return kind, rest
