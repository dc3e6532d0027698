"""How a command speaks: tables and sentences for people, the bodies of the wire for programs.

Neither lets a terminal obey what somebody else has written: see `escapes`.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from decimal import ROUND_HALF_UP, Decimal
from enum import StrEnum
from typing import TYPE_CHECKING

from kubelend.cli import escapes, tables
from kubelend.core.errors import InvalidQuantity
from kubelend.core.quantities import Quantity
from kubelend.wire import bodies

if TYPE_CHECKING:
    import msgspec

_UNITS = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")


def amount_texts(amounts: bodies.Amounts | None) -> dict[str, str]:
    """By resource, as the broker wrote them; none of those that are not there."""
    if amounts is None:
        return {}
    named = {
        "cpu": amounts.cpu,
        "memory": amounts.memory,
        "gpu": amounts.gpu,
        "storage": amounts.storage,
        **amounts.extended,
    }
    return {name: str(amount) for name, amount in named.items() if amount != ""}


def format_amounts(amounts: bodies.Quantities) -> str:
    """ "500m cpu, 256Mi memory" """
    return ", ".join(f"{amount} {name}" for name, amount in amount_texts(amounts).items())


def format_price(price: str) -> str:
    """Four decimals are enough to compare by, unless there is nothing before them."""
    known = Decimal(price)
    rounded = known.quantize(Decimal("0.0001"), ROUND_HALF_UP)
    return price if known and rounded < Decimal("0.001") else f"{rounded.normalize():f}"


def short_bytes(amount: str) -> str:
    """Bytes in the largest unit that leaves a number before the point: "7597392Ki" is "7.2Gi"."""
    try:
        rest = Quantity.parse(amount).rounded_down(0)
    except InvalidQuantity:
        return amount
    power = 0
    tenths = rest * 10
    while tenths >= 10240 and power + 1 < len(_UNITS):
        tenths, power = tenths // 1024, power + 1
    whole, tenth = divmod(tenths, 10)
    return f"{whole}.{tenth}{_UNITS[power]}" if tenth and whole < 100 else f"{whole}{_UNITS[power]}"


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
        for name in names:
            print(escapes.line(name))
    else:
        print_text(text())


def show_list(
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

    return escapes.quoted(msgspec.json.format(msgspec.json.encode(body), indent=2).decode())


def json_line(body: object) -> str:
    import msgspec

    return escapes.quoted(msgspec.json.encode(body).decode())


def yaml(body: object) -> str:
    import msgspec
    import yaml as library

    content = msgspec.to_builtins(body)
    text = library.safe_dump(content, sort_keys=False, allow_unicode=True)
    if escapes.lines(text) == text:
        return text
    # It writes all beyond ASCII as it is, or nothing of it.
    return library.safe_dump(content, sort_keys=False)


def print_text(text: str) -> None:
    """For people, on one line or several."""
    print(escapes.lines(text))


def note(text: str) -> None:
    """One line for the person at the terminal; a program that reads the output does not see it."""
    # Where nobody reads it, the exit code tells.
    with contextlib.suppress(OSError):
        print(escapes.line(text), file=sys.stderr)


def print_error(error: object) -> None:
    """An error, of which the text may come from others: as one line."""
    note(f"error: {' '.join(str(error).split())}")


def width() -> int | None:
    """Where to wrap: at the terminal's edge. What goes into a file or a pipe is not wrapped."""
    return shutil.get_terminal_size((tables.WIDTH, 24)).columns if sys.stdout.isatty() else None


def now() -> datetime:
    return datetime.now(UTC)
