"""Derives command-line flags and environment variables from a settings struct.

The attribute `http_port` becomes the flag `--http-port` and the variable `KUBELEND_HTTP_PORT`. Its type
decides how the text is parsed, and its docstring is the help text. `flags_of` lists the flags of a struct,
`parse_settings` builds the struct from the texts that were given.
"""

from __future__ import annotations

import functools
import re
import typing
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from kubelend.core import durations
from kubelend.core.errors import InvalidDuration, InvalidSettings

VARIABLE_PREFIX = "KUBELEND_"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Base class of all settings."""

    def problems(self) -> list[str]:
        """Returns one sentence per invalid value, beginning with the flag's name."""
        return []


class Address(NamedTuple):
    """The address a listener binds to. An empty host means all interfaces."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address | None:
        """Parses an address in Go's notation: ":8081", "127.0.0.1:8081", "[::1]:8081". "0" means disabled."""
        if text == "0":
            return None
        host, colon, port = text.rpartition(":")
        if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
            raise ValueError(
                "not a valid address; use :8081, 127.0.0.1:8081 or [::1]:8081, or 0 to disable"
            )
        if ":" in host and not (host.startswith("[") and host.endswith("]")):
            raise ValueError("too many colons; put an IPv6 address in brackets: [::1]:8081")
        return cls(host.removeprefix("[").removesuffix("]"), int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Flag(NamedTuple):
    """One setting as the command line and the documentation present it."""

    attribute: str
    help: str
    metavar: str
    default: str | None
    """In the notation of the flag; None if the flag is required."""
    is_switch: bool = False

    @property
    def name(self) -> str:
        return flag_name(self.attribute)

    @property
    def variable(self) -> str:
        return VARIABLE_PREFIX + self.attribute.upper()


SettingsT = TypeVar("SettingsT", bound=Settings)


@functools.cache
def flags_of(record: type[Settings]) -> tuple[Flag, ...]:
    """Returns the flags of a settings class in the order of its attributes."""
    # Imported here: parsing source code is only needed for help, and would cost the agent memory.
    from kubelend.wire import docstrings

    kinds, helps = typing.get_type_hints(record), docstrings.field_docstrings(record)
    return tuple(
        Flag(
            attribute=field.name,
            help=helps[field.name],
            metavar=_metavar_of(kinds[field.name]),
            default=None if field.required else _format_value(field.default, kinds[field.name]),
            is_switch=kinds[field.name] is bool,
        )
        for field in msgspec.structs.fields(record)
    )


def parse_settings(record: type[SettingsT], texts: Mapping[str, str]) -> SettingsT:
    """Builds the settings from texts by attribute. Reports all problems in one `InvalidSettings`."""
    kinds = typing.get_type_hints(record)
    values: dict[str, object] = {}
    problems: list[str] = []
    for flag in flags_of(record):
        kind, text = kinds[flag.attribute], texts.get(flag.attribute)
        try:
            if text is not None or flag.default is None:
                values[flag.attribute] = _parse_value(kind, text or "", flag)
        except ValueError as error:
            problems.append(f"{flag.name}: {error}")
            if flag.default is None:
                values[flag.attribute] = kind()
    # Invalid values have their default or zero here, so that the other values are validated as well.
    settings = record(**values)
    problems += settings.problems()
    if problems:
        raise InvalidSettings("; ".join(problems), hint="see --help")
    return settings


def minimum_problems(settings: Settings, minimum: Mapping[str, int | timedelta]) -> list[str]:
    """Returns one sentence for each value below its minimum."""
    return [
        f"{flag_name(attribute)}: must be at least {_format_value(least)}"
        for attribute, least in minimum.items()
        if getattr(settings, attribute) < least
    ]


def flag_name(attribute: str) -> str:
    return "--" + attribute.replace("_", "-")


def _parse_value(kind: Any, text: str, flag: Flag) -> object:
    if not text and kind == Path | None:
        return None
    if not text and kind is not str:
        raise ValueError(f"required; set the flag or {flag.variable}")
    if typing.get_origin(kind) is not Literal:
        return _KINDS[kind].parse(text)
    choices = typing.get_args(kind)
    if text not in choices:
        raise ValueError(f"{text!r} is not supported; use one of {', '.join(choices)}")
    return text


def _parse_integer(text: str) -> int:
    if not re.fullmatch("-?[0-9]{1,18}", text):
        raise ValueError(f"{text[:40]!r} is not an integer")
    return int(text)


def _parse_boolean(text: str) -> bool:
    # The values that Go's strconv.ParseBool accepts: existing manifests contain --leader-elect=true.
    if text in {"1", "t", "T", "true", "TRUE", "True"}:
        return True
    if text in {"0", "f", "F", "false", "FALSE", "False"}:
        return False
    raise ValueError(f"{text!r} is not a boolean; use true or false")


def _parse_duration(text: str) -> timedelta:
    try:
        return durations.parse_duration(text)
    except InvalidDuration as error:
        raise ValueError(str(error)) from None


class _Kind(NamedTuple):
    metavar: str
    parse: Callable[[str], object]


_KINDS: dict[Any, _Kind] = {
    str: _Kind("TEXT", str),
    int: _Kind("N", _parse_integer),
    bool: _Kind("true|false", _parse_boolean),
    Path: _Kind("PATH", Path),
    Path | None: _Kind("PATH", Path),
    timedelta: _Kind("DURATION", _parse_duration),
    Address | None: _Kind("ADDRESS", Address.parse),
}


def _metavar_of(kind: Any) -> str:
    is_choice = typing.get_origin(kind) is Literal
    return "|".join(typing.get_args(kind)) if is_choice else _KINDS[kind].metavar


def _format_value(value: object, kind: Any = None) -> str:
    if value is None:
        return "" if kind == Path | None else "0"
    if isinstance(value, bool):
        return str(value).lower()
    return durations.format_duration_short(value) if isinstance(value, timedelta) else str(value)
