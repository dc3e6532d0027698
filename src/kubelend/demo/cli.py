"""`kubelend dev demo`: the whole thing in one command, on nothing but this machine."""

from __future__ import annotations

from typing import Annotated

import typer


def command(
    stay: Annotated[
        bool, typer.Option("--stay", help="Keep it running until Ctrl-C, to try things.")
    ] = False,
) -> None:
    """See a broker, four clusters and a reservation's whole life.

    It uses free ports of this machine and a temporary directory, and leaves nothing behind.
    """
    from kubelend.apps import trials
    from kubelend.demo import story

    with (
        trials.trial() as trial,
        trial.broker("--shutdown-timeout=5s", "--lost-after=1s") as broker,
    ):
        story.tell(trial, broker, stay=stay)
