"""The command `kubelend dev demo`."""

from __future__ import annotations

from typing import Annotated

import typer


def command(
    stay: Annotated[
        bool, typer.Option("--stay", help="Keep everything running until Ctrl-C.")
    ] = False,
) -> None:
    """Run a broker and four simulated clusters through the lifecycle of a reservation.

    Uses free ports and a temporary directory, which is removed at the end.
    """
    from kubelend.apps import trials
    from kubelend.demo import story

    with (
        trials.temporary_deployment() as trial,
        trial.broker("--shutdown-timeout=5s", "--lost-after=1s") as broker,
    ):
        story.run_demo(trial, broker, stay=stay)
