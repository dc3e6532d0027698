"""The etcd server that all API servers of a test control plane share, secured with mutual TLS."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kubelend.core.errors import Unavailable
from kubelend.kits import keyfiles
from kubelend.lab import ports
from kubelend.lab.assets import Assets
from kubelend.lab.calling import HttpsClient
from kubelend.lab.identities import TemporaryAuthority
from kubelend.lab.servants import ServerProcess


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
        self._port = ports.free_port()
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
        trusted = self._server / keyfiles.CA_CERTIFICATES
        return [
            str(self._assets.etcd),
            "--name=lab",
            f"--data-dir={self._directory / 'data'}",
            f"--listen-client-urls={self.url}",
            f"--advertise-client-urls={self.url}",
            # There are no peers, so any port will do.
            "--listen-peer-urls=http://127.0.0.1:0",
            f"--cert-file={self._server / keyfiles.TLS_CERTIFICATE}",
            f"--key-file={self._server / keyfiles.TLS_KEY}",
            f"--trusted-ca-file={trusted}",
            "--client-cert-auth",
            "--logger=zap",
            "--log-level=warn",
            *(self._newer_flags() if self._assets.etcd_version >= (3, 5) else ()),
        ]

    def _newer_flags(self) -> list[str]:
        return [
            # Its HTTP gateway uses these to call etcd itself.
            f"--client-cert-file={self.certificates / keyfiles.TLS_CERTIFICATE}",
            f"--client-key-file={self.certificates / keyfiles.TLS_KEY}",
            *(() if self._durable else ("--unsafe-no-fsync",)),
        ]
