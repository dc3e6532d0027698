"""All commands, as one tree. `main` runs it, `generate` documents it."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Annotated, Any, NamedTuple, cast

import msgspec
import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

import kubelend
from kubelend.apps.agent_settings import AgentSettings
from kubelend.apps.settings import BrokerSettings, ClientSettings
from kubelend.cli import (
    advertise,
    audit,
    calls,
    certificates,
    clusters,
    escapes,
    grants,
    join,
    lab,
    limits,
    members,
    options,
    output,
    reservations,
)
from kubelend.cli.exit_codes import ExitCode
from kubelend.cli.output import Format


@options.takes(settings=options.agent)
def agent(settings: AgentSettings) -> None:
    """Run the agent of a cluster until it is told to stop (SIGTERM or Ctrl-C).

    It needs a certificate: `kubelend join`, with the line that `kubelend token create` prints.
    """
    from kubelend.apps import launching

    launching.launch(settings)


@options.takes(settings=options.broker)
def broker(settings: BrokerSettings) -> None:
    """Run the broker until it is told to stop (SIGTERM or Ctrl-C).

    It needs a certificate: `kubelend ca init`, then `kubelend ca issue broker --role broker`.
    """
    from kubelend.apps import broker as app

    app.run(settings)


COMPLETE_VARIABLE = "_KUBELEND_COMPLETE"
"""Set by the script when the shell asks for completions; the same for both names of the command."""


class Shell(StrEnum):
    """The shells that are known."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def register_shells() -> None:
    """Make the shells known to the parser, if one of them is asking."""
    if COMPLETE_VARIABLE in os.environ:
        from typer import completion as scripts

        scripts.completion_init()  # type: ignore[attr-defined]  # imported there, not listed


def completion(shell: Annotated[Shell, typer.Argument(show_default=False)]) -> None:
    """Print the completion script of a shell.

    For example: source <(kubelend completion bash)
    """
    from typer import completion as scripts

    print(
        scripts.get_completion_script(  # type: ignore[attr-defined]  # as above
            prog_name="kubelend", complete_var=COMPLETE_VARIABLE, shell=shell.value
        )
    )


class LazyCommand(TyperCommand):
    """Stands for `module:attribute`, a Typer app or a plain function."""

    def __init__(self, name: str, help: str, place: str) -> None:
        super().__init__(name, help=help, rich_markup_mode=None)
        self._module, _, self._attribute = place.partition(":")

    @property
    def exists(self) -> bool:
        return importlib.util.find_spec(self._module) is not None

    def load(self) -> Any:
        """The command itself."""
        found = getattr(importlib.import_module(self._module), self._attribute)
        if isinstance(found, typer.Typer):
            return get_command(found)
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        app.command(name=self.name)(found)
        return get_command(app)

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **more: Any) -> Any:
        """Called to run, or to complete, the command: from here on it is the real one."""
        return self.load().make_context(info_name, args, *rest, **more)


class Versions(msgspec.Struct, frozen=True, omit_defaults=True):
    """What answers to `version`."""

    client: str
    broker: str = ""


def _read(**values: str) -> ClientSettings | None:
    return cast("ClientSettings", options.client(**values)) if values["broker"] else None


# No broker is asked unless one is named, so this flag has no default here.
_read.__dict__["__signature__"] = inspect.Signature(
    [
        parameter.replace(default="") if parameter.name == "broker" else parameter
        for parameter in inspect.signature(options.client).parameters.values()
    ]
)


@options.takes(settings=_read)
def version(format: options.Output = Format.TABLE, *, settings: ClientSettings | None) -> None:
    """The version of this command; with --broker, also the broker's."""
    found = Versions(kubelend.__version__)
    if settings is not None:
        answer = calls.call_broker(settings, lambda client: client.version())
        found = msgspec.structs.replace(found, broker=answer.version)
    if format is Format.JSON:
        print(output.json(found))
    elif format is Format.YAML:
        print(output.yaml(found), end="")
    else:
        print(f"Client: {found.client}")
        if found.broker:
            print(f"Broker: {escapes.line(found.broker)}")


_CONTEXTS = (
    "`kubectl lend` borrows, gets, describes and releases in the cluster of kubectl's context, with your"
    " rights there (--context, --kubeconfig, -n). `kubelend` does with --context. All else asks the broker."
)


class GlobalFlags:
    """What flags before the command say; `main` reads it when a command has failed."""

    def __init__(self) -> None:
        self.debug = False


class Group(NamedTuple):
    """Commands under one name."""

    help: str
    commands: Mapping[str, Callable[..., None] | Group | LazyCommand]
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
        "explain": reservations.explain,
        "get": Group(
            "Show clusters, reservations or members.",
            {
                "clusters": clusters.get,
                "reservations": reservations.get,
                "members": members.get_members,
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
            {"show": limits.get_policy, "set": limits.set_policy, "clear": limits.delete_policy},
        ),
        "quota": Group(
            "Say what clusters may hold, wait for and spend.",
            {
                "show": limits.get_quota,
                "list": limits.get_quotas,
                "set": limits.set_quota,
                "clear": limits.delete_quota,
            },
        ),
        "advertise": advertise.advertise,
        "token": Group(
            "Let newcomers in.",
            {
                "create": members.create_token,
                "list": members.get_tokens,
                "delete": members.delete_token,
            },
        ),
        "join": join.join,
        "accept": members.approve,
        "reject": members.deny,
        "revoke": members.revoke,
        "remove": members.delete_member,
        "grant": Group(
            "Show and check what the broker has signed.",
            {"get": grants.get_grant, "keys": grants.get_grant_keys, "verify": grants.verify_grant},
        ),
        "mailbox": Group(
            "Let clusters in by the API server of the broker's cluster.",
            {"create": members.create_cluster_namespace},
        ),
        "broker": broker,
        "agent": agent,
        "ca": Group(
            "Make certificates, and exchange the authority that signs them.",
            {
                "init": certificates.init_authority,
                "issue": certificates.issue_certificate,
                "rotate": certificates.rotate_authority,
                "show": certificates.show_authority,
            },
        ),
        "certificate": Group(
            "See and renew the certificate that you call with.",
            {"show": certificates.show_certificate, "renew": certificates.renew_own_certificate},
        ),
        "audit": Group(
            "Check all invariants of a store, from scratch. It is only read.",
            {"log": audit.audit_log, "verify": audit.verify_chain},
            itself=audit.check_store,
        ),
        "demo": LazyCommand(
            "demo",
            "See a broker, four clusters and a reservation's whole life.",
            "kubelend.demo.cli:command",
        ),
        "lab": Group(
            "Run three clusters, a broker and two agents on this machine, to try things.",
            {"up": lab.up, "test": lab.walkthrough, "status": lab.status, "down": lab.down},
        ),
        "bench": LazyCommand("bench", "Measure this machine.", "kubelend.bench.cli:app"),
        "completion": completion,
        "version": version,
    },
)


def build_app() -> TyperGroup:
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
    state = context.ensure_object(GlobalFlags)
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
        if not isinstance(command, LazyCommand) or command.exists:
            built.add_command(_command(name, command), name)
    for alias, name in group.aliases.items():
        hidden = _command(name, group.commands[name])
        hidden.hidden = True
        built.add_command(hidden, alias)
    return built


def _command(
    name: str, command: Callable[..., None] | Group | LazyCommand
) -> TyperGroup | TyperCommand:
    if isinstance(command, LazyCommand):
        return command
    if isinstance(command, Group):
        return _group(command, command.itself or _help)
    app = _app()
    app.command(name)(command)
    built = get_command(app)
    assert isinstance(built, TyperCommand)  # noqa: S101 - as above
    return built


def _exit_codes() -> str:
    known = (f"{int(code)} {code.name.replace('_', ' ').lower()}" for code in ExitCode)
    return f"Exit codes: {', '.join(known)}."


def _app() -> typer.Typer:
    # Plain help: it is read in logs and pipes as well, and rich would make it slow.
    return typer.Typer(add_completion=False, rich_markup_mode=None)
