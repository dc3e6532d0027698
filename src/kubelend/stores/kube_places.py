"""What stands behind `kubernetes:`, taken apart: which API server, as whom, and in which namespace.

kubernetes:                                         the pod's own cluster, or that of $KUBECONFIG
kubernetes:///etc/kubelend/kubeconfig?context=hub   a kubeconfig and one of its contexts
kubernetes:?namespace=brokers                       another namespace than the usual one
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
    """As the text has it; empty is what is left out."""

    kubeconfig: str = ""
    context: str = ""
    namespace: str = ""

    def access(self) -> Access:
        """`InvalidSettings` if the kubeconfig cannot be used."""
        # Late: who keeps a store in a file does not load a client for Kubernetes.
        from kubelend.kube import access

        return access.find(self.kubeconfig, self.context)

    def namespace_for(self, access: Access, usual: str = "") -> str:
        """What the text says, else what is usual here, else where the pod or the context is."""
        return self.namespace or usual or os.environ.get("POD_NAMESPACE", "") or access.namespace


def parse(rest: str) -> Place:
    """What follows `kubernetes:`; `InvalidSettings` says what is wrong with it."""
    url = urlsplit(rest)
    if url.netloc:
        raise _refused(
            rest, "names a host", "write kubernetes:///absolute/path, with three slashes"
        )
    named = dict(parse_qsl(url.query, keep_blank_values=True))
    if unknown := sorted(named.keys() - {"context", "namespace"}):
        raise _refused(rest, f"has a {unknown[0]!r}", "known are context and namespace")
    namespace = named.get("namespace", "")
    if "namespace" in named and not _NAMESPACE.fullmatch(namespace):
        raise _refused(rest, f"has {namespace!r}, which is no namespace", f"write {FORM}")
    return Place(url.path, named.get("context", ""), namespace)


def _refused(rest: str, what: str, hint: str) -> InvalidSettings:
    return InvalidSettings(f"kubernetes:{rest} {what}", hint=hint)
