"""What commands print: tables and sentences for people; JSON, YAML and names for programs.

Control characters in text from others are escaped: see `kits.tables`. A list is `{kind, items}`, an
object has its `kind` beside the fields that the broker sends, and a name is `kind/name`, which every command
takes where it takes a name.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from decimal import ROUND_HALF_UP, Decimal
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import typer

from kubelend.core.errors import InvalidInput, InvalidQuantity
from kubelend.core.quantities import Quantity
from kubelend.kits import tables

if TYPE_CHECKING:
    import msgspec

    from kubelend.wire import bodies


class Format(StrEnum):
    """What `-o` takes."""

    TABLE = "table"  # for people
    WIDE = "wide"  # the same with more columns
    JSON = "json"  # the kind, and the body as the broker sends it
    YAML = "yaml"  # the same as YAML
    NAME = "name"  # kind/name, one for each line


def show(
    body: msgspec.Struct,
    format: Format,
    *,
    text: Callable[[], str],
    kind: str = "",
    names: Iterable[str] = (),
) -> None:
    """Print one body in a format; `text` is for people, `names` (`kind/name`) for `-o name`."""
    _show(typed(kind, body) if format in _STRUCTURED and kind else body, format, text, names)


def show_list(
    items: Sequence[msgspec.Struct],
    format: Format,
    *,
    kind: str,
    noun: str,
    names: list[str],
    text: Callable[[], str],
    where: str = "",
) -> None:
    """Print a list of bodies; for people, an empty one is a sentence on standard error."""
    if format in _STRUCTURED:
        listed = {"kind": f"{kind}List", "items": [typed(kind, one) for one in items]}
        _show(listed, format, text, names)
    elif items:
        _show(items, format, text, names)
    else:
        note(f"No {noun} found{where}.")


def typed(kind: str, body: msgspec.Struct) -> dict[str, Any]:
    """A body with its kind before its own fields."""
    import msgspec

    return {"kind": kind, **msgspec.to_builtins(body)}


def _show(value: object, format: Format, text: Callable[[], str], names: Iterable[str]) -> None:
    if format is Format.JSON:
        print(json(value))
    elif format is Format.YAML:
        print(yaml(value), end="")
    elif format is Format.NAME:
        for name in names:
            print(tables.sanitize_line(name))
    else:
        print_text(text())


_STRUCTURED = frozenset({Format.JSON, Format.YAML})


def json(body: object) -> str:
    import msgspec

    return tables.sanitize_json(msgspec.json.format(msgspec.json.encode(body), indent=2).decode())


def json_line(body: object) -> str:
    import msgspec

    return tables.sanitize_json(msgspec.json.encode(body).decode())


def yaml(body: object) -> str:
    import msgspec
    import yaml as library

    content = msgspec.to_builtins(body)
    text = library.safe_dump(content, sort_keys=False, allow_unicode=True)
    if tables.sanitize_lines(text) == text:
        return text
    # It writes all beyond ASCII as it is, or nothing of it.
    return library.safe_dump(content, sort_keys=False)


def print_text(text: str) -> None:
    """For people, on one line or several."""
    print(tables.sanitize_lines(text))


def note(text: str) -> None:
    """One line on standard error: for the person at the terminal, not for programs that read the output."""
    # If standard error is closed, there is still the exit code.
    with contextlib.suppress(OSError):
        print(tables.sanitize_line(text), file=sys.stderr)


def print_error(error: object) -> None:
    """An error, of which the text may come from others: as one line."""
    note(f"error: {' '.join(str(error).split())}")


def confirm(plan: Callable[[], str], question: str) -> None:
    """Print what would be done, and ask; `typer.Abort` if the answer is no."""
    if not sys.stdin.isatty():
        raise InvalidInput(
            "confirmation is required, and there is no terminal to ask on",
            hint="add --yes, or --dry-run to see what would be done",
        )
    print(tables.sanitize_lines(plan()), file=sys.stderr)
    typer.confirm(tables.sanitize_line(question), abort=True, err=True)


def width() -> int | None:
    """Where to wrap: at the terminal's edge. What goes into a file or a pipe is not wrapped."""
    return (
        shutil.get_terminal_size((tables.DEFAULT_WIDTH, 24)).columns
        if sys.stdout.isatty()
        else None
    )


def now() -> datetime:
    return datetime.now(UTC)


# -- amounts: tables round what is large; lists and programs get it exactly


def amount_texts(amounts: bodies.Amounts | None) -> dict[str, str]:
    """By resource, as the broker wrote them, without those that are not there."""
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
    """Four decimals are enough to compare by, unless all of them are zero."""
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


_UNITS = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
