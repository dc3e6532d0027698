"""TLS contexts for servers and clients, from a directory with `tls.crt`, `tls.key` and `ca.crt`.

Both sides present a certificate and verify the other's against `ca.crt`. The files may change at run time
(a rotated Secret, a renewed certificate): `ReloadingServerContext` reloads them without a restart.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from kubelend.core.errors import InvalidSettings
from kubelend.kits import files

if TYPE_CHECKING:
    from cryptography import x509

# Forward secrecy and authenticated encryption only; TLS 1.3, preferred anyway, has no others.
_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"

_SERVER_USAGES = {"1.3.6.1.5.5.7.3.1", "2.5.29.37.0"}
"""serverAuth and anyExtendedKeyUsage."""

_HINT_CERTIFICATE = "create one with `kubelend ca issue`, or use the right directory"


class ServerContext(ssl.SSLContext):
    """A server context that records the generation of trusted CAs when it was created."""

    generation = 0
    """Number of CA removals before this context; each connection has that of its handshake."""


def server_context(
    directory: Path, authorities: str = "", *, require_certificate: bool = True
) -> ServerContext:
    """Requires a client certificate signed by a CA in `ca.crt`.

    `authorities` (PEM) replace `ca.crt`. Without `require_certificate` no client certificate is requested.
    """
    context = ServerContext(ssl.PROTOCOL_TLS_SERVER)
    _load_identity(context, directory)
    if authorities:
        context.load_verify_locations(cadata=authorities)
    else:
        _load_authorities(context, directory / files.CA_CERTIFICATES)
    context.verify_mode = ssl.CERT_REQUIRED if require_certificate else ssl.CERT_NONE
    # A resumed session is not verified again, and could outlive its certificate: no tickets. (The
    # session IDs of TLS 1.2 cannot be disabled here; they end with the context.)
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION
    context.num_tickets = 0
    return context


def client_context(directory: Path) -> ssl.SSLContext:
    """Presents `tls.crt`, and verifies the certificate and host name of the server."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _load_identity(context, directory)
    _load_authorities(context, directory / files.CA_CERTIFICATES)
    context.hostname_checks_common_name = False
    return context


def enrolment_context(authorities: str = "") -> ssl.SSLContext:
    """Presents no certificate. Verifies the server with these CAs (PEM).

    Without any the server is not verified: only for public data that is verified by its content.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _set_protocol_options(context)
    if authorities:
        context.load_verify_locations(cadata=authorities)
        context.hostname_checks_common_name = False
    else:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def own_certificate(directory: Path) -> x509.Certificate:
    # Imported late: the library costs 11 MB, which most processes do not need.
    from cryptography import x509

    path = directory / files.TLS_CERTIFICATE
    try:
        return x509.load_pem_x509_certificate(files.read_file(path))
    except ValueError as error:
        raise InvalidSettings(f"{path}: not a certificate in PEM form") from error


def is_own_ca_trusted(directory: Path) -> bool:
    """Whether a CA in `ca.crt` has signed the directory's own certificate."""
    from cryptography import x509

    try:
        shown, trusted = (
            x509.load_pem_x509_certificates(files.read_file(directory / name))
            for name in (files.TLS_CERTIFICATE, files.CA_CERTIFICATES)
        )
    except ValueError as error:
        raise InvalidSettings(f"{directory}: no certificates in PEM form") from error
    return any(_is_signed_by(each, authority) for each in shown for authority in trusted)


def is_for_clients(certificate: x509.Certificate) -> bool:
    """Whether the extended key usage, if there is one, allows TLS clients."""
    from cryptography import x509

    try:
        usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return True
    return x509.oid.ExtendedKeyUsageOID.CLIENT_AUTH in usage


def key_mode_warning(directory: Path) -> str:
    """Returns a warning if other users can read the private key; empty if not.

    Not an error, because Kubernetes mounts Secrets with mode 0644 by default.
    """
    path = directory / files.TLS_KEY
    complaint = files.mode_problem(path)
    return complaint and f"{complaint}; chmod 600 {path}, or set defaultMode of the Secret volume"


class ReloadingServerContext:
    """A server context that reloads the files of its directory.

    Pass `context` to the server once, and call `refresh` periodically. New handshakes use the new certificate
    and CAs; open connections continue, and their `generation` shows whether a CA was removed since
    (`api.authentication` re-checks them). `report` is called once when changed files cannot be loaded.
    """

    def __init__(
        self,
        directory: Path,
        *,
        report: Callable[[InvalidSettings], None],
        authorities: Callable[[], str] = str,
        require_certificate: bool = True,
    ) -> None:
        """The other parameters are those of `server_context`."""
        self.generation = 0
        """Number of CA removals; certificates of older connections have to be re-checked."""
        self._authorities = authorities
        self._require_certificate = require_certificate
        self._contexts = FileReloader(directory, self._server_context, report)
        self._switch = _SwitchingContext(ssl.PROTOCOL_TLS_SERVER)
        self._switch.current = self._contexts.current

    @property
    def context(self) -> ssl.SSLContext:
        """The context to start the server with; it stays valid across reloads."""
        return self._switch

    def refresh(self, *, again: bool = False) -> bool:
        """Reloads changed files; True if it did. Three stat calls if nothing has changed.

        With `again` they are always reloaded, because `authorities` has changed.
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
        """The trusted CAs (DER)."""
        return self._contexts.current.get_ca_certs(binary_form=True)

    def _server_context(self, directory: Path) -> ServerContext:
        made = server_context(
            directory, self._authorities(), require_certificate=self._require_certificate
        )
        _check_server_certificate(directory)
        return made


class _SwitchingContext(ssl.SSLContext):
    """Delegates each handshake to the current context; has no certificate itself.

    Replacing the context in an SNI callback looks simpler, but sessions belong to the context that the server
    was started with: a client whose CA was removed could resume one without verification.
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
        """Used by asyncio and uvloop; blocking servers would call `wrap_socket`."""
        return self.current.wrap_bio(incoming, outgoing, server_side, server_hostname, session)


def _check_server_certificate(directory: Path) -> None:
    """Rejects a certificate that every client would: not for a server, or without a name in it."""
    from cryptography import x509

    extensions, path = own_certificate(directory).extensions, directory / files.TLS_CERTIFICATE
    usages = [one.value for one in extensions if isinstance(one.value, x509.ExtendedKeyUsage)]
    if usages and not _SERVER_USAGES & {usage.dotted_string for usage in usages[0]}:
        raise InvalidSettings(
            f"{path} is not a server's certificate: it has no extended key usage serverAuth",
            hint="create one with `kubelend ca issue --role broker`",
        )
    if not any(isinstance(one.value, x509.SubjectAlternativeName) for one in extensions):
        raise InvalidSettings(
            f"{path} has no subject alternative name, by which clients verify a server",
            hint="create one with `kubelend ca issue --role broker`",
        )


def _is_signed_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        certificate.verify_directly_issued_by(authority)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


def _load_identity(context: ssl.SSLContext, directory: Path) -> None:
    _set_protocol_options(context)
    _load_pair(context, directory / files.TLS_CERTIFICATE, directory / files.TLS_KEY)


def _set_protocol_options(context: ssl.SSLContext) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(_CIPHERS)
    context.set_alpn_protocols(["http/1.1"])
    # Every certificate in ca.crt is an anchor, an intermediate one too, as for the Go programs that
    # read the same files.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN


def _load_pair(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    for path in (certificate, key):
        files.read_file(path, hint=_HINT_CERTIFICATE)
    try:
        # With an empty password an encrypted key fails; with none OpenSSL asks on the terminal.
        context.load_cert_chain(certificate, key, password="")
    except (ssl.SSLError, OSError) as error:
        # The second when even their algorithms differ.
        if getattr(error, "reason", None) in ("KEY_VALUES_MISMATCH", "NO_CERTIFICATE_ASSIGNED"):
            raise InvalidSettings(
                f"{certificate} and {key} do not match",
                hint="use the pair that was issued together",
            ) from error
        raise InvalidSettings(
            f"{certificate} and {key} are not a certificate and unencrypted key in PEM form",
            hint=_HINT_CERTIFICATE,
        ) from error


def _load_authorities(context: ssl.SSLContext, path: Path) -> None:
    files.read_file(path, hint=_HINT_CERTIFICATE)
    try:
        context.load_verify_locations(path)
    except (ssl.SSLError, OSError) as error:
        raise InvalidSettings(
            f"{path}: not a complete certificate in PEM form", hint=_HINT_CERTIFICATE
        ) from error


Loaded = TypeVar("Loaded")
ReportError = Callable[[InvalidSettings], None]

_LOAD_ATTEMPTS = 50


class FileReloader(Generic[Loaded]):
    """Holds in `current` what `make` returned for the latest consistent files.

    Inconsistent files, such as a certificate whose key is still being written, leave it unchanged: `report`
    is called once with the error, and the next `refresh` tries again.
    """

    def __init__(
        self,
        directory: Path,
        make: Callable[[Path], Loaded],
        report: ReportError = lambda _: None,
        names: Sequence[str] = files.CREDENTIAL_FILES,
    ) -> None:
        self._paths = [directory / name for name in names]
        self._directory = directory
        self._make = make
        self._report = report
        self._reported = ""
        self._signature: _FileSignature = ()
        self.problem: InvalidSettings | None = None
        """Why the current files could not be loaded; None if they were."""
        self.current = self._load_first()

    def refresh(self, *, again: bool = False) -> bool:
        """Reloads changed files; True if it did. With `again`, also unchanged ones."""
        # Before the files are read: the next refresh detects a change in between.
        signature = _file_signature(self._paths)
        if signature == self._signature and not again:
            self.problem = None
            return False
        try:
            self.current = self._make(self._directory)
        except InvalidSettings as error:
            self.problem = error
            self._report_error_once(error)
            return False
        self._signature = signature
        self._reported = ""
        self.problem = None
        return True

    def _load_first(self) -> Loaded:
        """Loads the files; tries again if they changed while they were read."""
        for _ in range(_LOAD_ATTEMPTS):
            self._signature = _file_signature(self._paths)
            try:
                return self._make(self._directory)
            except InvalidSettings:
                if _file_signature(self._paths) == self._signature:
                    raise
        return self._make(self._directory)

    def _report_error_once(self, error: InvalidSettings) -> None:
        if self._reported != str(error):
            self._reported = str(error)
            self._report(error)


_FileSignature = tuple[tuple[int, ...] | None, ...]


def _file_signature(paths: Sequence[Path]) -> _FileSignature:
    return tuple(map(_file_stat, paths))


def _file_stat(path: Path) -> tuple[int, ...] | None:
    # Follows links, so it detects the switch of the ..data link of a mounted Secret; ctime detects chmod.
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
