"""Launches the agent process from the command line, and renews its certificate in child processes.

The agent has a memory budget of 40 MB. Parsing flags costs 10 MB and reading a certificate 11 MB, so
`kubelend agent` does both and then executes a new interpreter that loads neither library:
`python -m kubelend.apps.agent_process`, with the settings in its environment.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import NoReturn

import msgspec
from msgspec.structs import replace

from kubelend.apps import flags
from kubelend.apps.agent_settings import AgentSettings
from kubelend.core.errors import InvalidSettings
from kubelend.core.roles import Role

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
    if settings.broker_transport != "http":
        return AgentLaunch(settings)
    from kubelend.pki import holdings

    found = holdings.inspect_certificate(Path(settings.broker_cert_path))
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
    kept = {
        name: text
        for name, text in os.environ.items()
        if not name.startswith(flags.VARIABLE_PREFIX)
    }
    return kept | {SETTINGS_VARIABLE: msgspec.json.encode(launched).decode()}


def read_launch(environment: Mapping[str, str]) -> AgentLaunch:
    """Reads what `environment` has encoded."""
    text = environment.get(SETTINGS_VARIABLE)
    if text is None:
        raise InvalidSettings(
            f"{SETTINGS_VARIABLE} is not set", hint="start the agent with `kubelend agent`"
        )
    return msgspec.json.decode(text, type=AgentLaunch)
