"""From the command line to an agent: what needs large libraries is done here, before the process is small.

The agent has to fit into 40 MB beside the pods of its cluster. Reading flags takes ten of them and reading
a certificate eleven, so `kubelend agent` does both, and then lets an interpreter take its place that loads
neither: `python -m kubelend.apps.agent_process`, with the settings in its environment.
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

VARIABLE = "KUBELEND_AGENT_SETTINGS"


class Launch(msgspec.Struct, frozen=True):
    """What the lean process is told."""

    settings: AgentSettings
    renew_at: datetime | None = None
    """When the certificate is to be renewed, as it was when the agent was started."""


def launch(settings: AgentSettings) -> NoReturn:
    """Become the agent: the process ID and what is open stay the same."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, command(), environment(prepared(settings)))  # noqa: S606 - it is this program again


def prepared(settings: AgentSettings) -> Launch:
    """The settings with the name that the certificate says, if there is one."""
    if settings.broker_transport != "http":
        return Launch(settings)
    from kubelend.pki import holdings

    found = holdings.inspect(Path(settings.broker_cert_path))
    if found.role != Role.CLUSTER:
        raise InvalidSettings(
            f"--broker-cert-path: {found.name} is no cluster, its role is {found.role}",
            hint="use a cluster's certificate",
        )
    if settings.cluster_id not in {"", found.name}:
        raise InvalidSettings(
            f"--cluster-id: {settings.cluster_id} has a certificate in the name of {found.name}",
            hint="leave the flag out, or use the certificate of that cluster",
        )
    return Launch(replace(settings, cluster_id=found.name), found.renew_at)


def command() -> list[str]:
    """Without the marks below the lines of a traceback, which take half a megabyte."""
    return [sys.executable, "-P", "-X", "no_debug_ranges", "-m", "kubelend.apps.agent_process"]


def environment(launched: Launch) -> dict[str, str]:
    """What the agent is started with. Its flags' own variables have been read."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith(flags.PREFIX)}
    return kept | {VARIABLE: msgspec.json.encode(launched).decode()}


def read(environment: Mapping[str, str]) -> Launch:
    """What `environment` wrote."""
    text = environment.get(VARIABLE)
    if text is None:
        raise InvalidSettings(f"{VARIABLE} is not set", hint="start it as `kubelend agent`")
    return msgspec.json.decode(text, type=Launch)
