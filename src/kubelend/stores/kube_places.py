"""Parses the URL of a Kubernetes store: kubeconfig, context and namespace.

kubernetes:                                         the pod's own cluster, or that of $KUBECONFIG
kubernetes:///etc/kubelend/kubeconfig?context=hub   a kubeconfig and one of its contexts
kubernetes:?namespace=brokers                       another namespace than the default
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from kubelend.core.errors import InvalidSettings

if TYPE_CHECKING:
    from kubelend.kube.access import Access

FORM = "kubernetes:///kubeconfig?context=...&namespace=..."
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", re.ASCII)


class Place(NamedTuple):
    """The parts of the URL; empty if not given."""

    kubeconfig: str = ""
    context: str = ""
    namespace: str = ""

    def access(self) -> Access:
        """`InvalidSettings` if the kubeconfig cannot be used."""
        # Imported late: a broker with a file store does not load a Kubernetes client.
        from kubelend.kube import access

        return access.find(self.kubeconfig, self.context)

    def namespace_for(self, access: Access, usual: str = "") -> str:
        """The namespace of the URL, else `default`, else that of the pod or the context."""
        return self.namespace or usual or os.environ.get("POD_NAMESPACE", "") or access.namespace


def parse(rest: str) -> Place:
    """Parses what follows `kubernetes:`; `InvalidSettings` if it is invalid."""
    url = urlsplit(rest)
    if url.netloc:
        raise _refused(
            rest, "names a host", "write kubernetes:///absolute/path, with three slashes"
        )
    named = dict(parse_qsl(url.query, keep_blank_values=True))
    if unknown := sorted(named.keys() - {"context", "namespace"}):
        raise _refused(
            rest, f"has an unknown parameter {unknown[0]!r}", "use context and namespace"
        )
    namespace = named.get("namespace", "")
    if "namespace" in named and not _NAMESPACE.fullmatch(namespace):
        raise _refused(rest, f"has {namespace!r}, which is not a namespace name", f"write {FORM}")
    return Place(url.path, named.get("context", ""), namespace)


def _refused(rest: str, what: str, hint: str) -> InvalidSettings:
    return InvalidSettings(f"kubernetes:{rest} {what}", hint=hint)
