"""What commands print: tables and sentences for people; JSON, YAML and names for programs.

Control characters in text from others are escaped: see `kits.tables`. A list is `{kind, items}`, an
object has its `kind` beside the fields that the broker sends, and a name is `kind/name`, which every command
takes where it takes a name. Scripts rely on the exit codes: they are API, and documented.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from decimal import ROUND_HALF_UP, Decimal
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import typer

from kubelend.core import errors
from kubelend.core.errors import InvalidInput, InvalidQuantity
from kubelend.core.quantities import Quantity
from kubelend.kits import tables

if TYPE_CHECKING:
    import msgspec

    from kubelend.wire import bodies


Body = TypeVar("Body", bound="msgspec.Struct")


class OutputFormat(StrEnum):
    """What `-o` takes."""

    TABLE = "table"  # for people
    WIDE = "wide"  # the same with more columns
    JSON = "json"  # the kind, and the body as the broker sends it
    YAML = "yaml"  # the same as YAML
    NAME = "name"  # kind/name, one for each line


class Column(NamedTuple, Generic[Body]):
    """A column of a table."""

    header: str
    cell: Callable[[Body, datetime], str]
    """The text for an object; the time is now."""
    is_wide: bool = False
    """Shown by `-o wide` only."""
    width: int = 0
    """For rows that are printed one at a time, before the longest is known."""


class Printer(NamedTuple, Generic[Body]):
    """Prints the objects of one kind in all formats."""

    kind: str
    plural: str
    name: Callable[[Body], str]
    """`kind/name`"""
    columns: Sequence[Column[Body]]
    wraps: bool = False
    """Whether the last column is wrapped at the edge of the terminal."""

    def table(self, found: Iterable[Body], now: datetime, *, wide: bool = False) -> str:
        shown = self.shown(wide=wide)
        rows = [[column.cell(one, now) for column in shown] for one in found]
        edge = width() if self.wraps else None
        return tables.format_table([column.header for column in shown], rows, width=edge)

    def shown(self, *, wide: bool) -> list[Column[Body]]:
        return [column for column in self.columns if wide or not column.is_wide]

    def show(self, one: Body, format: OutputFormat, text: Callable[[], str] | None = None) -> None:
        """Print one object; for people as this text, or as a table."""
        text = text or (lambda: self.table([one], now(), wide=format is OutputFormat.WIDE))
        show(one, format, text, [self.name(one)], self.kind)

    def show_list(
        self,
        found: Sequence[Body],
        format: OutputFormat,
        where: str = "",
        text: Callable[[], str] | None = None,
    ) -> None:
        """Print a list; for people, an empty one is a sentence on standard error."""
        if format in _STRUCTURED:
            listed = {"kind": f"{self.kind}List", "items": [typed(self.kind, one) for one in found]}
            _show(listed, format, str, ())
        elif found:
            text = text or (lambda: self.table(found, now(), wide=format is OutputFormat.WIDE))
            _show(found, format, text, map(self.name, found))
        else:
            note(f"No {self.plural} found{where}.")


def show(
    body: msgspec.Struct,
    format: OutputFormat,
    text: Callable[[], str],
    names: Iterable[str],
    kind: str = "",
) -> None:
    """Print one body in a format; `text` is for people, `names` (`kind/name`) for `-o name`."""
    _show(typed(kind, body) if format in _STRUCTURED and kind else body, format, text, names)


def typed(kind: str, body: msgspec.Struct) -> dict[str, Any]:
    """A body with its kind before its own fields."""
    import msgspec

    return {"kind": kind, **msgspec.to_builtins(body)}


def _show(
    value: object, format: OutputFormat, text: Callable[[], str], names: Iterable[str]
) -> None:
    if format is OutputFormat.JSON:
        print(json(value))
    elif format is OutputFormat.YAML:
        print(yaml(value), end="")
    elif format is OutputFormat.NAME:
        for name in names:
            print(tables.sanitize_line(name))
    else:
        print_text(text())


_STRUCTURED = frozenset({OutputFormat.JSON, OutputFormat.YAML})


def details(pairs: Iterable[tuple[str, str | int | datetime | None]], now: datetime) -> str:
    """`Name:  value` lines; without what is not there."""
    return tables.format_pairs(
        (name, tables.format_time(value, now) if isinstance(value, datetime) else str(value))
        for name, value in pairs
        if value is not None
    )


def json(body: object, indent: int = 2) -> str:
    """Indented; with a negative indent, on one line."""
    import msgspec

    content = msgspec.json.encode(body)
    return tables.sanitize_json(msgspec.json.format(content, indent=indent).decode())


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
    if not sys.stdout.isatty():
        return None
    return shutil.get_terminal_size((tables.DEFAULT_WIDTH, 24)).columns


def time_left(end: datetime | None, now: datetime) -> str:
    return "" if end is None else tables.format_time_left(end, now)


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


def format_amounts(amounts: bodies.Amounts | None) -> str:
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


class ExitCode(IntEnum):
    """How a command ended."""

    OK = 0
    UNEXPECTED = 1
    USAGE = 2
    NOT_FOUND = 3
    FORBIDDEN = 4
    NO_CAPACITY = 5
    LIMIT_EXCEEDED = 6
    UNAVAILABLE = 7
    VIOLATED = 8
    INTERRUPTED = 130

    @property
    def meaning(self) -> str:
        return _MEANINGS[self]


_MEANINGS = {
    ExitCode.OK: "success, also if the reader of the output stopped early (`| head`)",
    ExitCode.UNEXPECTED: "unexpected error; `--debug` before the command prints the traceback."
    " Also if the output could not be written",
    ExitCode.USAGE: "a flag, an argument or a file is wrong",
    ExitCode.NOT_FOUND: "no such cluster, reservation or other object",
    ExitCode.FORBIDDEN: "the certificate is not accepted, or its holder (or the user of the kubeconfig) lacks"
    " the permission",
    ExitCode.NO_CAPACITY: "no cluster fits, or the state of the object does not allow it",
    ExitCode.LIMIT_EXCEEDED: "a quota, a rate limit or a size limit is exceeded",
    ExitCode.UNAVAILABLE: "the broker, its store or the cluster cannot be reached; retrying may help",
    ExitCode.VIOLATED: "an invariant of the store, or the chain of the audit log, is violated"
    " (`kubelend audit check`)",
    ExitCode.INTERRUPTED: "interrupted by Ctrl-C, or not confirmed",
}

_CODES: dict[type[errors.KubelendError], ExitCode] = {
    errors.KubelendError: ExitCode.UNEXPECTED,
    errors.InvalidInput: ExitCode.USAGE,
    errors.InvalidSettings: ExitCode.USAGE,
    errors.InvalidIdentity: ExitCode.FORBIDDEN,
    errors.Forbidden: ExitCode.FORBIDDEN,
    errors.QuotaExceeded: ExitCode.LIMIT_EXCEEDED,
    errors.NotFound: ExitCode.NOT_FOUND,
    errors.Conflict: ExitCode.NO_CAPACITY,
    errors.LimitExceeded: ExitCode.LIMIT_EXCEEDED,
    errors.TooSlow: ExitCode.UNAVAILABLE,
    errors.Unavailable: ExitCode.UNAVAILABLE,
    errors.CertificateRefused: ExitCode.FORBIDDEN,
}
"""A class that is not here has the code of its nearest base."""


def exit_code_for(error: errors.KubelendError) -> ExitCode:
    return next(_CODES[kind] for kind in type(error).__mro__ if kind in _CODES)


def with_detail(error: errors.KubelendError, more: str) -> errors.KubelendError:
    """The same error, and so the same code, with more text."""
    return type(error)(f"{error.message}; {more}", hint=error.hint)
