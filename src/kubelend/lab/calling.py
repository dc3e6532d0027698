"""Plain calls to the programs of the lab, before anything of ours is up that could make them."""

from __future__ import annotations

import http.client
import ssl
from pathlib import Path
from typing import NamedTuple

from kubelend.kits import keyfiles


class Answer(NamedTuple):
    """What came back; status 0 if nothing did."""

    status: int
    body: bytes


class Caller:
    """Somebody with a certificate, who calls one server."""

    def __init__(self, port: int, certificates: Path, timeout: float = 10.0) -> None:
        self._port = port
        self._timeout = timeout
        self._tls = ssl.create_default_context(cafile=certificates / keyfiles.AUTHORITIES)
        self._tls.load_cert_chain(certificates / keyfiles.CERTIFICATE, certificates / keyfiles.KEY)

    def call(self, method: str, path: str, body: bytes | None = None) -> Answer:
        connection = http.client.HTTPSConnection(
            "127.0.0.1", self._port, timeout=self._timeout, context=self._tls
        )
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return Answer(answer.status, answer.read())
        except (OSError, http.client.HTTPException) as error:
            return Answer(0, str(error).encode())
        finally:
            connection.close()
