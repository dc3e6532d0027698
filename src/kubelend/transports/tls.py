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
from typing import TYPE_CHECKING

from kubelend.core.errors import InvalidSettings
from kubelend.kits import keyfiles
from kubelend.transports.following import Following

if TYPE_CHECKING:
    from cryptography import x509

# Forward secrecy and authenticated encryption only; TLS 1.3, preferred anyway, has no others.
_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"

_HINT = "make one with `kubelend ca issue`, or name the right directory"


class ServerContext(ssl.SSLContext):
    """A server's context that remembers whom the server believed when it was made."""

    generation = 0
    """How often an authority had been taken away by then: each connection has that of its handshake."""


def server_context(directory: Path, authorities: str = "", *, ask: bool = True) -> ServerContext:
    """Lets in whoever shows a certificate signed by an authority in `ca.crt`, and nobody else.

    `authorities`, in PEM form, count instead of those. Without `ask` anybody is let in, unasked.
    """
    context = ServerContext(ssl.PROTOCOL_TLS_SERVER)
    _prepare(context, directory)
    if authorities:
        context.load_verify_locations(cadata=authorities)
    else:
        _load_authorities(context, directory / keyfiles.AUTHORITIES)
    context.verify_mode = ssl.CERT_REQUIRED if ask else ssl.CERT_NONE
    # A resumed session is not verified again, and could outlive its certificate: no tickets. (The
    # session IDs of TLS 1.2 cannot be switched off from here; they end with the context.)
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION
    context.num_tickets = 0
    return context


def client_context(directory: Path) -> ssl.SSLContext:
    """Shows `tls.crt`, and speaks only to a server whose certificate names the host asked for."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _prepare(context, directory)
    _load_authorities(context, directory / keyfiles.AUTHORITIES)
    context.hostname_checks_common_name = False
    return context


def newcomer_context(authorities: str = "") -> ssl.SSLContext:
    """Shows nothing. Speaks only to a server that these authorities (in PEM form) vouch for.

    Without any it speaks to anybody: for what is public, and is judged by its content.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _strengthen(context)
    if authorities:
        context.load_verify_locations(cadata=authorities)
        context.hostname_checks_common_name = False
    else:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def expires_at(directory: Path) -> datetime:
    """When the directory's own certificate ends (aware UTC)."""
    return own_certificate(directory).not_valid_after_utc


def own_certificate(directory: Path) -> x509.Certificate:
    """The directory's own certificate, for who wants to know more of it."""
    # Late: the library costs a process 11 MB, which one that never asks does without.
    from cryptography import x509

    path = directory / keyfiles.CERTIFICATE
    try:
        return x509.load_pem_x509_certificate(keyfiles.read(path))
    except ValueError as error:
        raise InvalidSettings(f"{path} holds no certificate in PEM form") from error


def is_signed_as_trusted(directory: Path) -> bool:
    """Whether an authority that vouches for the broker here has signed the directory's own certificate."""
    from cryptography import x509

    try:
        shown, trusted = (
            x509.load_pem_x509_certificates(keyfiles.read(directory / name))
            for name in (keyfiles.CERTIFICATE, keyfiles.AUTHORITIES)
        )
    except ValueError as error:
        raise InvalidSettings(f"{directory} holds no certificates in PEM form") from error
    return any(_is_signed_by(each, authority) for each in shown for authority in trusted)


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
    certificate and the new authorities; open connections go on, and know by their `generation` if
    an authority was taken away since (`api.callers` judges them). `report` is told, once, why changed
    files could not be taken up.
    """

    def __init__(
        self,
        directory: Path,
        *,
        report: Callable[[InvalidSettings], None],
        authorities: Callable[[], str] = str,
        ask: bool = True,
    ) -> None:
        """`authorities`, in PEM form, count instead of `ca.crt`; without `ask` anybody is let in."""
        self.generation = 0
        """How often an authority was taken away: what older connections showed is to be judged anew."""
        self._authorities = authorities
        self._ask = ask
        self._contexts = Following(directory, self._server_context, report)
        self._switch = _SwitchingContext(ssl.PROTOCOL_TLS_SERVER)
        self._switch.current = self._contexts.current

    @property
    def context(self) -> ssl.SSLContext:
        """What a server is started with, for good."""
        return self._switch

    def refresh(self, *, again: bool = False) -> bool:
        """Take up changed files; True if it did. Three calls of stat when nothing has changed.

        With `again` they are read in any case: the authorities beside them have changed.
        """
        before = self.authorities
        if not self._contexts.refresh(again=again):
            return False
        if not set(before) <= set(self.authorities):
            self.generation += 1
        self._contexts.current.generation = self.generation
        self._switch.current = self._contexts.current
        return True

    @property
    def authorities(self) -> list[bytes]:
        """Whom it believes now, in DER form."""
        return self._contexts.current.get_ca_certs(binary_form=True)

    def _server_context(self, directory: Path) -> ServerContext:
        return server_context(directory, self._authorities(), ask=self._ask)


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


def _is_signed_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        certificate.verify_directly_issued_by(authority)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


def _prepare(context: ssl.SSLContext, directory: Path) -> None:
    _strengthen(context)
    _load_pair(context, directory / keyfiles.CERTIFICATE, directory / keyfiles.KEY)


def _strengthen(context: ssl.SSLContext) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(_CIPHERS)
    context.set_alpn_protocols(["http/1.1"])
    # Every certificate in ca.crt is an anchor, an intermediate one too, as for the Go programs that
    # read the same files.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN


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
