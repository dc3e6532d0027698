"""A minimal HTTPS client for etcd and API servers, independent of our own Kubernetes client."""

from __future__ import annotations

import http.client
import ssl
from pathlib import Path
from typing import NamedTuple

from kubelend.kits import keyfiles


class HttpResponse(NamedTuple):
    """Status and body of a response; status 0 if the connection failed."""

    status: int
    body: bytes


class HttpsClient:
    """Calls one server on localhost with a client certificate."""

    def __init__(self, port: int, certificates: Path, timeout: float = 10.0) -> None:
        self._port = port
        self._timeout = timeout
        self._tls = ssl.create_default_context(cafile=certificates / keyfiles.CA_CERTIFICATES)
        self._tls.load_cert_chain(
            certificates / keyfiles.TLS_CERTIFICATE, certificates / keyfiles.TLS_KEY
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
