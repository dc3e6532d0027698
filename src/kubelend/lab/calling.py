"""A minimal HTTPS client for etcd and API servers, independent of our own Kubernetes client."""

from __future__ import annotations

import http.client
import ssl
from pathlib import Path
from typing import NamedTuple

from kubelend.kits import keyfiles


class Answer(NamedTuple):
    """Status and body of a response; status 0 if the connection failed."""

    status: int
    body: bytes


class Caller:
    """Calls one server on localhost with a client certificate."""

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
