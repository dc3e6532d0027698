"""TLS contexts for servers and clients, from a directory with `tls.crt`, `tls.key` and `ca.crt`.

Both sides show a certificate and verify the other's against `ca.crt`. The files may change while a
server runs (a rotated secret, a renewed certificate): `ReloadingServerContext` takes them up
without a restart.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from kubelend.core.errors import InvalidSettings
from kubelend.kits import keyfiles

# Forward secrecy and authenticated encryption only; TLS 1.3, preferred anyway, has no others.
_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"

_HINT = "make one with `kubelend ca issue`, or name the right directory"


def server_context(directory: Path) -> ssl.SSLContext:
    """Lets in whoever shows a certificate signed by an authority in `ca.crt`, and nobody else."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, directory)
    context.verify_mode = ssl.CERT_REQUIRED
    # A resumed session is not verified again, and could outlive its certificate: no tickets. (The
    # session IDs of TLS 1.2 cannot be switched off from here; they end with the context.)
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION
    context.num_tickets = 0
    return context


def client_context(directory: Path) -> ssl.SSLContext:
    """Shows `tls.crt`, and speaks only to a server whose certificate names the host asked for."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT, directory)
    context.hostname_checks_common_name = False
    return context


def expires_at(directory: Path) -> datetime:
    """When the directory's own certificate ends (aware UTC)."""
    # Late: the library costs a process 11 MB, which one that never asks does without.
    from cryptography import x509

    path = directory / keyfiles.CERTIFICATE
    try:
        return x509.load_pem_x509_certificate(keyfiles.read(path)).not_valid_after_utc
    except ValueError as error:
        raise InvalidSettings(f"{path} holds no certificate in PEM form") from error


def exposed_key(directory: Path) -> str:
    """A warning if others can reach the private key; empty if not.

    Not an error, for Kubernetes mounts secrets as 0644 unless told otherwise.
    """
    path = directory / keyfiles.KEY
    complaint = keyfiles.exposure(path)
    return complaint and f"{complaint}; chmod 600 {path}, or set the secret volume's defaultMode"


class ReloadingServerContext:
    """A server's context which follows the files of its directory.

    Pass `context` to the server once, and call `refresh` now and then. New handshakes see the new
    certificate and the new authorities; open connections go on. `report` is told, once, why changed
    files could not be taken up, and `refused` why a client was not let in.
    """

    def __init__(
        self,
        directory: Path,
        *,
        report: Callable[[InvalidSettings], None],
        refused: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._directory = directory
        self._report = report
        self._refused = refused
        self._reported = ""
        # Before the files are read: a change in between is then seen by the first refresh.
        self._signature = _signature(directory)
        self._switch = _SwitchingContext(ssl.PROTOCOL_TLS_SERVER)
        self._switch.current = self._server_context()

    @property
    def context(self) -> ssl.SSLContext:
        """What a server is started with, for good."""
        return self._switch

    def refresh(self) -> bool:
        """Take up changed files; True if it did. Three calls of stat when nothing has changed."""
        # Before the files are read, here too: two generations read as one are mended by the next.
        signature = _signature(self._directory)
        if signature == self._signature:
            return False
        try:
            self._switch.current = self._server_context()
        except InvalidSettings as error:
            self._report_once(error)
            return False
        self._signature = signature
        self._reported = ""
        return True

    def _server_context(self) -> ssl.SSLContext:
        context = server_context(self._directory)
        refused = self._refused

        class Noted(ssl.SSLObject):
            """Event loops drop a refused handshake without a word; this one says why."""

            def do_handshake(self) -> None:
                try:
                    super().do_handshake()
                except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    raise
                except ssl.SSLError as problem:
                    refused(problem.reason or str(problem))
                    raise

        context.sslobject_class = Noted
        return context

    def _report_once(self, error: InvalidSettings) -> None:
        if self._reported != str(error):
            self._reported = str(error)
            self._report(error)


class _SwitchingContext(ssl.SSLContext):
    """Starts each connection with the current context; it has no certificate to serve with itself.

    Exchanging the context in an SNI callback looks simpler, but sessions stay with the context
    that the server was started with: a client of an authority no longer trusted could resume one,
    unverified.
    """

    current: ssl.SSLContext

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        """As asyncio and uvloop begin a handshake."""
        return self.current.wrap_bio(incoming, outgoing, server_side, server_hostname, session)

    def wrap_socket(
        self,
        sock: socket.socket,
        server_side: bool = False,
        do_handshake_on_connect: bool = True,
        suppress_ragged_eofs: bool = True,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLSocket:
        """As blocking servers begin a handshake."""
        return self.current.wrap_socket(
            sock,
            server_side,
            do_handshake_on_connect,
            suppress_ragged_eofs,
            server_hostname,
            session,
        )


_Signature = tuple[tuple[int, ...] | None, ...]


def _signature(directory: Path) -> _Signature:
    names = (keyfiles.CERTIFICATE, keyfiles.KEY, keyfiles.AUTHORITIES)
    return tuple(_stat(directory / name) for name in names)


def _stat(path: Path) -> tuple[int, ...] | None:
    # Follows links, and so sees Kubernetes exchange the ..data link behind a mounted secret. The
    # change time sees chmod.
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _context(protocol: ssl._SSLMethod, directory: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(_CIPHERS)
    context.set_alpn_protocols(["http/1.1"])
    # Every certificate in ca.crt is an anchor, an intermediate one too, as for the Go programs that
    # read the same files.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    _load_pair(context, directory / keyfiles.CERTIFICATE, directory / keyfiles.KEY)
    _load_authorities(context, directory / keyfiles.AUTHORITIES)
    return context


def _load_pair(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    for path in (certificate, key):
        keyfiles.read(path, hint=_HINT)
    try:
        # With an empty password an encrypted key fails; with none OpenSSL asks on the terminal.
        context.load_cert_chain(certificate, key, password="")
    except (ssl.SSLError, OSError) as error:
        raise _pair_error(certificate, key, error) from error


def _pair_error(certificate: Path, key: Path, error: OSError) -> InvalidSettings:
    # The second when even their algorithms differ.
    if getattr(error, "reason", None) in ("KEY_VALUES_MISMATCH", "NO_CERTIFICATE_ASSIGNED"):
        return InvalidSettings(
            f"{certificate} and {key} do not match",
            hint="put the pair there that was issued together",
        )
    return InvalidSettings(
        f"{certificate} and {key} are no certificate and unencrypted key in PEM form", hint=_HINT
    )


def _load_authorities(context: ssl.SSLContext, path: Path) -> None:
    keyfiles.read(path, hint=_HINT)
    try:
        context.load_verify_locations(path)
    except (ssl.SSLError, OSError) as error:
        raise InvalidSettings(
            f"{path} holds no whole certificate in PEM form", hint=_HINT
        ) from error
