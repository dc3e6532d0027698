"""Test clusters: API servers that share one etcd, each with its own prefix in it, its own CA and RBAC.

With the programs of `make liqo-assets` a cluster also has a controller manager, a scheduler, and Liqo as its
chart installs it: definitions, roles, webhooks and programs. Networking is off, because it needs containers.
"""

from __future__ import annotations

import base64
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import msgspec
import yaml
from cryptography.hazmat.primitives.serialization import Encoding

from kubelend.core.errors import InvalidSettings, UnexpectedResponse
from kubelend.envtest import assets as envtest_assets
from kubelend.envtest import credentials, processes, waiting
from kubelend.envtest.assets import Assets, KubernetesVersion, LiqoAssets
from kubelend.envtest.credentials import TemporaryAuthority
from kubelend.envtest.processes import HttpResponse, SupervisedProcess
from kubelend.kits import files, tasks
from kubelend.pki import files as pki_files
from kubelend.transports import tls
from kubelend.wire import crds

_KUBECTL_TIMEOUT = 60.0
_EXPECTED_NAMESPACES = ("default", "kube-system")


class _TlsServer(SupervisedProcess):
    """A server with its own CA on a free port of localhost. `client` names the certificate for calls."""

    def __init__(self, title: str, log: Path, issuer: TemporaryAuthority, client: Path) -> None:
        super().__init__(title, log)
        self._port = envtest_assets.free_port()
        self._issuer = issuer
        self._server = issuer.server_directory()
        self._connection = processes.LocalConnection(self._port, tls.client_context(client))

    @property
    def port(self) -> int:
        return self._port

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self._port}"

    def request(self, method: str, path: str, body: bytes | None = None) -> HttpResponse:
        """Calls the server with the client certificate."""
        return self._connection.request(method, path, body)

    def kill(self) -> None:
        super().kill()
        self._connection.close()


class LocalCluster(_TlsServer):
    """An API server. It has no state of its own, so `kill` is the fastest way to stop it."""

    poll_seconds = 0.05
    stop_timeout = 10.0

    def __init__(
        self,
        name: str,
        assets: Assets,
        etcd: Etcd,
        directory: Path,
        controllers: LiqoAssets | None = None,
    ) -> None:
        """`controllers` are the programs of a cluster with controller manager and scheduler."""
        issuer = TemporaryAuthority(f"lab-{name}", directory)
        administrator = issuer.client_directory("admin", [credentials.ADMIN_GROUP])
        log = directory / "kube-apiserver.log"
        super().__init__(f"API server of {name}", log, issuer, administrator)
        self.name = name
        self.assets = assets
        self.directory = directory
        self._etcd = etcd
        self._signing_key, self._verification_key = credentials.make_signing_key(directory)
        self.admin_kubeconfig = self.kubeconfig_for("admin", [credentials.ADMIN_GROUP])
        self._has_controllers = controllers is not None
        self.controllers: list[_Controller] = []
        if controllers is not None:
            flags = {"kube-controller-manager": self._manager_flags(), "kube-scheduler": []}
            self.controllers = [
                _Controller(self, controllers.program(name), added) for name, added in flags.items()
            ]

    def webhook_certificate(self) -> tuple[Path, bytes]:
        """Returns a directory with a certificate for a server on localhost, and the CA certificate."""
        trusted = self._issuer.certificate.public_bytes(Encoding.PEM)
        return self._issuer.server_directory("webhook"), trusted

    def stop_all(self) -> None:
        """Stops the controllers, which have no state of their own, and the API server."""
        for controller in self.controllers:
            controller.kill()
        self.kill()

    def kubeconfig_for(self, user: str, groups: Iterable[str] = ()) -> Path:
        """Writes a kubeconfig for a user with a client certificate; RBAC decides what the user may do."""
        groups = tuple(groups)
        proof = credentials.certificate_user(self._issuer.client_credentials(user, groups))
        return self._write_kubeconfig(",".join((user, *groups)), proof)

    def kubeconfig_of_account(self, account: str, namespace: str) -> Path:
        """Writes a kubeconfig for an existing service account, with a token valid for one hour."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        order = b'{"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}'
        token = msgspec.json.decode(self.call("POST", path, order))["status"]["token"]
        return self._write_kubeconfig(f"{namespace},{account}", {"token": token})

    def call(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """Calls the API as administrator; raises unless the status is 2xx."""
        answer = self.request(method, path, body)
        if 200 <= answer.status < 300:
            return answer.body
        text = answer.body.decode(errors="replace")
        raise UnexpectedResponse(f"{method} {path} on {self.name}: {answer.status} {text}")

    def kubectl(self, *arguments: str, kubeconfig: Path | None = None) -> str:
        """Runs kubectl, by default as administrator, and returns its output; raises if it fails."""
        options = (
            f"--kubeconfig={kubeconfig or self.admin_kubeconfig}",
            # The discovery cache is keyed by address, which another test cluster may have used before.
            f"--cache-dir={self.directory / 'kubectl'}",
        )
        done = subprocess.run(
            [self.assets.kubectl, *options, *arguments],
            check=False,
            capture_output=True,
            text=True,
            timeout=_KUBECTL_TIMEOUT * waiting.FACTOR,
        )
        if done.returncode:
            raise UnexpectedResponse(
                f"kubectl {' '.join(arguments)} on {self.name}: {done.stderr.strip()}"
            )
        return done.stdout

    def _is_ready(self) -> bool:
        if self.request("GET", "/readyz").status != 200:
            return False
        # The API server creates these namespaces shortly after it reports ready.
        paths = (f"/api/v1/namespaces/{name}" for name in _EXPECTED_NAMESPACES)
        return all(self.request("GET", path).status == 200 for path in paths)

    def _write_kubeconfig(self, name: str, proof: dict[str, str]) -> Path:
        path = self.directory / f"{quote(name, safe=',')}.kubeconfig"
        return credentials.write_kubeconfig(
            path, self.name, self.url, self._issuer.certificate, proof
        )

    def _command(self) -> list[str]:
        """Returns flags that API servers from 1.20 on support."""
        own, store = self._server, self._etcd.certificates
        return [
            str(self.assets.kube_apiserver),
            "--bind-address=127.0.0.1",
            f"--secure-port={self._port}",
            f"--tls-cert-file={own / files.TLS_CERTIFICATE}",
            f"--tls-private-key-file={own / files.TLS_KEY}",
            f"--client-ca-file={own / files.CA_CERTIFICATES}",
            f"--cert-dir={self.directory / 'unused'}",
            f"--etcd-servers={self._etcd.url}",
            f"--etcd-prefix=/{self.name}",
            f"--etcd-cafile={store / files.CA_CERTIFICATES}",
            f"--etcd-certfile={store / files.TLS_CERTIFICATE}",
            f"--etcd-keyfile={store / files.TLS_KEY}",
            "--authorization-mode=RBAC",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-signing-key-file={self._signing_key}",
            f"--service-account-key-file={self._verification_key}",
            "--service-cluster-ip-range=10.96.0.0/24",
            "--allow-privileged=true",
            *([] if self._has_controllers else _WITHOUT_CONTROLLERS),
            # Single replica; a loopback address cannot be advertised.
            "--endpoint-reconciler-type=none",
            "--advertise-address=127.0.0.1",
            "--profiling=false",
        ]

    def _manager_flags(self) -> list[str]:
        authority = self._issuer.authority_directory()
        return [
            f"--cluster-signing-cert-file={authority / files.CA_CERTIFICATES}",
            f"--cluster-signing-key-file={authority / pki_files.CA_KEY}",
            f"--root-ca-file={authority / files.CA_CERTIFICATES}",
            f"--service-account-private-key-file={self._signing_key}",
            "--use-service-account-credentials=true",
        ]


# Accept pods although no controller creates the default service account of a namespace.
_WITHOUT_CONTROLLERS = ("--disable-admission-plugins=ServiceAccount",)


class _Controller(SupervisedProcess):
    """Controller manager or scheduler of a cluster. It listens nowhere."""

    def __init__(self, cluster: LocalCluster, program: Path, flags: list[str]) -> None:
        super().__init__(
            f"{program.name} of {cluster.name}", cluster.directory / f"{program.name}.log"
        )
        self._cluster = cluster
        self._program = program
        self._flags = flags

    def _command(self) -> list[str]:
        return [
            str(self._program),
            f"--kubeconfig={self._cluster.admin_kubeconfig}",
            "--bind-address=127.0.0.1",
            "--secure-port=0",
            "--leader-elect=false",
            *self._flags,
        ]

    def _is_ready(self) -> bool:
        """The controller manager is ready when it has created the service accounts that pods need."""
        paths = (
            f"/api/v1/namespaces/{name}/serviceaccounts/default" for name in _EXPECTED_NAMESPACES
        )
        return all(self._cluster.request("GET", path).status == 200 for path in paths)


class Etcd(_TlsServer):
    """An etcd server. While it is paused, all reads and writes of all clusters block."""

    def __init__(self, assets: Assets, directory: Path, *, durable: bool) -> None:
        """`durable` enables fsync, which tests do not need."""
        issuer = TemporaryAuthority("lab-etcd", directory)
        self.certificates = issuer.client_directory("kube-apiserver")
        """Directory with the client certificate for API servers."""
        super().__init__("etcd", directory / "etcd.log", issuer, self.certificates)
        self._assets = assets
        self._directory = directory
        self._durable = durable

    def _is_ready(self) -> bool:
        answer = self.request("GET", "/health")
        return answer.status == 200 and b'"true"' in answer.body

    def _command(self) -> list[str]:
        newer = (
            # Its HTTP gateway uses these to call etcd itself.
            f"--client-cert-file={self.certificates / files.TLS_CERTIFICATE}",
            f"--client-key-file={self.certificates / files.TLS_KEY}",
            *(() if self._durable else ("--unsafe-no-fsync",)),
        )
        return [
            str(self._assets.etcd),
            "--name=lab",
            f"--data-dir={self._directory / 'data'}",
            f"--listen-client-urls={self.url}",
            f"--advertise-client-urls={self.url}",
            # There are no peers, so any port will do.
            "--listen-peer-urls=http://127.0.0.1:0",
            f"--cert-file={self._server / files.TLS_CERTIFICATE}",
            f"--key-file={self._server / files.TLS_KEY}",
            f"--trusted-ca-file={self._server / files.CA_CERTIFICATES}",
            "--client-cert-auth",
            "--logger=zap",
            "--log-level=warn",
            *(newer if self._assets.etcd_version >= (3, 5) else ()),
        ]


class ApiServers:
    """The running servers, and the directory with their data, certificates, kubeconfigs and logs.

    A stopped cluster keeps its name and its data in etcd.
    """

    def __init__(
        self,
        assets: Assets,
        directory: Path,
        *,
        durable: bool,
        controllers: LiqoAssets | None = None,
    ) -> None:
        self.assets = assets
        self.directory = directory
        self._controllers = controllers
        self.etcd = Etcd(assets, _make_directory(directory / "etcd"), durable=durable)
        self.clusters: dict[str, LocalCluster] = {}

    def start(self, *names: str) -> list[LocalCluster]:
        """Starts one cluster per name in parallel and waits until all are ready."""
        started = []
        for name in names:
            if name in self.clusters:
                raise InvalidSettings(f"cluster {name} already exists")
            directory = _make_directory(self.directory / name)
            self.clusters[name] = LocalCluster(
                name, self.assets, self.etcd, directory, self._controllers
            )
            started.append(self.clusters[name])
        for cluster in started:
            cluster.start()
        for cluster in started:
            cluster.wait_until_ready()
            for controller in cluster.controllers:
                controller.start()
        for cluster in started:
            for controller in cluster.controllers:
                controller.wait_until_ready()
        return started

    def stop(self) -> None:
        """Stops all API servers, then etcd."""
        for cluster in self.clusters.values():
            cluster.stop_all()
        self.etcd.stop()


@contextmanager
def run_api_servers(
    assets: Assets,
    directory: Path | None = None,
    *,
    durable: bool = False,
    controllers: LiqoAssets | None = None,
) -> Iterator[ApiServers]:
    """Runs etcd in `directory`, or in a temporary one. `durable` enables fsync, as in production.

    `controllers` gives each cluster a controller manager and a scheduler.
    """
    with ExitStack() as stack:
        stack.enter_context(tasks.signals_as_interrupt())
        if directory is None:
            temporary = tempfile.TemporaryDirectory(prefix="kubelend-lab-")
            directory = Path(stack.enter_context(temporary))
        lab = ApiServers(assets, directory, durable=durable, controllers=controllers)
        try:
            lab.etcd.start()
            lab.etcd.wait_until_ready()
            yield lab
        finally:
            # Ctrl-C in here would leave processes running.
            with tasks.defer_signals():
                lab.stop()


def _make_directory(directory: Path) -> Path:
    directory.mkdir(mode=0o700, parents=True)
    return directory


CEL_SINCE = KubernetesVersion(1, 25)
"""First version that supports CEL validation rules in CRDs; kubectl of older ones rejects them."""

_CRDS_PATH = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


def install_crds(cluster: LocalCluster) -> None:
    """Installs our CRDs, without CEL rules on servers that do not support them."""
    create_crds(cluster, crds.crd_documents(cel=cluster.assets.version >= CEL_SINCE).values())


def create_crds(cluster: LocalCluster, documents: Iterable[Document]) -> None:
    """Creates CRDs, and waits until they are established."""
    paths = []
    for document in documents:
        cluster.call("POST", _CRDS_PATH, msgspec.json.encode(document))
        paths.append(f"{_CRDS_PATH}/{document['metadata']['name']}")
    shown = b'"type":"Established","status":"True"'
    waiting.wait_until(
        lambda: all(shown in cluster.call("GET", path) for path in paths), "no CRDs", 30
    )


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
