"""The client configuration file with its contexts, and `kubelend config`.

    currentContext: alice
    contexts:
    - name: alice
      brokerURL: https://broker.example.org:8443
      certPath: /home/alice/certs/alice
      timeout: 10s

A context stands in for flags that are not given: see `options`. The file is found by `path`, read strictly
(an unknown key is an error) and written atomically with mode 0600.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer
from msgspec.structs import replace

from kubelend.apps.settings import broker_url_problem
from kubelend.cli import output
from kubelend.cli.output import Column, OutputFormat, Printer
from kubelend.core import durations
from kubelend.core.errors import InvalidDuration, InvalidInput, InvalidSettings, NotFound
from kubelend.kits import tables

VARIABLE: Final = "KUBELEND_CONFIG"

_KEYS: Final = {
    "name": "name",
    "broker_url": "brokerURL",
    "cert_path": "certPath",
    "timeout": "timeout",
}


class Context(msgspec.Struct, frozen=True, omit_defaults=True, rename=_KEYS):
    """A broker and the certificate to call it with. An empty value leaves the setting to its default."""

    name: str
    broker_url: str = ""
    cert_path: str = ""
    timeout: str = ""

    def settings(self) -> dict[str, str]:
        """The settings that this context has a value for, by attribute of `ClientSettings`."""
        named = {name: getattr(self, name) for name in _KEYS if name != "name"}
        return {name: value for name, value in named.items() if value}


class Config(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """The whole file."""

    current_context: str = ""
    contexts: list[Context] = msgspec.field(default_factory=list)

    def find(self, name: str) -> Context | None:
        return next((one for one in self.contexts if one.name == name), None)


# -- the file


def path() -> Path:
    """`$KUBELEND_CONFIG`, or `kubelend/config.yaml` below `$XDG_CONFIG_HOME` or `~/.config`."""
    if named := os.environ.get(VARIABLE):
        return _expanded(named)
    base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return _expanded(base) / "kubelend" / "config.yaml"


def _expanded(text: str) -> Path:
    # Not Path.expanduser, which raises where there is no home: in a container, for example.
    return Path(os.path.expanduser(text))  # noqa: PTH111


def load() -> Config:
    """The file's content; an empty configuration if there is no file."""
    file = path()
    if not _exists(file):
        return Config()
    try:
        text = file.read_bytes()
    except OSError as error:
        raise InvalidSettings(f"{file} cannot be read: {error.strerror}") from error
    return _parse(text, file)


def _exists(file: Path) -> bool:
    try:
        file.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except PermissionError:
        # A file in another user's home directory is ignored; a file that was named has to be readable.
        return VARIABLE in os.environ
    except OSError:
        return True
    return True


def find_context(name: str = "") -> Context | None:
    """The context of this name, or the current one; None if there is no current context."""
    config = load()
    wanted = name or config.current_context
    if not wanted:
        return None
    if (found := config.find(wanted)) is None:
        raise _unknown(wanted)
    return replace(found, cert_path=_absolute(found.cert_path, path().parent))


def _unknown(name: str) -> InvalidSettings:
    return InvalidSettings(
        f"no context {name!r} in {path()}",
        hint="`kubelend config get-contexts` lists them; --kube-context names one of the kubeconfig",
    )


def _absolute(directory: str, base: Path) -> str:
    return str(base / _expanded(directory)) if directory else ""


def save(config: Config) -> None:
    from kubelend.kits import files

    file = path()
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise InvalidSettings(f"{file.parent} cannot be created: {error.strerror}") from error
    # The target of a link is replaced, not the link: a configuration may be stored elsewhere.
    content = output.yaml(config).encode()
    files.write_atomic(file.resolve(), content, mode=files.PRIVATE_MODE, overwrite=True)


@contextmanager
def _changing() -> Iterator[None]:
    """Two commands that change the file do so one after the other, or one of them fails."""
    from kubelend.kits import files

    directory = path().resolve().parent
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    with files.lock_directory(directory):
        yield


_FIX: Final = "correct the file, or delete it and use `kubelend config set-context`"


def _parse(text: bytes, file: Path) -> Config:
    from kubelend.wire import strict_yaml

    try:
        found = strict_yaml.load_yaml(text) or {}
        config = strict_yaml.convert_strict(found, Config)
        _check(config)
    except InvalidInput as error:
        raise InvalidSettings(f"{file}: {error.message}", hint=_FIX) from None
    return config


def _check(config: Config) -> None:
    names = [one.name for one in config.contexts]
    for index, one in enumerate(config.contexts):
        where = f"contexts[{index}]"
        if not one.name:
            raise InvalidInput(f"{where}.name: is required")
        if one.name in names[:index]:
            raise InvalidInput(f"{where}.name: {one.name!r} is defined twice")
        for key, problem in _problems(one.broker_url, "brokerURL", one.timeout, "timeout"):
            raise InvalidInput(f"{where}.{key}: {problem.removeprefix(f'{key}: ')}")
    if config.current_context and config.current_context not in names:
        raise InvalidInput(f"currentContext: there is no context {config.current_context!r}")


def _problems(
    url: str, url_name: str, timeout: str, timeout_name: str
) -> Iterator[tuple[str, str]]:
    """What is wrong with the settings of a context, by name."""
    if url and (problem := broker_url_problem(url, url_name)):
        yield url_name, problem
    try:
        if timeout and durations.parse_duration(timeout).total_seconds() <= 0:
            yield timeout_name, f"{timeout_name}: {timeout} is not above zero"
    except InvalidDuration as error:
        yield timeout_name, f"{timeout_name}: {error.message}"


# -- commands

ContextName = Annotated[str, typer.Argument(metavar="CONTEXT", show_default=False)]


def get_contexts(
    format: Annotated[
        OutputFormat,
        typer.Option(
            "--output", "-o", help="Output format: table, json, yaml or name.", metavar="FORMAT"
        ),
    ] = OutputFormat.TABLE,
) -> None:
    """List the contexts of the configuration file."""
    config = load()
    contexts: Printer[Context] = Printer(
        "Context",
        "contexts",
        lambda one: one.name,
        [
            Column("CURRENT", lambda one, _: "*" if one.name == config.current_context else " "),
            Column("NAME", lambda one, _: one.name),
            Column("BROKER", lambda one, _: one.broker_url),
            Column("CERTIFICATES", lambda one, _: one.cert_path),
        ],
    )
    contexts.show_list(config.contexts, format, f" in {path()}")


def current_context() -> None:
    """Print the name of the current context."""
    current = load().current_context
    if not current:
        raise NotFound(
            f"no current context in {path()}", hint="set one with `kubelend config use-context`"
        )
    output.print_text(tables.sanitize_line(current))


def use_context(name: ContextName) -> None:
    """Make a context the current one."""
    with _changing():
        config = load()
        if config.find(name) is None:
            raise _unknown(name)
        save(replace(config, current_context=name))
    output.print_text(f"Switched to context {tables.sanitize_line(name)!r}.")


def set_context(
    name: Annotated[
        str, typer.Argument(metavar="[CONTEXT]", help="Its name.", show_default=False)
    ] = "",
    current: Annotated[bool, typer.Option("--current", help="Change the current context.")] = False,
    broker_url: Annotated[
        str, typer.Option(help="Address of the broker: https://HOST:8443.", metavar="URL")
    ] = "",
    cert_path: Annotated[
        str,
        typer.Option(help="Directory with tls.crt, tls.key and ca.crt.", metavar="DIR"),
    ] = "",
    timeout: Annotated[str, typer.Option(help="Time limit of one call.", metavar="DURATION")] = "",
) -> None:
    """Create a context, or change the given settings of an existing one.

    For example: kubelend config set-context alice --broker-url https://broker:8443
    --cert-path certs/alice
    """
    if bool(name) == current:
        raise InvalidInput("exactly one of CONTEXT and --current is required", hint="see --help")
    for _, problem in _problems(broker_url, "--broker-url", timeout, "--timeout"):
        raise InvalidInput(problem)
    with _changing():
        config = load()
        wanted = name or config.current_context
        if not wanted:
            raise InvalidInput("there is no current context", hint="give the name of a context")
        known = config.find(wanted)
        given = Context(wanted, broker_url, _absolute(cert_path, Path.cwd()), timeout)
        merged = given if known is None else replace(known, **given.settings())
        others = [merged if one.name == wanted else one for one in config.contexts]
        contexts = others if known else [*others, merged]
        # The first context is the one to use: a user with one context need not select it.
        save(Config(config.current_context or wanted, contexts))
    verb = "created" if known is None else "modified"
    output.print_text(f"Context {tables.sanitize_line(wanted)!r} {verb}.")


def delete_context(name: ContextName) -> None:
    """Delete a context. If it is the current one, there is no current context afterwards."""
    with _changing():
        config = load()
        if config.find(name) is None:
            raise _unknown(name)
        current = "" if config.current_context == name else config.current_context
        save(Config(current, [one for one in config.contexts if one.name != name]))
    output.print_text(f"Deleted context {tables.sanitize_line(name)!r} from {path()}.")
    if not current:
        output.note("There is no current context now; `kubelend config use-context` sets one.")
