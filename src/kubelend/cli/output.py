"""How a command speaks: tables and sentences for people, the bodies of the wire for programs."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING

from kubelend.cli import tables

if TYPE_CHECKING:
    import msgspec

    from kubelend.wire import bodies


class Format(StrEnum):
    """What `-o` takes."""

    TABLE = "table"  # for people
    WIDE = "wide"  # the same with more columns
    JSON = "json"  # the body, as the broker sends it
    YAML = "yaml"  # the same as YAML
    NAME = "name"  # names only, one for each line


def show(
    body: msgspec.Struct, format: Format, *, text: Callable[[], str], names: Iterable[str] = ()
) -> None:
    """Print one body in the format that was asked for; `text` is what people read."""
    if format is Format.JSON:
        print(json(body))
    elif format is Format.YAML:
        print(yaml(body), end="")
    elif format is Format.NAME:
        print("\n".join(names))
    else:
        print(text())


def listing(
    body: bodies.Body,
    format: Format,
    *,
    noun: str,
    names: list[str],
    text: Callable[[], str],
    where: str = "",
) -> None:
    """The same for a list; to people, an empty one is a sentence beside the output."""
    if not names and format not in {Format.JSON, Format.YAML}:
        note(f"No {noun} found{where}.")
    else:
        show(body, format, text=text, names=names)


def json(body: object) -> str:
    import msgspec

    return msgspec.json.format(msgspec.json.encode(body), indent=2).decode()


def yaml(body: object) -> str:
    import msgspec
    import yaml as library

    return library.safe_dump(msgspec.to_builtins(body), sort_keys=False, allow_unicode=True)


def note(text: str) -> None:
    """For the person at the terminal; a program that reads the output does not see it."""
    print(text, file=sys.stderr)


def width() -> int | None:
    """Where to wrap: at the terminal's edge. What goes into a file or a pipe is not wrapped."""
    return shutil.get_terminal_size((tables.WIDTH, 24)).columns if sys.stdout.isatty() else None


def now() -> datetime:
    return datetime.now(UTC)
