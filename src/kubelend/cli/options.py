"""Flags and arguments that many commands share, and the target that they select.

A command names the parameters that are built from a whole set of flags:

    @options.takes(settings=options.client)
    def uncordon(name: options.ClusterName, *, settings: ClientSettings) -> None: ...

and gets `--broker-url`, `--cert-path`, `--timeout` and `--context` in their place, with their variables,
defaults and help. A flag wins over `--context`, that over a variable, that over the current context of the
configuration file, and that over the default.

The everyday commands (`options.target`) work on a broker, or on the objects in a cluster of the kubeconfig.
`kubectl lend` means the cluster that kubectl means, with the user's own rights and without a certificate;
`kubelend` means the broker. Flags and variables select the other one.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, TypeVar

import msgspec
import typer

from kubelend.apps import flags
from kubelend.apps.agent_settings import AgentSettings
from kubelend.apps.flags import Flag, Settings
from kubelend.apps.settings import BrokerSettings, CertificateSettings, ClientSettings
from kubelend.cli import config
from kubelend.cli.output import OutputFormat
from kubelend.core.errors import InvalidInput, InvalidSettings

Body = TypeVar("Body")
Built = TypeVar("Built")
Builder = Callable[..., object]

NO_DEFAULTS: Final[Mapping[str, Any]] = MappingProxyType({})
PLUGIN: Final = "kubectl lend"
"""What `main` calls itself when kubectl has started it."""


# -- names


KINDS: Final[Mapping[str, tuple[str, ...]]] = {
    "cluster": ("cluster", "clusters", "cl"),
    "reservation": ("reservation", "reservations", "rsv"),
    "member": ("member", "members"),
    "token": ("token", "tokens"),
    "quota": ("quota", "quotas"),
    "policy": ("policy", "policies"),
}
"""Each kind of object, and the words for it: singular, plural and short."""

_KIND_OF: Final = {word: kind for kind, words in KINDS.items() for word in words}


def parse_name(text: str, *kinds: str) -> str:
    """The name in `NAME` or `KIND/NAME`, where the kind has to be one of these."""
    prefix, slash, name = text.partition("/")
    kind = _KIND_OF.get(prefix.lower()) if slash else None
    if kind is None:
        return text
    if kind not in kinds:
        raise InvalidInput(f"{text!r} is a {kind}, not a {kinds[0]}", hint="give its name alone")
    if not name:
        raise InvalidInput(f"{text!r} has no name", hint=f"write {kind}/NAME")
    return name


def named(*kinds: str) -> Callable[[Any], Any]:
    """A callback for arguments and flags that take a name, several, or none."""

    def parse(value: Any) -> Any:
        if isinstance(value, str):
            return parse_name(value, *kinds)
        if isinstance(value, (list, tuple)):
            return [parse_name(one, *kinds) for one in value]
        return value

    return parse


def flag(help: str, metavar: str | None = None, *names: str, **more: Any) -> Any:
    """A flag; named after its parameter, unless it has other names."""
    return typer.Option(*names, help=help, metavar=metavar, **more)


def argument(metavar: str, *kinds: str, help: str | None = None) -> Any:
    """An argument; with kinds, one that takes a name of these kinds."""
    callback = named(*kinds) if kinds else None
    return typer.Argument(metavar=metavar, help=help, show_default=False, callback=callback)


Output = Annotated[
    OutputFormat,
    flag(
        "Output format: table, wide, json, yaml or name.",
        *("FORMAT", "--output", "-o"),
        show_default=False,
    ),
]
ClusterName = Annotated[str, argument("CLUSTER", "cluster")]
ReservationName = Annotated[str, argument("RESERVATION", "reservation")]
ReservationNames = Annotated[list[str], argument("RESERVATION...", "reservation")]
Reason = Annotated[str, flag("Reason, shown to others and logged.", "TEXT")]
Yes = Annotated[bool, flag("Do not ask for confirmation.", None, "--yes", "-y")]
DryRun = Annotated[bool, flag("Show what would be done; change nothing.", None, "--dry-run")]
Many = list[str] | None
"""The value of a flag that may be repeated."""


# -- sets of flags


def takes(**builders: Builder) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the flags of each builder, and what the builder makes of them."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters
        added = {name: inspect.signature(make, eval_str=True) for name, make in builders.items()}

        @functools.wraps(command)
        def wrapper(**values: Any) -> None:
            built = {
                name: make(**{flag: values.get(flag) for flag in added[name].parameters})
                for name, make in builders.items()
            }
            used = {flag for signature in added.values() for flag in signature.parameters}
            rest = {
                name: value for name, value in values.items() if name in own or name not in used
            }
            command(**built, **rest)

        parameters: dict[str, inspect.Parameter] = {}
        for name, parameter in own.items():
            new = added[name].parameters if name in builders else {name: parameter}
            parameters |= {one: found for one, found in new.items() if one not in parameters}
        return _with_parameters(wrapper, list(parameters.values()))

    return decorate


def settings_reader(record: type[Settings]) -> Builder:
    """A builder for a record of settings: one flag for each attribute."""

    def read(**values: str | bool | None) -> Settings:
        return flags.parse_settings(record, _texts(values))

    return _with_parameters(read, [_parameter(flag) for flag in flags.flags_of(record)])


# -- a broker

ContextName = Annotated[
    str,
    flag(
        "Context of the configuration file (`kubelend config`). As `kubectl lend`: of the kubeconfig.",
        *("NAME", "--context"),
    ),
]
OldBroker = Annotated[str, typer.Option("--broker", envvar="KUBELEND_BROKER", hidden=True)]
"""Former name of the flag for the broker's address."""


def _client(call: typer.Context, **values: Any) -> ClientSettings:
    context = values.pop("context")
    if context and call.find_root().info_name == PLUGIN:
        raise InvalidInput(
            "--context: this command calls the broker, and kubectl's contexts do not name one",
            hint="give --broker-url and --cert-path, or use `kubelend --context`",
        )
    return flags.parse_settings(ClientSettings, _with_context(call, values, context))


def _holder(call: typer.Context, context: str, cert_path: str | None) -> CertificateSettings:
    values = _with_context(call, {"cert_path": cert_path}, context)
    return flags.parse_settings(CertificateSettings, values)


def _named_broker(call: typer.Context, **values: Any) -> ClientSettings | None:
    """None unless a flag, a variable or a context names the broker."""
    is_given = any(_rank(call, name) > DEFAULT for name in ("broker_url", "broker"))
    if not is_given and not values["context"]:
        context = config.find_context()
        is_given = context is not None and bool(context.broker_url)
    return _client(call, **values) if is_given or values["context"] else None


def _with_context(call: typer.Context, values: dict[str, Any], context: str) -> dict[str, str]:
    """The values by attribute, completed from a context of the configuration file."""
    values = {name: value for name, value in values.items() if name != "context"}
    ranks = {name: _rank(call, name) for name in values}
    if "broker" in values:
        old, rank = values.pop("broker"), ranks.pop("broker")
        if rank > ranks["broker_url"]:
            values["broker_url"], ranks["broker_url"] = old, rank
    chosen = config.find_context(context)
    # A context that was named by a flag is more than a variable, which was set for many commands.
    limit = VARIABLE if context else DEFAULT
    for name, value in ({} if chosen is None else chosen.settings()).items():
        if name in values and ranks[name] <= limit:
            values[name] = value
    return _texts(values)


DEFAULT, VARIABLE, FLAG = range(3)


def _rank(call: typer.Context, name: str) -> int:
    source = call.get_parameter_source(name)
    ranks = {"COMMANDLINE": FLAG, "ENVIRONMENT": VARIABLE}
    return DEFAULT if source is None else ranks.get(source.name, DEFAULT)


# -- a broker, or a cluster of the kubeconfig


class KubeTarget(msgspec.Struct, frozen=True):
    """A cluster, as kubectl's flags name it; empty fields are taken from the kubeconfig."""

    kubeconfig: str = ""
    context: str = ""
    namespace: str = ""
    timeout: timedelta = timedelta(seconds=30)
    is_everywhere: bool = False
    """All namespaces at once."""


Target = ClientSettings | KubeTarget

KubeContext = Annotated[
    str,
    flag(
        "Work on the objects in the cluster of this kubeconfig context, with its user's rights,"
        " instead of calling a broker. `kubectl lend` does so with the current context.",
        *("NAME", "--kube-context"),
    ),
]
Kubeconfig = Annotated[str, flag("Kubeconfig file of the cluster.", "PATH", "--kubeconfig")]
Namespace = Annotated[
    str,
    flag(
        "Namespace of the objects. Defaults to the context's, or to that of the broker.",
        *("NAME", "--namespace", "-n"),
    ),
]
AllNamespaces = Annotated[
    bool, flag("Objects of all namespaces of the cluster.", None, "--all-namespaces", "-A")
]


def uses_kube_target(target: KubeTarget, broker_named: int, program: str) -> bool:
    """Whether the objects of a cluster are meant: flags win over variables, and both over the program.

    `broker_named`: whether the broker is named by a FLAG, a VARIABLE or by DEFAULT.
    """
    is_named = bool(target.kubeconfig or target.context or target.namespace)
    if is_named and broker_named == FLAG:
        raise InvalidSettings(
            "the flags name both a broker and a cluster",
            hint="give --broker-url and --cert-path (or --context), or --kube-context, --kubeconfig and"
            " --namespace",
        )
    return is_named or (program == PLUGIN and broker_named == DEFAULT)


def all_namespaces(target: Target) -> KubeTarget:
    """The same cluster, with all of its namespaces."""
    if not isinstance(target, KubeTarget):
        raise InvalidInput(
            "--all-namespaces goes with a cluster of the kubeconfig", hint="give --kube-context too"
        )
    if target.namespace:
        raise InvalidInput("--namespace and --all-namespaces exclude each other", hint="give one")
    return msgspec.structs.replace(target, is_everywhere=True)


def _target(call: typer.Context, **values: Any) -> Target:
    program = call.find_root().info_name or ""
    kubeconfig, kube_context, namespace = (values.pop(name) for name in _KUBE_FLAGS)
    if program == PLUGIN:
        kube_context, values["context"] = kube_context or values["context"], ""
    cluster = KubeTarget(kubeconfig, kube_context, namespace)
    ranks = [_rank(call, name) for name in ("broker_url", "broker", "cert_path")]
    if not uses_kube_target(cluster, FLAG if values["context"] else max(ranks), program):
        return _client(call, **values)
    # The same limits hold for a cluster, which needs no certificate.
    known = flags.parse_settings(
        ClientSettings, {"timeout": values["timeout"], "cert_path": "none"}
    )
    return msgspec.structs.replace(cluster, timeout=known.timeout)


# -- the command line as a whole


def normalize_arguments(arguments: list[str]) -> list[str]:
    """Convert the notation of Go programs and of kubectl to that of the parser."""
    return move_global_flags(normalize_go_flags(arguments))


def move_global_flags(arguments: Sequence[str]) -> list[str]:
    """Move the flags of all commands behind the command: users of kubectl write them before it as well."""
    before: list[str] = []
    moved: list[str] = []
    rest = list(arguments)
    while rest:
        name, equals, _ = rest[0].partition("=")
        if name in _WITH_VALUE or name in _SWITCHES:
            count = 2 if name in _WITH_VALUE and not equals else 1
            moved += rest[:count]
            del rest[:count]
        elif rest[0].startswith("-") and rest[0] not in _ROOT_FLAGS:
            break
        else:
            before.append(rest.pop(0))
    end = rest.index("--") if "--" in rest else len(rest)
    return [*before, *rest[:end], *moved, *rest[end:]]


_WITH_VALUE: Final = frozenset(
    {
        *("--context", "--kube-context", "--kubeconfig", "--namespace", "-n"),
        *("--broker-url", "--broker", "--cert-path"),
    }
)
_SWITCHES: Final = frozenset({"--all-namespaces", "-A"})
_ROOT_FLAGS: Final = frozenset({"--debug"})


# -- flags as manifests of the published Go programs have them: `-http-port=8443`, `--leader-elect=true`

_GO_SETTINGS: Final = {"broker": BrokerSettings, "agent": AgentSettings}

UNUSED_GO_FLAGS: Final = {
    "--metrics-secure": "metrics are served without TLS",
    "--enable-http2": "HTTP/1.1 is used",
    "--metrics-cert-path": "metrics are served without TLS",
    "--metrics-cert-name": "metrics are served without TLS",
    "--metrics-cert-key": "metrics are served without TLS",
    "--webhook-cert-path": "there are no webhooks",
    "--webhook-cert-name": "there are no webhooks",
    "--webhook-cert-key": "there are no webhooks",
    "--zap-devel": "see --log-format",
    "--zap-encoder": "see --log-format",
    "--zap-log-level": "see --log-level",
    "--zap-stacktrace-level": "see --log-level",
    "--zap-time-encoding": "times are in RFC 3339",
}
"""Flags of the published programs without effect, and what holds instead."""

_UNUSED_GO_SWITCHES: Final = frozenset({"--metrics-secure", "--enable-http2", "--zap-devel"})
"""Those that take no value of their own: Go's booleans have it behind `=` only."""


def normalize_go_flags(arguments: list[str]) -> list[str]:
    """Convert the arguments of `broker` and `agent`; those of other commands stay as they are."""
    command = next((word for word in arguments if not word.startswith("-")), "")
    if command not in _GO_SETTINGS:
        return arguments
    return [
        _with_plain_switch(word, command)
        for word in _without_unused(_with_two_dashes(arguments, command))
    ]


def _with_two_dashes(arguments: list[str], command: str) -> list[str]:
    known = {flag.name for flag in flags.flags_of(_GO_SETTINGS[command])} | UNUSED_GO_FLAGS.keys()
    return [f"-{word}" if f"-{word.partition('=')[0]}" in known else word for word in arguments]


def _without_unused(arguments: list[str]) -> Iterator[str]:
    rest = iter(arguments)
    for word in rest:
        name, equals, _ = word.partition("=")
        if name not in UNUSED_GO_FLAGS:
            yield word
            continue
        print(f"{name} has no effect: {UNUSED_GO_FLAGS[name]}", file=sys.stderr)
        if not equals and name not in _UNUSED_GO_SWITCHES:
            next(rest, None)


def _with_plain_switch(word: str, command: str) -> str:
    """`--leader-elect=true` is `--leader-elect`, and with `=false` it is `--no-leader-elect`."""
    name, _, value = word.partition("=")
    switches = {flag.name for flag in flags.flags_of(_GO_SETTINGS[command]) if flag.is_switch}
    if name not in switches or not _GO_BOOLEAN.fullmatch(value):
        return word
    return name if value[0] in "1tT" else name.replace("--", "--no-", 1)


_GO_BOOLEAN: Final = re.compile("1|t|true|0|f|false", re.IGNORECASE)


def read_document(
    path: str, kind: type[Body], noun: str, *, hint: str, defaults: Mapping[str, Any] = NO_DEFAULTS
) -> Body:
    """The body in a YAML or JSON file, or on standard input for `-`."""
    from kubelend.wire import strict_yaml

    try:
        text = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        value = strict_yaml.load_yaml(text)
        merged = {**defaults, **value} if isinstance(value, dict) else value
        return msgspec.convert(merged, kind, strict=False)
    except OSError as error:
        raise InvalidInput(f"--file: {path} cannot be read: {error.strerror}") from error
    except (InvalidInput, msgspec.ValidationError) as error:
        raise InvalidInput(f"--file: {path} is no {noun}: {error}", hint=hint) from error


# -- signatures, from which typer builds the flags


def _texts(values: Mapping[str, str | bool | None]) -> dict[str, str]:
    return {
        name: str(value).lower() if isinstance(value, bool) else value
        for name, value in values.items()
        if value is not None
    }


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
    keyword = inspect.Parameter.KEYWORD_ONLY
    ordered = [parameter.replace(kind=keyword) for parameter in parameters]
    function.__dict__.pop("__wrapped__", None)
    function.__dict__["__signature__"] = inspect.Signature(ordered)
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in ordered}
    return function


_KUBE_FLAGS: Final = {
    "kubeconfig": Kubeconfig,
    "kube_context": KubeContext,
    "namespace": Namespace,
}


def _flags_of(record: type[Settings], needed: str = "Required.") -> list[inspect.Parameter]:
    return [
        _keyword("call", typer.Context),
        *(_parameter(flag, needed) for flag in flags.flags_of(record)),
        _keyword("context", ContextName, default=""),
    ]


_CLIENT_FLAGS: Final = [
    *_flags_of(ClientSettings, "Required, unless a context has it."),
    _keyword("broker", OldBroker, default=""),
]
broker = settings_reader(BrokerSettings)
agent = settings_reader(AgentSettings)
client = _with_parameters(_client, _CLIENT_FLAGS)
holder = _with_parameters(
    _holder, _flags_of(CertificateSettings, "Required, unless a context has it.")
)
named_broker = _with_parameters(_named_broker, _CLIENT_FLAGS)
target = _with_parameters(
    _target,
    [
        *_flags_of(ClientSettings, "Required to call a broker, unless a context has it."),
        _keyword("broker", OldBroker, default=""),
        *(_keyword(name, kind, default="") for name, kind in _KUBE_FLAGS.items()),
    ],
)
