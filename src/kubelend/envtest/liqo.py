"""Installs Liqo in a test cluster as its chart does, and runs it: see `kubelend.envtest.kubelet`.

Networking is off, because it needs containers. Everything else is Liqo's own: definitions, roles, webhooks
and programs.
"""

from __future__ import annotations

import base64
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import yaml

from kubelend.envtest import assets as envtest_assets
from kubelend.envtest import waiting
from kubelend.envtest.assets import LiqoAssets
from kubelend.envtest.processes import SupervisedProcess
from kubelend.envtest.servers import LocalCluster
from kubelend.kits import files

NAMESPACE: Final = "liqo"
WEBHOOK: Final = "liqo-webhook"

_PLACEHOLDER_ID: Final = "placeholder-cluster-id"
_PLACEHOLDER_ADDRESS: Final = "https://placeholder-address"
_SKIPPED_KINDS: Final = {"Secret", "Service", "FirewallConfiguration", "Network"}
"""Of the network between clusters, and of webhooks that are reached through a Service."""
_DEPLOYMENTS: Final = ("liqo-controller-manager", "liqo-crd-replicator", WEBHOOK)
_READY_TIMEOUT: Final = 60.0

Document = dict[str, Any]


class KubeletProcess(SupervisedProcess):
    """The stand-in for the kubelets of one cluster."""

    def __init__(self, cluster: LocalCluster, assets: LiqoAssets) -> None:
        directory = cluster.directory / "pods"
        directory.mkdir(mode=0o700)
        super().__init__(f"kubelet of {cluster.name}", cluster.directory / "kubelet.log")
        self._arguments = [cluster.admin_kubeconfig, assets.directory, directory]

    def _command(self) -> list[str]:
        program = [sys.executable, "-P", "-m", "kubelend.envtest.kubelet"]
        return [*program, *map(str, self._arguments)]

    def _is_ready(self) -> bool:
        return True


def install_liqo(cluster: LocalCluster, assets: LiqoAssets) -> None:
    """Installs definitions and manifests. Liqo's cluster ID is the name of the cluster."""
    # Some are too large for the annotation of a client-side apply.
    cluster.kubectl("apply", "--server-side", f"--filename={assets.crds}")
    cluster.kubectl("wait", "--for=condition=Established", "--timeout=60s", "crd", "--all")
    path = cluster.directory / "liqo.yaml"
    path.write_text(yaml.safe_dump_all(_manifests(cluster, assets)), "utf-8")
    cluster.kubectl("apply", "--server-side", f"--namespace={NAMESPACE}", f"--filename={path}")


def wait_until_liqo_runs(cluster: LocalCluster, _: LiqoAssets | None = None) -> None:
    """Waits until all Deployments are available; the webhook answers soon after that."""
    timeout = f"--timeout={_READY_TIMEOUT * waiting.FACTOR:g}s"
    names = (f"deployment/{name}" for name in _DEPLOYMENTS)
    cluster.kubectl(
        "wait", f"--namespace={NAMESPACE}", "--for=condition=Available", timeout, *names
    )


def _manifests(cluster: LocalCluster, assets: LiqoAssets) -> Iterator[Document]:
    text = assets.manifests.read_text("utf-8")
    text = text.replace(_PLACEHOLDER_ID, cluster.name).replace(_PLACEHOLDER_ADDRESS, cluster.url)
    port = envtest_assets.free_port()
    certificate, trusted = cluster.webhook_certificate()
    for document in yaml.safe_load_all(text):
        if document is None or document["kind"] in _SKIPPED_KINDS:
            continue
        if document["kind"] == "Deployment":
            _set_listeners(document, port)
            if document["metadata"]["name"] == WEBHOOK:
                _set_certificate(document, _serving_directory(certificate))
        for webhook in document.get("webhooks", ()):
            _set_address(webhook, port, trusted)
        # Liqo would replace the CA in webhook configurations with this label by its own.
        document["metadata"].get("labels", {}).pop("liqo.io/webhook", None)
        yield document


def _container(deployment: Document) -> Document:
    found: Document = deployment["spec"]["template"]["spec"]["containers"][0]
    return found


def _set_listeners(deployment: Document, webhook_port: int) -> None:
    """Gives each program ports of its own, because all pods share one network."""
    name, container = deployment["metadata"]["name"], _container(deployment)
    port = webhook_port if name == WEBHOOK else envtest_assets.free_port()
    added = [f"--metrics-address=127.0.0.1:{envtest_assets.free_port()}"]
    if name != "liqo-crd-replicator":
        added += [
            f"--health-probe-address=127.0.0.1:{envtest_assets.free_port()}",
            f"--webhook-port={port}",
        ]
    container["args"] = [*_without(container["args"], "--webhook-port", "--secret-name"), *added]


def _set_certificate(deployment: Document, directory: Path) -> None:
    container = _container(deployment)
    container["env"].append({"name": "TMPDIR", "value": str(directory)})
    container["args"].append("--podcidr=10.200.0.0/16")


def _serving_directory(certificate: Path) -> Path:
    """Returns the directory in which the webhook server expects its certificate, below TMPDIR."""
    root = certificate.with_name("webhook-tmp")
    target = root / "k8s-webhook-server" / "serving-certs"
    target.mkdir(mode=0o700, parents=True)
    for name in (files.TLS_CERTIFICATE, files.TLS_KEY):
        shutil.copy(certificate / name, target / name)
    return root


def _set_address(webhook: Document, port: int, trusted: bytes) -> None:
    path = webhook["clientConfig"]["service"]["path"]
    webhook["clientConfig"] = {
        "url": f"https://127.0.0.1:{port}{path}",
        "caBundle": base64.b64encode(trusted).decode(),
    }


def _without(arguments: Iterable[str], *flags: str) -> list[str]:
    return [each for each in arguments if each.partition("=")[0] not in flags]
