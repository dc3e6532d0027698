"""The store behind all API servers of a lab: one etcd, which nobody else can speak to."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kubelend.core.errors import Unavailable
from kubelend.kits import keyfiles
from kubelend.lab import ports
from kubelend.lab.assets import Assets
from kubelend.lab.calling import Caller
from kubelend.lab.identities import Issuer
from kubelend.lab.servants import Servant


class Etcd(Servant):
    """While it is paused, every write and read of all clusters waits."""

    poll = 0.02
    stops_within = 30.0

    def __init__(self, assets: Assets, directory: Path, *, durable: bool) -> None:
        """`durable`: whether each write reaches the disk, which tests need not wait for."""
        super().__init__("etcd", directory / "etcd.log")
        self._assets = assets
        self._directory = directory
        self._durable = durable
        self._port = ports.free()
        issuer = Issuer("lab-etcd", directory)
        self._server = issuer.server()
        self.certificates = issuer.client("kube-apiserver")
        """Of its clients."""

        self._caller = Caller(self._port, self.certificates)

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self._port}"

    def compact(self) -> None:
        """Forget all older revisions, as API servers let it do now and then: who asks for one hears 410.

        API servers of today have the last of them in memory too: restart those that shall not. From etcd 3.5.
        """
        found = self._ask("/v3/kv/range", {"key": "AA=="})
        header = msgspec.convert(found["header"], dict[str, str])
        self._ask("/v3/kv/compaction", {"revision": header["revision"], "physical": True})

    def _is_ready(self) -> bool:
        answer = self._caller.call("GET", "/health")
        return answer.status == 200 and b'"true"' in answer.body

    def _ask(self, path: str, body: dict[str, object]) -> dict[str, object]:
        answer = self._caller.call("POST", path, msgspec.json.encode(body))
        if answer.status != 200:
            raise Unavailable(f"etcd refuses {path}", hint=answer.body.decode(errors="replace"))
        return msgspec.json.decode(answer.body, type=dict[str, object])

    def _command(self) -> list[str]:
        trusted = self._server / keyfiles.AUTHORITIES
        return [
            str(self._assets.etcd),
            "--name=lab",
            f"--data-dir={self._directory / 'data'}",
            f"--listen-client-urls={self.url}",
            f"--advertise-client-urls={self.url}",
            # Nobody joins it, so any port will do.
            "--listen-peer-urls=http://127.0.0.1:0",
            f"--cert-file={self._server / keyfiles.CERTIFICATE}",
            f"--key-file={self._server / keyfiles.KEY}",
            f"--trusted-ca-file={trusted}",
            "--client-cert-auth",
            "--logger=zap",
            "--log-level=warn",
            *(self._newer_flags() if self._assets.etcd_version >= (3, 5) else ()),
        ]

    def _newer_flags(self) -> list[str]:
        return [
            # With these its own HTTP gateway calls it.
            f"--client-cert-file={self.certificates / keyfiles.CERTIFICATE}",
            f"--client-key-file={self.certificates / keyfiles.KEY}",
            *(() if self._durable else ("--unsafe-no-fsync",)),
        ]
