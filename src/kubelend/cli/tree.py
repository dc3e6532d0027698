"""All commands, as one tree. `main` runs it, `generate` documents it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

import kubelend
from kubelend.cli import (
    audit,
    broker,
    ca,
    clusters,
    completion,
    explanations,
    reservations,
    version,
)
from kubelend.cli.deferred import Deferred
from kubelend.cli.exits import Code


class State:
    """What flags before the command say; `main` reads it when a command has failed."""

    def __init__(self) -> None:
        self.debug = False


class Group(NamedTuple):
    """Commands under one name."""

    help: str
    commands: Mapping[str, Callable[..., None] | Group | Deferred]
    aliases: Mapping[str, str] = {}
    """Other names, which help does not show."""


_SINGULAR = {"cluster": "clusters", "reservation": "reservations", "rsv": "reservations"}
_PLURAL = {"clusters": "cluster", "reservations": "reservation", "rsv": "reservation"}

TREE = Group(
    "Kubernetes clusters lend each other spare capacity, through one broker.",
    {
        "borrow": reservations.borrow,
        "explain": explanations.explain,
        "get": Group(
            "Show clusters or reservations.",
            {"clusters": clusters.get, "reservations": reservations.get},
            _SINGULAR,
        ),
        "describe": Group(
            "Show all of one cluster or reservation.",
            {"cluster": clusters.describe, "reservation": reservations.describe},
            _PLURAL,
        ),
        "activate": reservations.activate,
        "renew": reservations.renew,
        "release": reservations.release,
        "cordon": clusters.cordon,
        "uncordon": clusters.uncordon,
        "drain": clusters.drain,
        "remove": clusters.remove,
        "broker": broker.broker,
        "ca": Group("Make certificates.", {"init": ca.init, "issue": ca.issue}),
        "audit": audit.audit,
        "demo": Deferred(
            "demo",
            "See a broker, three clusters and a reservation's whole life.",
            "kubelend.demo.cli:command",
        ),
        "bench": Deferred("bench", "Measure this machine.", "kubelend.bench.cli:app"),
        "completion": completion.completion,
        "version": version.version,
    },
)


def build() -> TyperGroup:
    """The whole tree, ready to be run."""
    return _group(TREE, _root)


def _root(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", hidden=True)] = False,
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version and end.")
    ] = False,
) -> None:
    state = context.ensure_object(State)
    state.debug = debug
    if show_version:
        print(kubelend.__version__)
        raise typer.Exit
    _help(context)


def _help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


def _group(group: Group, callback: Callable[..., None] = _help) -> TyperGroup:
    app = _app()
    epilog = _exit_codes() if callback is _root else None
    app.callback(invoke_without_command=True, help=group.help, epilog=epilog)(callback)
    built = get_command(app)
    assert isinstance(built, TyperGroup)  # noqa: S101 - a callback makes it one; for the type checker
    for name, command in group.commands.items():
        if not isinstance(command, Deferred) or command.exists:
            built.add_command(_command(name, command), name)
    for alias, name in group.aliases.items():
        hidden = _command(name, group.commands[name])
        hidden.hidden = True
        built.add_command(hidden, alias)
    return built


def _command(
    name: str, command: Callable[..., None] | Group | Deferred
) -> TyperGroup | TyperCommand:
    if isinstance(command, Deferred):
        return command
    if isinstance(command, Group):
        return _group(command)
    app = _app()
    app.command(name)(command)
    built = get_command(app)
    assert isinstance(built, TyperCommand)  # noqa: S101 - as above
    return built


def _exit_codes() -> str:
    known = (f"{int(code)} {code.name.replace('_', ' ').lower()}" for code in Code)
    return f"Exit codes: {', '.join(known)}."


def _app() -> typer.Typer:
    # Plain help: it is read in logs and pipes as well, and rich would make it slow.
    return typer.Typer(add_completion=False, rich_markup_mode=None)
