"""All commands, as one tree. `main` runs it, `generate` documents it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

import kubelend
from kubelend.cli import (
    advertising,
    agent,
    audit,
    broker,
    ca,
    certificates,
    clusters,
    completion,
    explanations,
    grants,
    joining,
    journal,
    lab,
    mailboxes,
    members,
    policies,
    quotas,
    reservations,
    tokens,
    version,
)
from kubelend.cli.deferred import Deferred
from kubelend.cli.exits import Code

_CONTEXTS = (
    "`kubectl lend` borrows, gets, describes and releases in the cluster of kubectl's context, with your"
    " rights there (--context, --kubeconfig, -n). `kubelend` does with --context. All else asks the broker."
)


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
    itself: Callable[..., None] | None = None
    """What the name does when no command follows; its flags stand before the command."""


_SINGULAR = {
    "cluster": "clusters",
    "reservation": "reservations",
    "rsv": "reservations",
    "member": "members",
}
_PLURAL = {"clusters": "cluster", "reservations": "reservation", "rsv": "reservation"}

TREE = Group(
    "Kubernetes clusters lend each other spare capacity, through one broker.",
    {
        "borrow": reservations.borrow,
        "explain": explanations.explain,
        "get": Group(
            "Show clusters, reservations or members.",
            {
                "clusters": clusters.get,
                "reservations": reservations.get,
                "members": members.get,
            },
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
        "policy": Group(
            "Say to whom clusters lend, how much and when.",
            {"show": policies.show, "set": policies.put, "clear": policies.clear},
        ),
        "quota": Group(
            "Say what clusters may hold, wait for and spend.",
            {
                "show": quotas.show,
                "list": quotas.listing,
                "set": quotas.put,
                "clear": quotas.clear,
            },
        ),
        "advertise": advertising.advertise,
        "token": Group(
            "Let newcomers in.",
            {"create": tokens.create, "list": tokens.listing, "delete": tokens.delete},
        ),
        "join": joining.join,
        "accept": members.accept,
        "reject": members.reject,
        "revoke": members.revoke,
        "remove": members.remove,
        "grant": Group(
            "Show and check what the broker has signed.",
            {"get": grants.get, "keys": grants.keys, "verify": grants.verify},
        ),
        "mailbox": Group(
            "Let clusters in by the API server of the broker's cluster.",
            {"create": mailboxes.create},
        ),
        "broker": broker.broker,
        "agent": agent.agent,
        "ca": Group(
            "Make certificates, and exchange the authority that signs them.",
            {"init": ca.init, "issue": ca.issue, "rotate": ca.rotate, "show": ca.show},
        ),
        "certificate": Group(
            "See and renew the certificate that you call with.",
            {"show": certificates.show, "renew": certificates.renew},
        ),
        "audit": Group(
            "Check all invariants of a store, from scratch. It is only read.",
            {"log": journal.log, "verify": journal.verify},
            itself=audit.audit,
        ),
        "demo": Deferred(
            "demo",
            "See a broker, four clusters and a reservation's whole life.",
            "kubelend.demo.cli:command",
        ),
        "lab": Group(
            "Run three clusters, a broker and two agents on this machine, to try things.",
            {"up": lab.up, "test": lab.walk, "status": lab.status, "down": lab.down},
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
    debug: Annotated[
        bool, typer.Option("--debug", help="Show where an error comes from; before the command.")
    ] = False,
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
    epilog = f"{_CONTEXTS}\n\n{_exit_codes()}" if callback is _root else None
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
        return _group(command, command.itself or _help)
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
