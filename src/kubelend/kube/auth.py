"""Current credentials and TLS contexts of a client, also from exec plugins of a kubeconfig.

Files are checked for changes before each request, which costs one stat per file. If a file is incomplete or
missing for a moment, the last valid credentials stay in use. Exec credential plugins
(`client.authentication.k8s.io`, v1 and v1beta1) run non-interactively; their credentials are cached until
they expire or an API server rejects them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Final, NamedTuple

import msgspec

from kubelend.core.errors import InvalidSettings, Unavailable
from kubelend.kits import clock, subprocesses
from kubelend.kube import config as accesses
from kubelend.kube.config import ExecPlugin, KubeConfig

PLUGIN_TIMEOUT: Final = timedelta(seconds=60)
"""Timeout of a plugin run. A login takes a few seconds; one that waits for a person never ends."""


class ClientCredentials(NamedTuple):
    """Credentials: a token, a certificate with its key in PEM form, or both, or none."""

    token: str = ""
    certificate: bytes = b""
    key: bytes = b""
    expires_at: datetime | None = None

    def __repr__(self) -> str:
        return f"ClientCredentials(expires_at={self.expires_at})"


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
        self._runner = PluginRunner(config.plugin) if config.plugin else None
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
            if obtained.certificate or not given.certificate:
                given = obtained
            else:  # the plugin returns a token, and the kubeconfig has the certificate
                given = given._replace(token=obtained.token)
        headers = self._config.impersonation
        if given.token:
            headers = (("Authorization", f"Bearer {given.token}"), *headers)
        return RequestCredentials(headers, self._tls(authorities, given), obtained, self._config)

    def invalidate(self, rejected: RequestCredentials) -> None:
        """Drop rejected credentials, and read the files again even if they look unchanged."""
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
        """It may contain inline secrets. The context stays, even if current-context has changed."""
        origin = self._config.origin
        if origin is None or not self._has_read:
            return
        found = accesses.config_from_kubeconfig(origin.path, origin.context)
        if found.plugin != self._config.plugin:
            self._runner = PluginRunner(found.plugin) if found.plugin else None
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
    """A client context that trusts these authorities, or the system's, and presents the certificate."""
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


class PluginRunner:
    """Runs one plugin when its cached credentials have expired, one run at a time."""

    def __init__(
        self,
        plugin: ExecPlugin,
        *,
        now: Callable[[], datetime] = clock.utc_now,
        timeout: timedelta = PLUGIN_TIMEOUT,
    ) -> None:
        self._plugin = plugin
        self._now = now
        self._timeout = timeout
        self._cached: ClientCredentials | None = None
        self._lock = asyncio.Lock()

    async def credentials(self) -> ClientCredentials:
        async with self._lock:
            expires_at = self._cached and self._cached.expires_at
            if self._cached is None or (expires_at is not None and expires_at <= self._now()):
                self._cached = None
                self._cached = await run_plugin(self._plugin, self._timeout)
            return self._cached

    def invalidate(self, rejected: ClientCredentials) -> None:
        """Drop rejected credentials. Of several concurrent requests only the first causes a new run."""
        if self._cached is rejected:
            self._cached = None


async def run_plugin(plugin: ExecPlugin, timeout: timedelta = PLUGIN_TIMEOUT) -> ClientCredentials:
    """Run the plugin. `InvalidSettings` if it can never work, `Unavailable` if a retry may succeed."""
    spec = {"interactive": False} | ({"cluster": plugin.cluster} if plugin.cluster else {})
    info = {"apiVersion": plugin.api_version, "kind": "ExecCredential", "spec": spec}
    output = await subprocesses.run_program(
        plugin.command,
        *plugin.arguments,
        timeout=timeout,
        environment={
            **os.environ,
            **plugin.variables,
            "KUBERNETES_EXEC_INFO": msgspec.json.encode(info).decode(),
        },
        timeout_hint="log in manually once, in case it waits for input",
        missing_hint=plugin.hint or "install it, or correct the kubeconfig's exec command",
    )
    return _parse_credential(plugin, output)


class _Status(msgspec.Struct, rename="camel"):
    token: str = ""
    client_certificate_data: str = ""
    client_key_data: str = ""
    expiration_timestamp: datetime | None = None


class _ExecCredential(msgspec.Struct, rename="camel"):
    api_version: str
    kind: str
    status: _Status | None = None


def _parse_credential(plugin: ExecPlugin, output: bytes) -> ClientCredentials:
    try:
        found = msgspec.json.decode(output, type=_ExecCredential)
    except msgspec.MsgspecError as error:
        raise Unavailable(f"{plugin.command} returned no valid ExecCredential: {error}") from None
    if (found.kind, found.api_version) != ("ExecCredential", plugin.api_version):
        raise InvalidSettings(
            f"{plugin.command} returned apiVersion {found.api_version}, not {plugin.api_version}",
            hint="set the returned apiVersion in the kubeconfig's exec section",
        )
    status = found.status or _Status()
    if bool(status.client_certificate_data) != bool(status.client_key_data):
        raise Unavailable(
            f"{plugin.command} returned a certificate without a key, or a key without a certificate"
        )
    if not status.token and not status.client_key_data:
        raise Unavailable(f"{plugin.command} returned neither a token nor a certificate")
    expires_at = status.expiration_timestamp
    if expires_at is not None and expires_at.tzinfo is None:
        raise Unavailable(f"{plugin.command} returned an expirationTimestamp without a time zone")
    return ClientCredentials(
        status.token,
        status.client_certificate_data.encode(),
        status.client_key_data.encode(),
        expires_at,
    )
