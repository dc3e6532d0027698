"""The command tree: verb first, as kubectl has it. `main` runs it, `generate` documents it.

Old spellings, with the noun first, work as hidden aliases.
"""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

import kubelend
from kubelend.apps.agent_settings import AgentSettings
from kubelend.apps.settings import BrokerSettings, ClientSettings
from kubelend.cli import (
    audit,
    backup,
    calls,
    certificates,
    clusters,
    config,
    lab,
    lending,
    limits,
    members,
    options,
    output,
    reservations,
)
from kubelend.cli.output import ExitCode, OutputFormat
from kubelend.core.errors import KubelendError
from kubelend.kits import tables

# -- commands that have no file of their own


@options.takes(settings=options.broker)
def broker(settings: BrokerSettings) -> None:
    """Run the broker until SIGTERM or Ctrl-C.

    It needs a certificate: `kubelend ca init`, then `kubelend ca issue broker --role broker`.
    """
    from kubelend.apps import broker as process

    process.run_broker(settings)


@options.takes(settings=options.agent)
def agent(settings: AgentSettings) -> None:
    """Run the agent of a cluster until SIGTERM or Ctrl-C.

    It needs a certificate: run the `kubelend join` command that `kubelend create token` prints.
    """
    from kubelend.apps import agent_launcher

    agent_launcher.launch_agent(settings)


class Versions(msgspec.Struct, frozen=True, omit_defaults=True):
    """What `version` prints."""

    client: str
    broker: str = ""


@options.takes(settings=options.named_broker)
def version(
    client: Annotated[
        bool, options.flag("Only the version of this command.", None, "--client")
    ] = False,
    format: options.Output = OutputFormat.TABLE,
    *,
    settings: ClientSettings | None,
) -> None:
    """Print the version of this command and of the broker.

    The broker is called only if a flag, a variable or a context names it.
    """
    found = Versions(kubelend.__version__)
    if settings is not None and not client:
        try:
            answer = calls.call_broker(settings, lambda caller: caller.version())
        except KubelendError:
            output.print_text(f"Client: {found.client}")
            raise
        found = Versions(found.client, answer.version)
    broker = f"\nBroker: {tables.sanitize_line(found.broker)}" if found.broker else ""
    output.show(found, format, lambda: f"Client: {found.client}{broker}", [found.client])


COMPLETE_VARIABLE: Final = "_KUBELEND_COMPLETE"
"""Set by the script when the shell requests completions; the same for both names of the command."""


Shell = StrEnum("Shell", ["BASH", "ZSH", "FISH"])


def completion(shell: Annotated[Shell, typer.Argument(show_default=False)]) -> None:
    """Print the completion script of a shell.

    For example: source <(kubelend completion bash)
    """
    from typer import completion as scripts

    print(
        scripts.get_completion_script(  # type: ignore[attr-defined]  # imported there, not listed
            prog_name="kubelend", complete_var=COMPLETE_VARIABLE, shell=shell.value
        )
    )


def register_shells() -> None:
    """Register the shells with the parser, if one of them requests completions."""
    if COMPLETE_VARIABLE in os.environ:
        from typer import completion as scripts

        scripts.completion_init()  # type: ignore[attr-defined]  # as above


class LazyCommand(TyperCommand):
    """A command of another package, `module:attribute`, imported when it runs.

    What `bench` and `demo` import would slow down every `kubelend --help`.
    """

    def __init__(self, name: str, help: str, path: str) -> None:
        super().__init__(name, help=help, rich_markup_mode=None)
        self.path = path
        self._module, _, self._attribute = path.partition(":")

    @property
    def exists(self) -> bool:
        return importlib.util.find_spec(self._module) is not None

    def load(self) -> Any:
        """The command itself: from a Typer app, or from a plain function."""
        found = getattr(importlib.import_module(self._module), self._attribute)
        if isinstance(found, typer.Typer):
            return get_command(found)
        app = _app()
        app.command(name=self.name)(found)
        return get_command(app)

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **more: Any) -> Any:
        """Called to run or to complete the command: from here on it is the real one."""
        return self.load().make_context(info_name, args, *rest, **more)


# -- the tree


class Group(NamedTuple):
    """Commands under one name."""

    help: str
    commands: dict[str, Command]
    aliases: dict[str, Command] = {}  # noqa: RUF012 - of a tuple, and never changed
    """Other spellings, hidden from help."""
    sections: Mapping[str, tuple[str, ...]] = {}
    """Headings of the help, and the commands below each."""
    callback: Callable[..., None] | None = None
    """What runs if no command follows; its flags stand before the command."""


Command = Callable[..., None] | Group | LazyCommand


def _nouns(help: str, commands: dict[str, Command], **aliases: Command) -> Group:
    """A group whose commands are nouns, with the other words for each: singular, plural and short."""
    spellings = {
        word: command
        for noun, command in commands.items()
        for words in options.KINDS.values()
        if noun in words
        for word in words
        if word != noun
    }
    return Group(help, commands, spellings | aliases)


_LAB: Final = Group(
    "Run three clusters, a broker and two agents on this machine.",
    {"up": lab.up, "test": lab.walkthrough, "status": lab.status, "down": lab.down},
)
_DEMO: Final = LazyCommand(
    "demo",
    "Run a broker and four clusters, and show the life of a reservation.",
    "kubelend.demo.story:command",
)
_BENCH: Final = LazyCommand("bench", "Run the benchmarks.", "kubelend.bench.cli:app")

_BASIC: Final[dict[str, Command]] = {
    "borrow": reservations.borrow,
    "explain": reservations.explain,
    "get": _nouns(
        "List or show objects.",
        {
            "clusters": clusters.get_clusters,
            "reservations": reservations.get_reservations,
            "borrowed": lending.get_borrowed,
            "lent": lending.get_lent,
            "members": members.get_members,
            "tokens": members.get_tokens,
            "quotas": limits.get_quotas,
            "policies": limits.get_policies,
        },
    ),
    "describe": _nouns(
        "Show the details of an object.",
        {
            "cluster": clusters.describe_cluster,
            "reservation": reservations.describe_reservation,
            "member": members.describe_member,
            "token": members.describe_token,
            "quota": limits.describe_quota,
            "policy": limits.describe_policy,
        },
    ),
    "renew": reservations.renew,
    "release": reservations.release,
}
_ADMINISTRATION: Final[dict[str, Command]] = {
    "create": _nouns(
        "Create a join token or a cluster namespace.",
        {"token": members.create_token, "clusternamespace": members.create_cluster_namespace},
        reservation=reservations.borrow,
    ),
    "delete": _nouns(
        "Delete objects.",
        {
            "cluster": members.delete_cluster,
            "reservation": reservations.release,
            "member": members.delete_member,
            "token": members.delete_token,
            "quota": limits.delete_quota,
            "policy": limits.delete_policy,
        },
    ),
    "set": _nouns(
        "Set a quota or a lending policy.",
        {"quota": limits.set_quota, "policy": limits.set_policy},
    ),
    "cordon": clusters.cordon,
    "uncordon": clusters.uncordon,
    "drain": clusters.drain,
}
_MEMBERSHIP: Final[dict[str, Command]] = {
    "join": certificates.join,
    "approve": members.approve,
    "deny": members.deny,
    "revoke": members.revoke,
    "certificate": Group(
        "Show and renew your own certificate.",
        {"show": certificates.show_certificate, "renew": certificates.renew_own_certificate},
    ),
    "grant": Group(
        "Get and verify signed reservations.",
        {"get": lending.get_grant, "keys": lending.get_grant_keys, "verify": lending.verify_grant},
    ),
}
_SERVERS: Final[dict[str, Command]] = {
    "broker": broker,
    "agent": agent,
    "ca": Group(
        "Manage the certificate authority, and issue certificates.",
        {
            "init": certificates.init_authority,
            "issue": certificates.issue_certificate,
            "rotate": certificates.rotate_authority,
            "show": certificates.show_authority,
        },
    ),
    "audit": Group(
        "Check the broker's store, and read and verify its audit log.",
        {"check": audit.check_store, "log": audit.audit_log, "verify": audit.verify_chain},
        callback=audit.audit,
    ),
    "backup": backup.create_backup,
    "restore": backup.restore_backup,
    "migrate-back": backup.migrate_back,
    "migrate-store": backup.migrate_store,
}
_OTHERS: Final[dict[str, Command]] = {
    "config": Group(
        "Manage the client configuration file and its contexts.",
        {
            "get-contexts": config.get_contexts,
            "current-context": config.current_context,
            "use-context": config.use_context,
            "set-context": config.set_context,
            "delete-context": config.delete_context,
        },
    ),
    "completion": completion,
    "version": version,
    "dev": Group(
        "Commands for development, tests and demonstrations.",
        {
            "demo": _DEMO,
            "lab": _LAB,
            "bench": _BENCH,
            "advertise": clusters.advertise,
            "activate": reservations.activate,
        },
    ),
}
_OLD_SPELLINGS: Final[dict[str, Command]] = {
    "accept": members.approve,
    "reject": members.deny,
    "remove": members.delete_member,
    "token": Group(
        "Manage join tokens.",
        {
            "create": members.create_token,
            "list": members.get_tokens,
            "delete": members.delete_token,
        },
    ),
    "policy": Group(
        "Manage lending policies.",
        {"show": limits.get_policies, "set": limits.set_policy, "clear": limits.delete_policy},
    ),
    "quota": Group(
        "Manage quotas.",
        {
            "show": limits.get_quotas,
            "list": limits.get_quotas,
            "set": limits.set_quota,
            "clear": limits.delete_quota,
        },
    ),
    "mailbox": Group("Manage cluster namespaces.", {"create": members.create_cluster_namespace}),
    "activate": reservations.activate,
    "advertise": clusters.advertise,
    "demo": _DEMO,
    "lab": _LAB,
    "bench": _BENCH,
}
TREE: Final = Group(
    "Kubelend shares capacity between Kubernetes clusters through a central broker.",
    _BASIC | _ADMINISTRATION | _MEMBERSHIP | _SERVERS | _OTHERS,
    _OLD_SPELLINGS,
    {
        "Basic commands": tuple(_BASIC),
        "Administration commands": tuple(_ADMINISTRATION),
        "Membership commands": tuple(_MEMBERSHIP),
        "Server commands": tuple(_SERVERS),
        "Other commands": tuple(_OTHERS),
    },
)

_EXIT_CODES = (f"{int(code)} {code.name.replace('_', ' ').lower()}" for code in ExitCode)
_EPILOG: Final = (
    "`kubectl lend` borrows, gets, describes, explains, releases, cordons and drains in the cluster of"
    " kubectl's context, with your rights there; `kubelend` does with --kube-context. Everything"
    " else calls the broker."
    f"\n\nExit codes: {', '.join(_EXIT_CODES)}."
)


class GlobalFlags:
    """Flags before the command; `main` reads them when a command has failed."""

    def __init__(self) -> None:
        self.debug = False


@functools.cache
def build_app() -> TyperGroup:
    """The whole tree, ready to run."""
    return _group(TREE, _root)


def _root(
    context: typer.Context,
    debug: Annotated[
        bool, options.flag("Print the traceback of an error; before the command.", None, "--debug")
    ] = False,
    show_version: Annotated[
        bool, options.flag("Print the version and exit.", None, "--version")
    ] = False,
) -> None:
    context.ensure_object(GlobalFlags).debug = debug
    if show_version:
        print(kubelend.__version__)
        raise typer.Exit
    _help(context)


def _help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


class _SectionedGroup(TyperGroup):
    """Lists the commands under headings, if there are any."""

    sections: Mapping[str, tuple[str, ...]] = {}

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        if not self.sections:
            super().format_commands(ctx, formatter)
            return
        width = max(len(name) for names in self.sections.values() for name in names)
        limit = formatter.width - 6 - width
        for heading, names in self.sections.items():
            rows = [
                (name.ljust(width), self.commands[name].get_short_help_str(limit)) for name in names
            ]
            with formatter.section(heading):
                formatter.write_dl(rows)


def _group(group: Group, callback: Callable[..., None]) -> TyperGroup:
    app = _app()
    epilog = _EPILOG if callback is _root else None
    decorate = app.callback(
        cls=_SectionedGroup, invoke_without_command=True, help=group.help, epilog=epilog
    )
    decorate(callback)
    built = get_command(app)
    assert isinstance(built, _SectionedGroup)  # noqa: S101 - a callback makes it one; for the type checker
    built.sections = group.sections
    for name, command in (group.commands | group.aliases).items():
        if isinstance(command, LazyCommand) and not command.exists:
            continue
        made = _command(name, command)
        made.hidden = name in group.aliases
        built.add_command(made, name)
    return built


def _command(name: str, command: Command) -> TyperGroup | TyperCommand:
    if isinstance(command, LazyCommand):
        return LazyCommand(name, command.help or "", command.path)
    if isinstance(command, Group):
        return _group(command, command.callback or _help)
    made = copy.copy(_leaf(command))
    made.name = name
    return made


@functools.cache
def _leaf(command: Callable[..., None]) -> TyperCommand:
    """Built once for all its spellings."""
    app = _app()
    app.command()(command)
    built = get_command(app)
    assert isinstance(built, TyperCommand)  # noqa: S101 - as above
    return built


def _app() -> typer.Typer:
    # Plain help: it is read in logs and pipes as well, and rich would make it slow.
    return typer.Typer(add_completion=False, rich_markup_mode=None)
