"""What many commands take, written once: settings, the output format, names.

A command says which of its parameters are made from a whole set of flags:

    @options.takes(settings=options.client)
    def uncordon(name: options.ClusterName, *, settings: ClientSettings) -> None: ...

and gets in its place `--broker`, `--cert-path` and `--timeout`, with their variables, defaults and help.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer

from kubelend.apps import flags
from kubelend.apps.agent_settings import AgentSettings
from kubelend.apps.flags import Flag, Settings
from kubelend.apps.settings import BrokerSettings, ClientSettings
from kubelend.cli.output import Format

Built = TypeVar("Built")
Builder = Callable[..., object]

Output = Annotated[
    Format,
    typer.Option(
        "--output",
        "-o",
        help="How to print it: table, wide, json, yaml or name.",
        metavar="FORMAT",
        show_default=False,
    ),
]
ClusterName = Annotated[str, typer.Argument(metavar="CLUSTER", show_default=False)]
ReservationName = Annotated[str, typer.Argument(metavar="RESERVATION", show_default=False)]
Reason = Annotated[str, typer.Option(help="Why; kept and shown.", metavar="TEXT")]


def takes(**builders: Builder) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the flags of each builder, and what the builder makes of them."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters
        added = {name: inspect.signature(make, eval_str=True) for name, make in builders.items()}

        @functools.wraps(command)
        def wrapper(**values: Any) -> None:
            built = {
                name: make(**{flag: values.pop(flag) for flag in added[name].parameters})
                for name, make in builders.items()
            }
            command(**built, **values)

        parameters: list[inspect.Parameter] = []
        for name, parameter in own.items():
            parameters += added[name].parameters.values() if name in builders else [parameter]
        return _with_parameters(wrapper, parameters)

    return decorate


def reader(record: type[Settings]) -> Builder:
    """A builder for a record of settings: one flag for each attribute."""

    def read(**values: str | bool | None) -> Settings:
        texts = {name: _text(value) for name, value in values.items() if value is not None}
        return flags.parse(record, texts)

    return _with_parameters(read, [_parameter(flag) for flag in flags.of(record)])


def plain(arguments: list[str]) -> list[str]:
    """Switches as Go programs take them (`--leader-elect=true`), as this parser does."""
    return [_plain(argument) for argument in arguments]


def _plain(argument: str) -> str:
    match = _SWITCH.fullmatch(argument)
    if match is None:
        return argument
    name = argument.partition("=")[0]
    return name if match["yes"] else name.replace("--", "--no-", 1)


def _text(value: str | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else value


def _parameter(flag: Flag) -> inspect.Parameter:
    kind: Any = bool if flag.is_switch else str
    names = [f"{flag.name}/--no-{flag.name[2:]}" if flag.is_switch else flag.name]
    info = typer.Option(
        *names,
        envvar=flag.variable,
        metavar=None if flag.is_switch else flag.metavar,
        help=flag.help if flag.default is not None else f"{flag.help} Required.",
    )
    default: Any = flag.default == "true" if flag.is_switch else flag.default
    return inspect.Parameter(
        flag.attribute,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, info],
    )


def _with_parameters(
    function: Callable[..., Built], parameters: list[inspect.Parameter]
) -> Callable[..., Built]:
    """The same function with another signature, for typer looks at nothing else."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    ordered = [parameter.replace(kind=keyword) for parameter in parameters]
    function.__dict__.pop("__wrapped__", None)
    function.__dict__["__signature__"] = inspect.Signature(ordered)
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in ordered}
    return function


client = reader(ClientSettings)
broker = reader(BrokerSettings)
agent = reader(AgentSettings)

_SWITCHES = "|".join(
    flag.name
    for record in (BrokerSettings, AgentSettings)
    for flag in flags.of(record)
    if flag.is_switch
)
_SWITCH = re.compile(rf"(?:{_SWITCHES})=(?:(?P<yes>1|t|true)|0|f|false)", re.IGNORECASE)
