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
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

import msgspec
import typer

from kubelend.apps import flags
from kubelend.apps.agent_settings import AgentSettings
from kubelend.apps.flags import Flag, Settings
from kubelend.apps.settings import BrokerSettings, ClientSettings
from kubelend.cli import places
from kubelend.cli.output import Format
from kubelend.cli.places import Named, Place

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
        return flags.parse(record, _texts(values))

    return _with_parameters(read, [_parameter(flag) for flag in flags.of(record)])


def _lender(call: typer.Context, **values: Any) -> places.Settings:
    """A builder for commands that a cluster's objects can answer as well as a broker."""
    place = Place(*(values.pop(name) for name in _PLACE))
    sources = (call.get_parameter_source(name) for name in ("broker", "cert_path"))
    by = {source.name for source in sources if source is not None}
    named = Named("COMMANDLINE" in by, "ENVIRONMENT" in by)
    if not places.is_wanted(place, named, call.find_root().info_name or ""):
        return flags.parse(ClientSettings, _texts(values))
    # The same limits hold for a cluster, which needs no certificate.
    known = flags.parse(ClientSettings, {"timeout": values["timeout"], "cert_path": "none"})
    return msgspec.structs.replace(place, timeout=known.timeout)


def plain(arguments: list[str]) -> list[str]:
    """What users of Go programs write, as this parser takes it: `--leader-elect=true`, `-n team get ...`."""
    return places.gathered([_plain(argument) for argument in arguments])


def _plain(argument: str) -> str:
    match = _SWITCH.fullmatch(argument)
    if match is None:
        return argument
    name = argument.partition("=")[0]
    return name if match["yes"] else name.replace("--", "--no-", 1)


def _texts(values: Mapping[str, str | bool | None]) -> dict[str, str]:
    return {name: _text(value) for name, value in values.items() if value is not None}


def _text(value: str | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else value


def _parameter(flag: Flag, needed: str = "Required.") -> inspect.Parameter:
    kind: Any = bool if flag.is_switch else str
    names = [f"{flag.name}/--no-{flag.name[2:]}" if flag.is_switch else flag.name]
    info = typer.Option(
        *names,
        envvar=flag.variable,
        metavar=None if flag.is_switch else flag.metavar,
        help=flag.help if flag.default is not None else f"{flag.help} {needed}",
    )
    default: Any = flag.default == "true" if flag.is_switch else flag.default
    return _keyword(flag.attribute, Annotated[kind, info], default)


def _keyword(
    name: str, annotation: object, default: object = inspect.Parameter.empty
) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


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


_PLACE = {
    "kubeconfig": places.Kubeconfig,
    "kube_context": places.ContextName,
    "namespace": places.Namespace,
}
"""In the order of `Place`."""

client = reader(ClientSettings)
lender = _with_parameters(
    _lender,
    [
        _keyword("call", typer.Context),
        *(_parameter(flag, "Needed to ask a broker.") for flag in flags.of(ClientSettings)),
        *(_keyword(name, kind, default="") for name, kind in _PLACE.items()),
    ],
)
broker = reader(BrokerSettings)
agent = reader(AgentSettings)

_SWITCHES = "|".join(
    flag.name
    for record in (BrokerSettings, AgentSettings)
    for flag in flags.of(record)
    if flag.is_switch
)
_SWITCH = re.compile(rf"(?:{_SWITCHES})=(?:(?P<yes>1|t|true)|0|f|false)", re.IGNORECASE)
