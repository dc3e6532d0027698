"""One test cluster: an API server with its own prefix in etcd, its own CA and RBAC."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

import msgspec

from kubelend.core.errors import UnexpectedAnswer
from kubelend.kits import keyfiles
from kubelend.lab import identities, kubeconfigs, ports
from kubelend.lab.assets import Assets
from kubelend.lab.calling import HttpsClient
from kubelend.lab.etcd import Etcd
from kubelend.lab.servants import ServerProcess

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
        self._port = ports.free_port()
        self._issuer = identities.TemporaryAuthority(f"lab-{name}", directory)
        self._server = self._issuer.server_directory()
        self._signing_key, self._verification_key = identities.make_signing_key(directory)
        administrator = self._issuer.client_directory(ADMIN_USER, [identities.ADMIN_GROUP])
        self._client = HttpsClient(self._port, administrator)
        self.admin_kubeconfig = self.kubeconfig_for(ADMIN_USER, [identities.ADMIN_GROUP])

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self._port}"

    def kubeconfig_for(self, user: str, groups: Iterable[str] = ()) -> Path:
        """Writes a kubeconfig for a user with a client certificate; RBAC decides what the user may do."""
        groups = tuple(groups)
        proof = kubeconfigs.certificate_user(self._issuer.client_credentials(user, groups))
        return self._write_kubeconfig(",".join((user, *groups)), proof)

    def kubeconfig_of_account(self, account: str, namespace: str) -> Path:
        """Writes a kubeconfig for an existing service account, with a token valid for one hour."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        order = b'{"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}'
        answer = msgspec.json.decode(self.call("POST", path, order), type=_TokenRequest)
        proof = kubeconfigs.token_user(answer.status.token)
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
        return kubeconfigs.write_kubeconfig(
            path, self.name, self.url, self._issuer.certificate, proof
        )

    def _command(self) -> list[str]:
        """Returns flags that API servers from 1.20 on support."""
        own, store = self._server, self._etcd.certificates
        return [
            str(self.assets.kube_apiserver),
            "--bind-address=127.0.0.1",
            f"--secure-port={self._port}",
            f"--tls-cert-file={own / keyfiles.TLS_CERTIFICATE}",
            f"--tls-private-key-file={own / keyfiles.TLS_KEY}",
            f"--client-ca-file={own / keyfiles.CA_CERTIFICATES}",
            f"--cert-dir={self.directory / 'unused'}",
            f"--etcd-servers={self._etcd.url}",
            f"--etcd-prefix=/{self.name}",
            f"--etcd-cafile={store / keyfiles.CA_CERTIFICATES}",
            f"--etcd-certfile={store / keyfiles.TLS_CERTIFICATE}",
            f"--etcd-keyfile={store / keyfiles.TLS_KEY}",
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
