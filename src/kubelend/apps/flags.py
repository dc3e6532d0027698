"""Flags and environment variables, read off a record of settings, so that no second list can differ.

A record's attribute `http_port` is the flag `--http-port` and the variable `KUBELEND_HTTP_PORT`; its type
says how a text becomes a value, and the docstring below it is its help. The command line asks for the
flags of a record (`of`) and turns the texts that it found into one (`parse`).
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import typing
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from kubelend.core import durations
from kubelend.core.errors import InvalidDuration, InvalidSettings

PREFIX = "KUBELEND_"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The base of all records of settings."""

    def problems(self) -> list[str]:
        """All that is wrong with the values, a sentence each, beginning with the flag's name."""
        return []


class Address(NamedTuple):
    """Where a listener binds. An empty host means all interfaces."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address | None:
        """As Go writes them: ":8081", "127.0.0.1:8081", "[::1]:8081". "0" is none at all."""
        if text == "0":
            return None
        host, colon, port = text.rpartition(":")
        if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
            raise ValueError(
                "is no address; write :8081, 127.0.0.1:8081 or [::1]:8081, or 0 for off"
            )
        if ":" in host and not (host.startswith("[") and host.endswith("]")):
            raise ValueError("has several colons; put an IPv6 address in brackets: [::1]:8081")
        return cls(host.removeprefix("[").removesuffix("]"), int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Flag(NamedTuple):
    """One setting, as the command line and the documentation show it."""

    attribute: str
    help: str
    metavar: str
    default: str | None
    """As one would write it; None if it must be given."""
    is_switch: bool = False

    @property
    def name(self) -> str:
        return "--" + self.attribute.replace("_", "-")

    @property
    def variable(self) -> str:
        return PREFIX + self.attribute.upper()


Record = TypeVar("Record", bound=Settings)


@functools.cache
def of(record: type[Settings]) -> tuple[Flag, ...]:
    """The flags of a record, in the order of its attributes."""
    kinds, helps = typing.get_type_hints(record), _docstrings(record)
    return tuple(
        Flag(
            attribute=field.name,
            help=helps[field.name],
            metavar=_metavar(kinds[field.name]),
            default=None if field.required else _default(kinds[field.name], field.default),
            is_switch=kinds[field.name] is bool,
        )
        for field in msgspec.structs.fields(record)
    )


def parse(record: type[Record], texts: Mapping[str, str]) -> Record:
    """The record that the texts (by attribute) say; all problems at once as one `InvalidSettings`."""
    kinds = typing.get_type_hints(record)
    values: dict[str, object] = {}
    problems: list[str] = []
    for flag in of(record):
        kind, text = kinds[flag.attribute], texts.get(flag.attribute)
        try:
            if text is not None or flag.default is None:
                values[flag.attribute] = _value(kind, text or "", flag)
        except ValueError as problem:
            problems.append(f"{flag.name}: {problem}")
            if flag.default is None:
                values[flag.attribute] = kind()
    # What is wrong stands at its default or zero, so the rest is judged too, and told in one breath.
    settings = record(**values)
    problems += settings.problems()
    if problems:
        raise InvalidSettings("; ".join(problems), hint="see --help")
    return settings


def _value(kind: Any, text: str, flag: Flag) -> object:
    if not text and kind == Path | None:
        return None
    if not text and kind is not str:
        raise ValueError(f"is needed, here or as {flag.variable}")
    if typing.get_origin(kind) is Literal:
        return _choice(typing.get_args(kind), text)
    return _READERS[kind](text)


def _choice(choices: tuple[str, ...], text: str) -> str:
    if text not in choices:
        raise ValueError(f"{text!r} is unknown; choose one of {', '.join(choices)}")
    return text


def _integer(text: str) -> int:
    if (
        len(text) > 18
        or not text.removeprefix("-").isascii()
        or not text.removeprefix("-").isdigit()
    ):
        raise ValueError(f"{text[:40]!r} is no whole number")
    return int(text)


def _switch(text: str) -> bool:
    # All that Go's strconv.ParseBool reads: existing manifests say --leader-elect=true.
    if text in {"1", "t", "T", "true", "TRUE", "True"}:
        return True
    if text in {"0", "f", "F", "false", "FALSE", "False"}:
        return False
    raise ValueError(f"{text!r} is neither true nor false")


def _duration(text: str) -> timedelta:
    try:
        return durations.parse(text)
    except InvalidDuration as problem:
        raise ValueError(str(problem)) from None


_READERS: dict[Any, Callable[[str], object]] = {
    str: str,
    int: _integer,
    bool: _switch,
    Path: Path,
    Path | None: Path,
    timedelta: _duration,
    Address | None: Address.parse,
}

_METAVARS: dict[Any, str] = {
    str: "TEXT",
    int: "N",
    bool: "true|false",
    Path: "PATH",
    Path | None: "PATH",
    timedelta: "DURATION",
    Address | None: "ADDRESS",
}


def _metavar(kind: Any) -> str:
    choices = typing.get_args(kind) if typing.get_origin(kind) is Literal else ()
    return "|".join(choices) or _METAVARS[kind]


def _default(kind: Any, value: object) -> str:
    return "" if value is None and kind == Path | None else _text(value)


def _text(value: object) -> str:
    if value is None:
        return "0"
    if isinstance(value, bool):
        return str(value).lower()
    return durations.short(value) if isinstance(value, timedelta) else str(value)


def _docstrings(record: type[Settings]) -> dict[str, str]:
    """The string below each attribute: Python drops them, so they are read from the source."""
    tree = ast.parse(Path(inspect.getfile(record)).read_text("utf-8"))
    (body,) = (
        node.body
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == record.__name__
    )
    found: dict[str, str] = {}
    for above, below in itertools.pairwise(body):
        if isinstance(above, ast.AnnAssign) and isinstance(below, ast.Expr):
            found[ast.unparse(above.target)] = " ".join(ast.literal_eval(below.value).split())
    return found
