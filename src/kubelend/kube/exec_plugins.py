"""Exec credential plugins of kubeconfigs (`client.authentication.k8s.io`, v1 and v1beta1).

Credentials are cached until they expire or an API server rejects them. Plugins run non-interactively.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

import msgspec

from kubelend.core.errors import InvalidSettings, Unavailable
from kubelend.kits import clock, subprocesses

GROUP: Final = "client.authentication.k8s.io"
VERSIONS: Final = (f"{GROUP}/v1", f"{GROUP}/v1beta1")
PLUGIN_TIMEOUT: Final = timedelta(seconds=60)
"""Timeout of a plugin run. A login takes a few seconds; one that waits for a person never ends."""


class ExecPlugin(msgspec.Struct, frozen=True):
    """Configuration of a plugin. Arguments and variables may be secrets."""

    command: str
    api_version: str
    arguments: tuple[str, ...] = ()
    variables: dict[str, str] = {}
    cluster: dict[str, Any] | None = None
    """Cluster information, if the plugin asks for it."""
    hint: str = ""
    """The kubeconfig's installHint."""

    def __repr__(self) -> str:
        return f"Plugin({self.command!r})"


class ClientCredentials(NamedTuple):
    """Credentials: a token, a certificate with its key in PEM form, or both, or none."""

    token: str = ""
    certificate: bytes = b""
    key: bytes = b""
    expires_at: datetime | None = None

    def __repr__(self) -> str:
        return f"ClientCredentials(expires_at={self.expires_at})"


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
            if self._cached is None or self._is_expired(self._cached):
                self._cached = None
                self._cached = await run_plugin(self._plugin, self._timeout)
            return self._cached

    def invalidate(self, rejected: ClientCredentials) -> None:
        """Drop rejected credentials. Of several concurrent requests only the first causes a new run."""
        if self._cached is rejected:
            self._cached = None

    def _is_expired(self, cached: ClientCredentials) -> bool:
        return cached.expires_at is not None and cached.expires_at <= self._now()


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
    return ClientCredentials(
        status.token,
        status.client_certificate_data.encode(),
        status.client_key_data.encode(),
        _check_timezone(status.expiration_timestamp, plugin),
    )


def _check_timezone(instant: datetime | None, plugin: ExecPlugin) -> datetime | None:
    if instant is not None and instant.tzinfo is None:
        raise Unavailable(f"{plugin.command} returned an expirationTimestamp without a time zone")
    return instant
