"""Current credentials and TLS contexts of a client.

Files are checked for changes before each request, which costs one stat per file. If a file is incomplete or
missing for a moment, the last valid credentials stay in use.
"""

from __future__ import annotations

import contextlib
import os
import ssl
from typing import NamedTuple

from kubelend.core.errors import InvalidSettings
from kubelend.kube import config as accesses
from kubelend.kube import exec_plugins
from kubelend.kube.config import KubeConfig
from kubelend.kube.exec_plugins import ClientCredentials


class RequestCredentials(NamedTuple):
    """Credentials of one request."""

    headers: tuple[tuple[str, str], ...]
    context: ssl.SSLContext | None
    credentials: ClientCredentials
    config: KubeConfig

    def __repr__(self) -> str:
        return f"RequestCredentials({self.config!r})"


class CredentialSource:
    """Loads and caches the credentials of one client."""

    def __init__(self, config: KubeConfig) -> None:
        self._config = config
        self._runner = exec_plugins.PluginRunner(config.plugin) if config.plugin else None
        self._fingerprint: accesses.FileFingerprint | None = None
        self._has_read = False
        self._files = (b"", ClientCredentials())
        self._context: tuple[tuple[bytes, ...], ssl.SSLContext] | None = None

    async def current(self) -> RequestCredentials:
        """Return the current credentials. `InvalidSettings` if there have never been valid ones."""
        self._reload_if_changed()
        authorities, obtained = self._files
        given = obtained
        if self._runner is not None:
            obtained = await self._runner.credentials()
            given = _with_file_certificate(obtained, given)
        headers = self._config.impersonation
        if given.token:
            headers = (("Authorization", f"Bearer {given.token}"), *headers)
        return RequestCredentials(headers, self._tls(authorities, given), obtained, self._config)

    def invalidate(self, rejected: RequestCredentials) -> None:
        """Drop credentials that an API server rejected, and read the files again even if they look
        unchanged.
        """
        self._fingerprint = None
        if self._runner is not None:
            self._runner.invalidate(rejected.credentials)

    def _reload_if_changed(self) -> None:
        # Before the files are read, so that a change in between is detected by the next check.
        signature = accesses.fingerprint_files(accesses.config_files(self._config))
        if signature == self._fingerprint:
            return
        with contextlib.suppress(InvalidSettings) if self._has_read else contextlib.nullcontext():
            self._reload_kubeconfig()
            self._files = _read_secret_files(self._config)
            self._fingerprint = signature
            self._has_read = True

    def _reload_kubeconfig(self) -> None:
        """Reload the kubeconfig, which may contain inline secrets. The context stays, even if
        current-context has changed.
        """
        origin = self._config.origin
        if origin is None or not self._has_read:
            return
        found = accesses.config_from_kubeconfig(origin.path, origin.context)
        if found.plugin != self._config.plugin:
            self._runner = exec_plugins.PluginRunner(found.plugin) if found.plugin else None
        self._config = found

    def _tls(self, authorities: bytes, given: ClientCredentials) -> ssl.SSLContext | None:
        """Return the same context for the same bytes, because connections are pooled by context."""
        if self._config.server.startswith("http:"):
            return None
        parts = (authorities, given.certificate, given.key)
        if self._context is not None and self._context[0] == parts:
            return self._context[1]
        try:
            made = client_tls_context(*parts, insecure=self._config.insecure)
        except InvalidSettings:
            # Probably the key of a new certificate is still being written.
            if self._context is None:
                raise
            self._fingerprint = None
            return self._context[1]
        self._context = (parts, made)
        return made


def _with_file_certificate(
    from_plugin: ClientCredentials, from_files: ClientCredentials
) -> ClientCredentials:
    """Complete a plugin's token with the client certificate of the kubeconfig."""
    if from_plugin.certificate or not from_files.certificate:
        return from_plugin
    return from_plugin._replace(certificate=from_files.certificate, key=from_files.key)


def _read_secret_files(config: KubeConfig) -> tuple[bytes, ClientCredentials]:
    token = config.token.read().decode("utf-8", "replace").strip()
    if not token.isascii() or not (token.isprintable() or not token):
        raise InvalidSettings(
            f"invalid token for {config.server}", hint="use a token of one line of printable ASCII"
        )
    given = ClientCredentials(token, config.certificate.read(), config.key.read())
    return config.authorities.read(), given


def client_tls_context(
    authorities: bytes, certificate: bytes, key: bytes, *, insecure: bool = False
) -> ssl.SSLContext:
    """Return a client context that trusts these authorities (default: the system's) and presents the
    certificate, if any.
    """
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    made.set_alpn_protocols(["http/1.1"])
    # Every given certificate is a trust anchor, also an intermediate one, as in Go.
    made.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    if insecure:
        made.check_hostname = False
        made.verify_mode = ssl.CERT_NONE
    elif authorities:
        _trust_authorities(made, authorities)
    else:
        made.load_default_certs()
    if certificate or key:
        _load_client_certificate(made, certificate, key)
    return made


def _trust_authorities(made: ssl.SSLContext, authorities: bytes) -> None:
    try:
        made.load_verify_locations(cadata=authorities.decode("ascii"))
    except (ssl.SSLError, UnicodeDecodeError) as error:
        raise InvalidSettings(
            "certificate authority is not a certificate in PEM form",
            hint="check certificate-authority(-data) of the kubeconfig",
        ) from error


def _load_client_certificate(made: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    # The ssl module only reads files, so this uses an anonymous one in memory.
    descriptor = os.memfd_create("client-certificate")
    try:
        os.write(descriptor, certificate.rstrip() + b"\n" + key)
        # With an empty password an encrypted key fails; without one OpenSSL would prompt on the terminal.
        made.load_cert_chain(f"/proc/self/fd/{descriptor}", password="")
    except (ssl.SSLError, OSError) as error:
        raise InvalidSettings(
            "client certificate and key do not match, are not in PEM form, or the key is encrypted",
            hint="check client-certificate(-data) and client-key(-data) of the kubeconfig",
        ) from error
    finally:
        os.close(descriptor)
