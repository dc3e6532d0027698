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
from kubelend.kits import clock, commands

GROUP: Final = "client.authentication.k8s.io"
VERSIONS: Final = (f"{GROUP}/v1", f"{GROUP}/v1beta1")
WITHIN: Final = timedelta(seconds=60)
"""Timeout of a plugin run. A login takes a few seconds; one that waits for a person never ends."""


class Plugin(msgspec.Struct, frozen=True):
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


class Given(NamedTuple):
    """Credentials: a token, a certificate with its key in PEM form, or both, or none."""

    token: str = ""
    certificate: bytes = b""
    key: bytes = b""
    expires_at: datetime | None = None

    def __repr__(self) -> str:
        return f"ClientCredentials(expires_at={self.expires_at})"


class Runner:
    """Runs one plugin when its cached credentials have expired, one run at a time."""

    def __init__(
        self,
        plugin: Plugin,
        *,
        now: Callable[[], datetime] = clock.utc_now,
        within: timedelta = WITHIN,
    ) -> None:
        self._plugin = plugin
        self._now = now
        self._within = within
        self._kept: Given | None = None
        self._turn = asyncio.Lock()

    async def given(self) -> Given:
        async with self._turn:
            if self._kept is None or self._is_over(self._kept):
                self._kept = None
                self._kept = await run(self._plugin, self._within)
            return self._kept

    def refuse(self, given: Given) -> None:
        """Drop rejected credentials. Of several concurrent requests only the first causes a new run."""
        if self._kept is given:
            self._kept = None

    def _is_over(self, kept: Given) -> bool:
        return kept.expires_at is not None and kept.expires_at <= self._now()


async def run(plugin: Plugin, within: timedelta = WITHIN) -> Given:
    """Run the plugin. `InvalidSettings` if it can never work, `Unavailable` if a retry may succeed."""
    spec = {"interactive": False} | ({"cluster": plugin.cluster} if plugin.cluster else {})
    info = {"apiVersion": plugin.api_version, "kind": "ExecCredential", "spec": spec}
    output = await commands.run(
        plugin.command,
        *plugin.arguments,
        within=within,
        environment={
            **os.environ,
            **plugin.variables,
            "KUBERNETES_EXEC_INFO": msgspec.json.encode(info).decode(),
        },
        late="log in manually once, in case it waits for input",
        missing=plugin.hint or "install it, or correct the kubeconfig's exec command",
    )
    return _read(plugin, output)


class _Status(msgspec.Struct, rename="camel"):
    token: str = ""
    client_certificate_data: str = ""
    client_key_data: str = ""
    expiration_timestamp: datetime | None = None


class _ExecCredential(msgspec.Struct, rename="camel"):
    api_version: str
    kind: str
    status: _Status | None = None


def _read(plugin: Plugin, said: bytes) -> Given:
    try:
        found = msgspec.json.decode(said, type=_ExecCredential)
    except msgspec.MsgspecError as problem:
        raise Unavailable(f"{plugin.command} returned no valid ExecCredential: {problem}") from None
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
    return Given(
        status.token,
        status.client_certificate_data.encode(),
        status.client_key_data.encode(),
        _aware(status.expiration_timestamp, plugin),
    )


def _aware(instant: datetime | None, plugin: Plugin) -> datetime | None:
    if instant is not None and instant.tzinfo is None:
        raise Unavailable(f"{plugin.command} returned an expirationTimestamp without a time zone")
    return instant
