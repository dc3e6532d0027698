"""Launches the agent in a small process of its own, and renews its certificate in child processes.

`cryptography` would cost the agent 11 MB of memory for one renewal a year. So the agent runs
`kubelend certificate show` to find out when renewal is due, and `kubelend certificate renew` to renew.
Open connections reload the files themselves (`transports.tls.FileReloader`).
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import NoReturn

import msgspec
from msgspec.structs import replace

from kubelend.agent.health import ComponentHealth
from kubelend.apps import flags
from kubelend.apps.agent_settings import AgentSettings
from kubelend.core.errors import InvalidSettings, KubelendError, UnexpectedResponse
from kubelend.core.lifecycle import Role
from kubelend.kits import files, subprocesses
from kubelend.kits.backoff import Backoff

CERTIFICATE_CHECK_INTERVAL = timedelta(hours=1)
"""Upper bound of the interval: other programs may replace the files, and clocks are adjusted."""

RENEWAL_BACKOFF = Backoff(
    retries=sys.maxsize, first=timedelta(seconds=10), longest=timedelta(minutes=30)
)
COMMAND_TIMEOUT = timedelta(minutes=2)
CERTIFICATE_COMPONENT = "certificate"

_MIN_PAUSE = timedelta(seconds=1)


class _CertificateStatus(msgspec.Struct, rename="camel"):
    renew_at: datetime


class AgentCertificateRenewer:
    """Renews the certificate in one directory; `run` is a root task."""

    def __init__(
        self,
        directory: Path,
        url: str,
        health: ComponentHealth,
        clock: Callable[[], datetime],
        renew_at: datetime | None = None,
    ) -> None:
        """`renew_at` is when the current certificate is due for renewal, if known."""
        self._path = directory / files.TLS_CERTIFICATE
        self._loaded_at = _modified_at(self._path)
        self._renew_at = renew_at
        self._url = url
        self._health = health
        self._clock = clock
        self._delays = RENEWAL_BACKOFF.delays()

    async def run(self) -> None:
        while True:
            try:
                pause = await self._renew_if_due()
            except KubelendError as error:
                self._health.report(CERTIFICATE_COMPONENT, str(error))
                pause = timedelta(seconds=next(self._delays))
            else:
                self._health.report(CERTIFICATE_COMPONENT)
                self._delays = RENEWAL_BACKOFF.delays()
            await asyncio.sleep(pause.total_seconds())

    async def _renew_if_due(self) -> timedelta:
        """Renews the certificate if due; returns the time until the next check."""
        changed_at = _modified_at(self._path)
        if self._renew_at is None or changed_at != self._loaded_at:
            self._renew_at, self._loaded_at = await self._read_renewal_time(), changed_at
        if self._renew_at <= self._clock():
            await self._run_command("renew", "--broker-url", self._url)
            self._renew_at = await self._read_renewal_time()
            self._loaded_at = _modified_at(self._path)
        return min(max(self._renew_at - self._clock(), _MIN_PAUSE), CERTIFICATE_CHECK_INTERVAL)

    async def _read_renewal_time(self) -> datetime:
        shown = await self._run_command("show", "--output", "json")
        try:
            return msgspec.json.decode(shown, type=_CertificateStatus).renew_at
        except msgspec.MsgspecError as error:
            raise UnexpectedResponse(f"`kubelend certificate show`: {error}") from error

    async def _run_command(self, verb: str, *flags: str) -> bytes:
        """Runs `kubelend certificate`; returns its output."""
        arguments = ("-m", "kubelend", "certificate", verb, "--cert-path", str(self._path.parent))
        return await subprocesses.run_program(
            sys.executable,
            *(*arguments, *flags),
            name=f"`kubelend certificate {verb}`",
            timeout=COMMAND_TIMEOUT,
        )


def _modified_at(path: Path) -> int:
    """Returns 0 if the file does not exist."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


SETTINGS_VARIABLE = "KUBELEND_AGENT_SETTINGS"


class AgentLaunch(msgspec.Struct, frozen=True):
    """The input of the agent process."""

    settings: AgentSettings
    renew_at: datetime | None = None
    """When the certificate is due for renewal, as of the start of the agent."""


def launch_agent(settings: AgentSettings) -> NoReturn:
    """Replaces this process by the agent; the process ID and open files stay the same."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, agent_command(), launch_environment(prepare_launch(settings)))  # noqa: S606 - our own interpreter


def prepare_launch(settings: AgentSettings) -> AgentLaunch:
    """Returns the settings with the cluster ID from the certificate; raises if the two contradict."""
    if settings.transport != "http":
        return AgentLaunch(settings)
    from kubelend.pki import authority

    try:
        found = authority.inspect_certificate(Path(settings.broker_cert_path))
    except InvalidSettings:
        if settings.cleanup:  # an agent that has never got one has to be uninstalled too
            return AgentLaunch(settings)
        raise
    if found.role != Role.CLUSTER:
        raise InvalidSettings(
            f"--broker-cert-path: the certificate of {found.name} has role {found.role}, not cluster",
            hint="use a certificate with role cluster",
        )
    if settings.cluster_id not in {"", found.name}:
        raise InvalidSettings(
            f"--cluster-id: {settings.cluster_id} differs from the certificate's name {found.name}",
            hint="omit the flag, or use the certificate of that cluster",
        )
    return AgentLaunch(replace(settings, cluster_id=found.name), found.renew_at)


def agent_command() -> list[str]:
    """Disables column positions in tracebacks, which take half a megabyte."""
    return [sys.executable, "-P", "-X", "no_debug_ranges", "-m", "kubelend.apps.agent_process"]


def launch_environment(launched: AgentLaunch) -> dict[str, str]:
    """Returns the environment of the agent process. The variables of single flags have been consumed."""
    inherited = {
        name: text
        for name, text in os.environ.items()
        if not name.startswith(flags.VARIABLE_PREFIX)
    }
    return inherited | {SETTINGS_VARIABLE: msgspec.json.encode(launched).decode()}


def read_launch(environment: Mapping[str, str]) -> AgentLaunch:
    """Decodes the variables of `launch_environment`."""
    text = environment.get(SETTINGS_VARIABLE)
    if text is None:
        raise InvalidSettings(
            f"{SETTINGS_VARIABLE} is not set", hint="start the agent with `kubelend agent`"
        )
    return msgspec.json.decode(text, type=AgentLaunch)
