"""`kubelend lab`: a broker's cluster and two agents' clusters on this machine, in the background."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kubelend.cli import lab_views, output
from kubelend.cli.exits import Code
from kubelend.core import durations
from kubelend.core.errors import NotFound

if TYPE_CHECKING:
    from kubelend.demo.telling import Teller
    from kubelend.lab.health import Health
    from kubelend.lab.messages import Message
    from kubelend.lab.records import Home, Record

Directory = Annotated[
    Path | None,
    typer.Option(
        help="Where they are kept; ~/.local/state/kubelend/clusters if not given.",
        metavar="DIR",
        envvar="KUBELEND_LAB_DIRECTORY",
    ),
]


def up(
    *,
    kind: Annotated[bool, typer.Option("--kind", help="Let Kind make the clusters.")] = False,
    directory: Directory = None,
) -> None:
    """Start three clusters, a broker and two agents.

    They stay in the background until `kubelend lab down`. The clusters are real API servers without
    kubelets (`make kube-assets` gets the programs), with nodes and pods in them as if there were.
    """
    from kubelend.lab import starting

    home = _home(directory)
    with _teller() as teller:
        started = starting.start(home, _hear(teller), uses_kind=kind)
        if started is None:
            print("They run already, or are about to.", lab_views.NEXT, sep="\n")
            return
        teller.advice("All runs. To try:", lab_views.commands(home, started))


def walk(
    *,
    timeout: Annotated[
        str, typer.Option(help="How long a step may take.", metavar="DURATION")
    ] = "20s",
    directory: Directory = None,
) -> None:
    """Borrow 500m and 256Mi, give it back, and show each step.

    Exit code 0 means that every step was seen on the three API servers.
    """
    import asyncio

    from kubelend.lab import walk as walking

    patience = durations.parse(timeout)
    asyncio.run(walking.walk(_running(_home(directory)), _step, patience))
    print("Every step was seen on the API servers.")


def status(*, directory: Directory = None) -> None:
    """Show what runs, and whether all is well.

    Exit code 0 means that all is well, 3 that nothing was started, 7 that something is wrong.
    """
    import asyncio

    from kubelend.lab import health

    home = _home(directory)
    record = home.find()
    if record is None:
        raise NotFound("no clusters were started", hint="`kubelend lab up` starts them")
    found = asyncio.run(health.look(home, record))
    print(lab_views.health(found), f"Logs and kubeconfigs are in {home.directory}", sep="\n\n")
    _judge(found)


def down(*, directory: Directory = None) -> None:
    """End all that `up` has started. It works after a crash, too."""
    from kubelend.lab import ending

    home = _home(directory)
    was_there = ending.stop(home)
    print(f"All is ended, and {home.directory} is gone." if was_there else "Nothing was there.")


def _home(directory: Path | None) -> Home:
    from kubelend.lab import records

    return records.Home(directory or records.usual())


def _running(home: Home) -> Record:
    record = home.find()
    if record is None or not record.is_ready or not home.is_locked():
        raise NotFound("no clusters run", hint="`kubelend lab up` starts them")
    return record


@contextmanager
def _teller() -> Iterator[Teller]:
    from kubelend.demo import screen

    with screen.teller() as teller:
        yield teller


def _hear(teller: Teller) -> Callable[[Message], None]:
    from kubelend.lab.messages import Begun, Done

    number = 0

    def hear(message: Message) -> None:
        nonlocal number
        if isinstance(message, Begun):
            number += 1
            teller.begin(number, message.title)
        elif isinstance(message, Done):
            teller.step(number, message.title, message.seconds, message.lines)

    return hear


def _step(title: str, seconds: float) -> None:
    from kubelend.demo import telling

    print(telling.timed(title, seconds), flush=True)


def _judge(found: Health) -> None:
    if not found.problems:
        output.note("All is well.")
        return
    for problem in found.problems:
        output.note(f"problem: {problem}")
    raise typer.Exit(Code.UNAVAILABLE)
