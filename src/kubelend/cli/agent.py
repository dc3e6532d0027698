"""`kubelend agent`: start one."""

from __future__ import annotations

from kubelend.apps.agent_settings import AgentSettings
from kubelend.cli import options


@options.takes(settings=options.agent)
def agent(settings: AgentSettings) -> None:
    """Run the agent of a cluster until it is told to stop (SIGTERM or Ctrl-C).

    It needs a certificate: `kubelend join`, with the line that `kubelend token create` prints.
    """
    from kubelend.apps import launching

    launching.launch(settings)
