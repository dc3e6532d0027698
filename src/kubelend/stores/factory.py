"""Opens a store by the URL in `--store`. The only place that knows all kinds of stores.

`audit_store` checks the invariants of the ledger in a store, and compares it with a replay of the audit log.
It opens the store read-only; a broker may use it at the same time.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias
from urllib.parse import parse_qsl, urlsplit

from kubelend.core import audit
from kubelend.core.audit import AuditLogReplay
from kubelend.core.audit_log import AuditLine
from kubelend.core.errors import InvalidSettings
from kubelend.core.ledger import Ledger
from kubelend.core.models import ReservationId
from kubelend.stores import batch, sqlite_file
from kubelend.stores.memory import MemoryStore
from kubelend.stores.sqlite import SqliteStore

if TYPE_CHECKING:
    from kubelend.kube.config import KubeConfig
    from kubelend.stores.kubernetes.store import KubernetesStore


AnyStore: TypeAlias = "MemoryStore | SqliteStore | KubernetesStore"


def check_store_url(url: str) -> None:
    """Reject an invalid URL without opening a store: a retry would not help."""
    kind, rest = _split_url(url)
    if kind == "sqlite":
        _sqlite_path(rest)
    elif kind == "kubernetes":  # a missing kubeconfig is a configuration error, not an outage
        parse_kubernetes_url(rest).access()


def open_store(
    url: str,
    *,
    archive_for: timedelta = batch.ARCHIVE_FOR,
    namespace: str = "",
    may_create: bool = True,
) -> AnyStore:
    """Open a broker's store: `memory:`, a path, `sqlite:///absolute/path`, or `kubernetes:`.

    `namespace` is for a Kubernetes store whose URL names none, `may_create` for a file that is missing.
    """
    kind, rest = _split_url(url)
    if kind == "memory":
        return MemoryStore(archive_for=archive_for)
    if kind == "sqlite":
        path = _sqlite_path(rest)
        return SqliteStore.open(path, archive_for=archive_for, may_create=may_create)
    # Imported late: a broker with a file store does not load a Kubernetes client.
    from kubelend.stores.kubernetes.store import KubernetesStore

    location = parse_kubernetes_url(rest)
    access = location.access()
    namespace = location.namespace_for(access, namespace)
    return KubernetesStore.open(access, namespace, archive_for=archive_for)


def open_readonly(url: str) -> AnyStore:
    """Open a store for reading; a broker may be using it."""
    kind, rest = _split_url(url)
    if kind == "memory":
        raise InvalidSettings("a memory store cannot be read by another process", hint="use a file")
    if kind == "sqlite":
        return SqliteStore.open_readonly(_sqlite_path(rest))
    from kubelend.stores.kubernetes.store import KubernetesStore

    location = parse_kubernetes_url(rest)
    access = location.access()
    return KubernetesStore.open_readonly(access, location.namespace_for(access))


def leave_to_go_broker(url: str, now: Callable[[], datetime]) -> int:
    """Leave the objects of a Kubernetes store to the published Go broker; returns how many are live."""
    kind, rest = _split_url(url)
    if kind != "kubernetes":
        raise InvalidSettings(f"{url} is no Kubernetes store", hint=f"use {KUBERNETES_URL_FORMAT}")
    from kubelend.stores.kubernetes.store import KubernetesStore

    location = parse_kubernetes_url(rest)
    access = location.access()
    return KubernetesStore.leave(access, location.namespace_for(access), now)


@contextmanager
def lead(url: str, now: Callable[[], datetime], timeout: timedelta) -> Iterator[None]:
    """Be the leader in the namespace of a store, so that no broker is; a file store has a lock instead."""
    kind, rest = _split_url(url)
    if kind != "kubernetes":
        yield
        return
    from kubelend.stores.kubernetes.store import KubernetesStore

    location = parse_kubernetes_url(rest)
    access = location.access()
    store = KubernetesStore(access, location.namespace_for(access), is_writable=True)
    with closing(store):
        store.hold_lease(now, timeout)
        yield


def store_mode_problems(url: str) -> list[str]:
    """What others can read or replace of an existing store, one sentence each."""
    kind, rest = _split_url(url)
    return sqlite_file.file_mode_problems(_sqlite_path(rest)) if kind == "sqlite" else []


def file_path(url: str) -> Path | None:
    """The path of the store's file; None for a store without one."""
    kind, rest = _split_url(url)
    return _sqlite_path(rest) if kind == "sqlite" else None


def path_beside(url: str, name: str) -> Path | None:
    """The path of a file beside the store's own; None for a store without a file."""
    path = file_path(url)
    return None if path is None else path.with_name(f"{path.name}-{name}")


def is_kubernetes_url(url: str) -> bool:
    """Whether users can delete single records: a missing reservation then counts as released."""
    return _split_url(url)[0] == "kubernetes"


_FORMS = {"memory": "memory:", "sqlite": "a path or sqlite:///path", "kubernetes": "kubernetes:"}
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+):(.*)", re.ASCII | re.DOTALL)


def _split_url(url: str) -> tuple[str, str]:
    """The kind of store, and what follows the colon."""
    match = _SCHEME.fullmatch(url)
    kind, rest = (match[1], match[2]) if match else ("sqlite", url)
    if kind not in _FORMS:
        known = ", ".join(_FORMS.values())
        raise InvalidSettings(f"unknown kind of store {kind}:", hint=f"use one of {known}")
    if kind == "memory" and rest:
        raise InvalidSettings(f"memory:{rest} is not valid", hint="write memory: alone")
    return kind, rest


def _sqlite_path(rest: str) -> Path:
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


KUBERNETES_URL_FORMAT = "kubernetes:///kubeconfig?context=...&namespace=..."
_NAMESPACE_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", re.ASCII)


class KubernetesStoreUrl(NamedTuple):
    """The parts of the URL; empty if not given."""

    kubeconfig: str = ""
    context: str = ""
    namespace: str = ""

    def access(self) -> KubeConfig:
        """`InvalidSettings` if the kubeconfig cannot be used."""
        from kubelend.kube import config

        return config.load_config(self.kubeconfig, self.context)

    def namespace_for(self, access: KubeConfig, default: str = "") -> str:
        """The namespace of the URL, else `default`, else that of the pod or the context."""
        return self.namespace or default or os.environ.get("POD_NAMESPACE", "") or access.namespace


def parse_kubernetes_url(rest: str) -> KubernetesStoreUrl:
    """Parses what follows `kubernetes:`; `InvalidSettings` if it is invalid."""
    url = urlsplit(rest)
    if url.netloc:
        raise _invalid_url(
            rest, "names a host", "write kubernetes:///absolute/path, with three slashes"
        )
    named = dict(parse_qsl(url.query, keep_blank_values=True))
    if unknown := sorted(named.keys() - {"context", "namespace"}):
        raise _invalid_url(
            rest, f"has an unknown parameter {unknown[0]!r}", "use context and namespace"
        )
    namespace = named.get("namespace", "")
    if "namespace" in named and not _NAMESPACE_NAME.fullmatch(namespace):
        raise _invalid_url(
            rest,
            f"has {namespace!r}, which is not a namespace name",
            f"write {KUBERNETES_URL_FORMAT}",
        )
    return KubernetesStoreUrl(url.path, named.get("context", ""), namespace)


def _invalid_url(rest: str, problem: str, hint: str) -> InvalidSettings:
    return InvalidSettings(f"kubernetes:{rest} {problem}", hint=hint)


LINES_PER_READ = 1024
"""Number of audit log lines read at a time, which bounds the memory for a long log."""


class StoreAudit(NamedTuple):
    """The ledger that was read, and the violations found."""

    ledger: Ledger
    violations: list[str]
    deleted: list[ReservationId]
    """Reservations whose objects were deleted in Kubernetes with their finalizer; they count as released."""


def audit_store(store: str) -> StoreAudit:
    """Reads the store and runs all checks."""
    opened = open_readonly(store)
    try:
        return audit_opened(opened, may_delete=is_kubernetes_url(store))
    finally:
        opened.close()


def audit_opened(opened: AnyStore, *, may_delete: bool) -> StoreAudit:
    """`may_delete`: whether reservations may have been deleted with their objects."""
    last_durable = opened.audit_log_bounds()[1].number
    ledger = Ledger.restore(opened.load())
    replay = AuditLogReplay(ledger, last_durable)
    start, end = opened.audit_log_bounds()
    for line in read_audit_log(opened, start.number, end.number):
        replay.feed(line)
    # Read again: the broker may have truncated the log meanwhile.
    found = replay.violations(opened.audit_log_bounds()[0].number, end.number)
    missing_by_id = replay.missing()
    missing = [] if may_delete else list(missing_by_id.values())
    return StoreAudit(
        ledger,
        [*audit.invariant_violations(ledger), *missing, *found],
        list(missing_by_id) if may_delete else [],
    )


def read_audit_log(opened: AnyStore, after: int, last: int) -> Iterator[AuditLine]:
    """The lines after a number, up to the last."""
    while after < last and (lines := opened.audit_lines(after, min(LINES_PER_READ, last - after))):
        yield from lines
        after = lines[-1].number
