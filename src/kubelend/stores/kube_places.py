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
    from kubelend.kube.access import KubeConfig

KUBERNETES_URL_FORMAT = "kubernetes:///kubeconfig?context=...&namespace=..."
_NAMESPACE_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", re.ASCII)


class KubernetesStoreUrl(NamedTuple):
    """The parts of the URL; empty if not given."""

    kubeconfig: str = ""
    context: str = ""
    namespace: str = ""

    def access(self) -> KubeConfig:
        """`InvalidSettings` if the kubeconfig cannot be used."""
        # Imported late: a broker with a file store does not load a Kubernetes client.
        from kubelend.kube import access

        return access.load_config(self.kubeconfig, self.context)

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
