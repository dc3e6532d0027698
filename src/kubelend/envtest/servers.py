"""One test cluster: an API server with its own prefix in etcd, its own CA and RBAC."""

from __future__ import annotations

import http.client
import os
import ssl
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import ClassVar, NamedTuple
from urllib.parse import quote

import msgspec

from kubelend.core.errors import InvalidSettings, Unavailable, UnexpectedAnswer
from kubelend.envtest import assets as envtest_assets
from kubelend.envtest import credentials
from kubelend.envtest.assets import Assets, KubernetesVersion
from kubelend.envtest.credentials import TemporaryAuthority
from kubelend.envtest.processes import SupervisedProcess
from kubelend.kits import files, tasks
from kubelend.wire import crds


class ServerProcess(ABC):
    """A server process. Its data and address stay the same over a restart."""

    poll_seconds: ClassVar[float]
    """Seconds between two readiness checks."""
    stop_timeout: ClassVar[float]

    def __init__(self, title: str, log: Path) -> None:
        """`title` is used in error messages."""
        self._title = title
        self._log = log
        self._running: SupervisedProcess | None = None

    @abstractmethod
    def _command(self) -> list[str]: ...

    @abstractmethod
    def _is_ready(self) -> bool: ...

    @property
    def process(self) -> SupervisedProcess:
        if self._running is None:
            raise Unavailable(f"the {self._title} has not been started")
        return self._running

    def start(self) -> None:
        """Starts the process without waiting, so that several can start in parallel."""
        with tasks.defer_signals():
            self._running = SupervisedProcess(self._title, self._log, self._command(), os.environ)

    def wait_until_ready(self) -> float:
        """Returns the seconds since it was started."""
        return self.process.wait_until(self._is_ready, self.poll_seconds)

    def restart(self) -> None:
        """Restarts the server. Watches end, and the new server has no cache of earlier events."""
        self.stop()
        self.start()
        self.wait_until_ready()

    def pause(self) -> None:
        """Suspends the process: connections stay open and calls block until `resume`."""
        self.process.pause()

    def resume(self) -> None:
        self.process.resume()

    def kill(self) -> None:
        """Ends the process with SIGKILL; the fastest way for a server without state."""
        if self._running is not None:
            self._running.kill()

    def stop(self) -> None:
        """Stops the process gracefully; does nothing if it was never started."""
        if self._running is not None:
            self._running.stop(self.stop_timeout)


ADMIN_USER = "admin"

_KUBECTL_TIMEOUT = 60.0
_EXPECTED_NAMESPACES = ("default", "kube-system")


class LocalCluster(ServerProcess):
    """An API server. It has no state of its own, so `kill` is the fastest way to stop it."""

    poll_seconds = 0.05
    stop_timeout = 10.0

    def __init__(self, name: str, assets: Assets, etcd: Etcd, directory: Path) -> None:
        super().__init__(f"API server of {name}", directory / "kube-apiserver.log")
        self.name = name
        self.assets = assets
        self.directory = directory
        self._etcd = etcd
        self._port = envtest_assets.free_port()
        self._issuer = credentials.TemporaryAuthority(f"lab-{name}", directory)
        self._server = self._issuer.server_directory()
        self._signing_key, self._verification_key = credentials.make_signing_key(directory)
        administrator = self._issuer.client_directory(ADMIN_USER, [credentials.ADMIN_GROUP])
        self._client = HttpsClient(self._port, administrator)
        self.admin_kubeconfig = self.kubeconfig_for(ADMIN_USER, [credentials.ADMIN_GROUP])

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self._port}"

    def kubeconfig_for(self, user: str, groups: Iterable[str] = ()) -> Path:
        """Writes a kubeconfig for a user with a client certificate; RBAC decides what the user may do."""
        groups = tuple(groups)
        proof = credentials.certificate_user(self._issuer.client_credentials(user, groups))
        return self._write_kubeconfig(",".join((user, *groups)), proof)

    def kubeconfig_of_account(self, account: str, namespace: str) -> Path:
        """Writes a kubeconfig for an existing service account, with a token valid for one hour."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        order = b'{"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}'
        answer = msgspec.json.decode(self.call("POST", path, order), type=_TokenRequest)
        proof = credentials.token_user(answer.status.token)
        return self._write_kubeconfig(f"{namespace},{account}", proof)

    def call(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """Calls the API as administrator; raises unless the status is 2xx."""
        answer = self._client.call(method, path, body)
        if 200 <= answer.status < 300:
            return answer.body
        text = answer.body.decode(errors="replace")
        raise UnexpectedAnswer(f"{method} {path} on {self.name}: {answer.status} {text}")

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
            timeout=_KUBECTL_TIMEOUT,
        )
        if done.returncode:
            raise UnexpectedAnswer(
                f"kubectl {' '.join(arguments)} on {self.name}: {done.stderr.strip()}"
            )
        return done.stdout

    def _is_ready(self) -> bool:
        if self._client.call("GET", "/readyz").status != 200:
            return False
        # The API server creates these namespaces shortly after it reports ready.
        paths = (f"/api/v1/namespaces/{name}" for name in _EXPECTED_NAMESPACES)
        return all(self._client.call("GET", path).status == 200 for path in paths)

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
            # Accept pods although no controller creates the default service account of a namespace.
            "--disable-admission-plugins=ServiceAccount",
            # Single replica; a loopback address cannot be advertised.
            "--endpoint-reconciler-type=none",
            "--advertise-address=127.0.0.1",
            "--profiling=false",
        ]


class _TokenStatus(msgspec.Struct):
    token: str


class _TokenRequest(msgspec.Struct):
    status: _TokenStatus


class Etcd(ServerProcess):
    """An etcd server. While it is paused, all reads and writes of all clusters block."""

    poll_seconds = 0.02
    stop_timeout = 30.0

    def __init__(self, assets: Assets, directory: Path, *, durable: bool) -> None:
        """`durable` enables fsync, which tests do not need."""
        super().__init__("etcd", directory / "etcd.log")
        self._assets = assets
        self._directory = directory
        self._durable = durable
        self._port = envtest_assets.free_port()
        issuer = TemporaryAuthority("lab-etcd", directory)
        self._server = issuer.server_directory()
        self.certificates = issuer.client_directory("kube-apiserver")
        """Directory with the client certificate for API servers."""

        self._client = HttpsClient(self._port, self.certificates)

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self._port}"

    def compact(self) -> None:
        """Compacts all older revisions, so that watches from one of them fail with 410 Gone.

        Recent API servers also cache the last revisions: restart them to drop the cache. Requires etcd 3.5.
        """
        found = self._call("/v3/kv/range", {"key": "AA=="})
        header = msgspec.convert(found["header"], dict[str, str])
        self._call("/v3/kv/compaction", {"revision": header["revision"], "physical": True})

    def _is_ready(self) -> bool:
        answer = self._client.call("GET", "/health")
        return answer.status == 200 and b'"true"' in answer.body

    def _call(self, path: str, body: dict[str, object]) -> dict[str, object]:
        answer = self._client.call("POST", path, msgspec.json.encode(body))
        if answer.status != 200:
            raise Unavailable(
                f"etcd: call of {path} failed", hint=answer.body.decode(errors="replace")
            )
        return msgspec.json.decode(answer.body, type=dict[str, object])

    def _command(self) -> list[str]:
        trusted = self._server / files.CA_CERTIFICATES
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
            f"--trusted-ca-file={trusted}",
            "--client-cert-auth",
            "--logger=zap",
            "--log-level=warn",
            *(self._newer_flags() if self._assets.etcd_version >= (3, 5) else ()),
        ]

    def _newer_flags(self) -> list[str]:
        return [
            # Its HTTP gateway uses these to call etcd itself.
            f"--client-cert-file={self.certificates / files.TLS_CERTIFICATE}",
            f"--client-key-file={self.certificates / files.TLS_KEY}",
            *(() if self._durable else ("--unsafe-no-fsync",)),
        ]


class ApiServers:
    """The running servers, and the directory with their data, certificates, kubeconfigs and logs.

    A stopped cluster keeps its name and its data in etcd.
    """

    def __init__(self, assets: Assets, directory: Path, *, durable: bool) -> None:
        self.assets = assets
        self.directory = directory
        self.etcd = Etcd(assets, _make_directory(directory / "etcd"), durable=durable)
        self.clusters: dict[str, LocalCluster] = {}

    def start(self, *names: str) -> list[LocalCluster]:
        """Starts one cluster per name in parallel and waits until all are ready."""
        started = [self._make_cluster(name) for name in names]
        for cluster in started:
            cluster.start()
        for cluster in started:
            cluster.wait_until_ready()
        return started

    def stop(self) -> None:
        """Stops all API servers, then etcd."""
        for cluster in self.clusters.values():
            cluster.kill()
        self.etcd.stop()

    def _make_cluster(self, name: str) -> LocalCluster:
        if name in self.clusters:
            raise InvalidSettings(f"cluster {name} already exists")
        directory = _make_directory(self.directory / name)
        self.clusters[name] = LocalCluster(name, self.assets, self.etcd, directory)
        return self.clusters[name]


@contextmanager
def run_api_servers(
    assets: Assets, directory: Path | None = None, *, durable: bool = False
) -> Iterator[ApiServers]:
    """Runs etcd in `directory`, or in a temporary one. `durable` enables fsync, as in production."""
    with ExitStack() as stack:
        stack.enter_context(tasks.signals_as_interrupt())
        if directory is None:
            temporary = tempfile.TemporaryDirectory(prefix="kubelend-lab-")
            directory = Path(stack.enter_context(temporary))
        lab = ApiServers(assets, directory, durable=durable)
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


class HttpResponse(NamedTuple):
    """Status and body of a response; status 0 if the connection failed."""

    status: int
    body: bytes


class HttpsClient:
    """Calls one server on localhost with a client certificate."""

    def __init__(self, port: int, certificates: Path, timeout: float = 10.0) -> None:
        self._port = port
        self._timeout = timeout
        self._tls = ssl.create_default_context(cafile=certificates / files.CA_CERTIFICATES)
        self._tls.load_cert_chain(
            certificates / files.TLS_CERTIFICATE, certificates / files.TLS_KEY
        )

    def call(self, method: str, path: str, body: bytes | None = None) -> HttpResponse:
        connection = http.client.HTTPSConnection(
            "127.0.0.1", self._port, timeout=self._timeout, context=self._tls
        )
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return HttpResponse(answer.status, answer.read())
        except (OSError, http.client.HTTPException) as error:
            return HttpResponse(0, str(error).encode())
        finally:
            connection.close()


CEL_SINCE = KubernetesVersion(1, 25)
"""First version that supports CEL validation rules in CRDs; kubectl of older ones rejects them."""

_CRD_PREFIX = "customresourcedefinition.apiextensions.k8s.io/"


def apply_manifests(cluster: LocalCluster, paths: Iterable[Path]) -> list[str]:
    """Applies files or directories and waits until CRDs are established; returns the objects' names."""
    named = [f"--filename={path}" for path in paths]
    if not named:
        return []
    applied = cluster.kubectl("apply", "--output=name", *named).split()
    if definitions := [name for name in applied if name.startswith(_CRD_PREFIX)]:
        cluster.kubectl("wait", "--for=condition=Established", "--timeout=30s", *definitions)
    return applied


def install_crds(cluster: LocalCluster) -> list[str]:
    """Installs our CRDs, without CEL rules on servers that do not support them."""
    directory = cluster.directory / "definitions"
    directory.mkdir(exist_ok=True)
    documents = crds.crd_documents(cel=cluster.assets.version >= CEL_SINCE)
    for name, document in documents.items():
        (directory / name).with_suffix(".json").write_bytes(msgspec.json.encode(document))
    return apply_manifests(cluster, [directory])
