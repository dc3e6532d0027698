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
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import typer

from kubelend.apps import flags
from kubelend.apps.agent_settings import AgentSettings
from kubelend.apps.flags import Flag, Settings
from kubelend.apps.settings import BrokerSettings, ClientSettings
from kubelend.cli.output import Format
from kubelend.core.errors import InvalidInput, InvalidSettings

Body = TypeVar("Body")


def read_document(path: str, kind: type[Body], noun: str) -> Body:
    """The body in a file, or on standard input for `-`."""
    import msgspec
    import yaml

    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text("utf-8")
        return msgspec.convert(yaml.safe_load(text), kind, strict=False)
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise InvalidInput(f"{path} is no {noun}: {error}", hint="see docs/limits.md") from error


PLUGIN = "kubectl lend"
"""What `main` calls itself when kubectl has started it."""


class KubeTarget(msgspec.Struct, frozen=True):
    """A cluster, as kubectl's flags name it; what is empty is up to the kubeconfig."""

    kubeconfig: str = ""
    context: str = ""
    namespace: str = ""
    timeout: timedelta = timedelta(seconds=30)
    is_everywhere: bool = False
    """All namespaces at once."""


Target = ClientSettings | KubeTarget

ContextName = Annotated[
    str,
    typer.Option(
        "--context",
        help="Work on the objects in the cluster of this context, with its user's rights, instead of"
        " asking a broker. As `kubectl lend` this is the default, with the current context.",
        metavar="NAME",
    ),
]
Kubeconfig = Annotated[
    str,
    typer.Option("--kubeconfig", help="The kubeconfig that has the context.", metavar="PATH"),
]
Namespace = Annotated[
    str,
    typer.Option(
        "--namespace",
        "-n",
        help="Of the objects; the context's, or where the broker is, if not given.",
        metavar="NAME",
    ),
]
AllNamespaces = Annotated[
    bool,
    typer.Option("--all-namespaces", "-A", help="Objects of all namespaces of the cluster."),
]


class BrokerNaming(msgspec.Struct, frozen=True):
    """How the broker was named, if it was."""

    by_flag: bool = False
    by_variable: bool = False


def uses_kube_target(place: KubeTarget, named: BrokerNaming, program: str) -> bool:
    """Whether the objects of a cluster are meant: flags win over variables, and both over the name."""
    is_place_named = bool(place.kubeconfig or place.context or place.namespace)
    if is_place_named and named.by_flag:
        raise InvalidSettings(
            "a broker and a cluster are named both",
            hint="give --broker and --cert-path, or --context, --kubeconfig and --namespace",
        )
    if is_place_named or named.by_flag:
        return is_place_named
    return program == PLUGIN and not named.by_variable


def all_namespaces(settings: Target) -> KubeTarget:
    """The same cluster, with all of its namespaces."""
    if not isinstance(settings, KubeTarget):
        raise InvalidInput("--all-namespaces goes with a cluster", hint="give --context as well")
    if settings.namespace:
        raise InvalidInput("--namespace and --all-namespaces exclude each other", hint="give one")
    return msgspec.structs.replace(settings, is_everywhere=True)


def move_global_flags(arguments: Sequence[str]) -> list[str]:
    """With kubectl's flags behind the command: its users write them before it as well."""
    before: list[str] = []
    moved: list[str] = []
    rest = list(arguments)
    while rest:
        name, equals, _ = rest[0].partition("=")
        if name in _WITH_VALUE or name in _ALONE:
            count = 2 if name in _WITH_VALUE and not equals else 1
            moved += rest[:count]
            del rest[:count]
        elif rest[0].startswith("-") and rest[0] not in _ROOTS_OWN:
            break
        else:
            before.append(rest.pop(0))
    end = rest.index("--") if "--" in rest else len(rest)
    return [*before, *rest[:end], *moved, *rest[end:]]


_WITH_VALUE = frozenset({"--context", "--kubeconfig", "--namespace", "-n"})
_ALONE = frozenset({"--all-namespaces", "-A"})
_ROOTS_OWN = frozenset({"--debug"})


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


def settings_reader(record: type[Settings]) -> Builder:
    """A builder for a record of settings: one flag for each attribute."""

    def read(**values: str | bool | None) -> Settings:
        return flags.parse(record, _texts(values))

    return _with_parameters(read, [_parameter(flag) for flag in flags.of(record)])


def _target_from_flags(call: typer.Context, **values: Any) -> Target:
    """A builder for commands that a cluster's objects can answer as well as a broker."""
    place = KubeTarget(*(values.pop(name) for name in _PLACE))
    sources = (call.get_parameter_source(name) for name in ("broker", "cert_path"))
    by = {source.name for source in sources if source is not None}
    named = BrokerNaming("COMMANDLINE" in by, "ENVIRONMENT" in by)
    if not uses_kube_target(place, named, call.find_root().info_name or ""):
        return flags.parse(ClientSettings, _texts(values))
    # The same limits hold for a cluster, which needs no certificate.
    known = flags.parse(ClientSettings, {"timeout": values["timeout"], "cert_path": "none"})
    return msgspec.structs.replace(place, timeout=known.timeout)


def normalize_arguments(arguments: list[str]) -> list[str]:
    """What users of Go programs write, as this parser takes it: `--leader-elect=true`, `-n team get ...`."""
    return move_global_flags([_normalize_switch(argument) for argument in arguments])


def _normalize_switch(argument: str) -> str:
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
    "kubeconfig": Kubeconfig,
    "kube_context": ContextName,
    "namespace": Namespace,
}
"""In the order of `Place`."""

client = settings_reader(ClientSettings)
target = _with_parameters(
    _target_from_flags,
    [
        _keyword("call", typer.Context),
        *(_parameter(flag, "Needed to ask a broker.") for flag in flags.of(ClientSettings)),
        *(_keyword(name, kind, default="") for name, kind in _PLACE.items()),
    ],
)
broker = settings_reader(BrokerSettings)
agent = settings_reader(AgentSettings)

_SWITCHES = "|".join(
    flag.name
    for record in (BrokerSettings, AgentSettings)
    for flag in flags.of(record)
    if flag.is_switch
)
_SWITCH = re.compile(rf"(?:{_SWITCHES})=(?:(?P<yes>1|t|true)|0|f|false)", re.IGNORECASE)
