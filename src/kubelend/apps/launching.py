"""From the command line to an agent: what needs large libraries is done here, before the process is small.

The agent has to fit into 40 MB beside the pods of its cluster. Reading flags takes ten of them and reading
a certificate eleven, so `kubelend agent` does both, and then lets an interpreter take its place that loads
neither: `python -m kubelend.apps.agent_process`, with the settings in its environment.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import msgspec
from msgspec.structs import replace

from kubelend.apps import flags
from kubelend.apps.agent_settings import AgentSettings
from kubelend.core.errors import InvalidSettings
from kubelend.core.roles import Role

VARIABLE = "KUBELEND_AGENT_SETTINGS"


def launch(settings: AgentSettings) -> NoReturn:
    """Become the agent: the process ID and what is open stay the same."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, command(), environment(prepared(settings)))  # noqa: S606 - it is this program again


def prepared(settings: AgentSettings) -> AgentSettings:
    """The settings with the name that the certificate says, if there is one."""
    if not settings.broker_transport:
        return settings
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
    return replace(settings, cluster_id=found.name)


def command() -> list[str]:
    """Without the marks below the lines of a traceback, which take half a megabyte."""
    return [sys.executable, "-P", "-X", "no_debug_ranges", "-m", "kubelend.apps.agent_process"]


def environment(settings: AgentSettings) -> dict[str, str]:
    """What the agent is started with. Its flags' own variables have been read."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith(flags.PREFIX)}
    return kept | {VARIABLE: msgspec.json.encode(settings).decode()}


def read(environment: Mapping[str, str]) -> AgentSettings:
    """What `environment` wrote."""
    text = environment.get(VARIABLE)
    if text is None:
        raise InvalidSettings(f"{VARIABLE} is not set", hint="start it as `kubelend agent`")
    return msgspec.json.decode(text, type=AgentSettings)
