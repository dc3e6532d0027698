"""`kubelend audit`: `check` a store, read the audit `log`, and `verify` its hash chain."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer

from kubelend.apps.settings import ClientSettings
from kubelend.cli import calls, options, output
from kubelend.cli.exit_codes import ExitCode
from kubelend.cli.output import Format
from kubelend.core.errors import InvalidInput
from kubelend.core.resources import Resources
from kubelend.kits import tables
from kubelend.wire import admin_bodies

if TYPE_CHECKING:
    from kubelend.core.audit_log import AuditLine
    from kubelend.stores.factory import AnyStore

READ_BATCH: Final = 1000
DEFAULT_STORE: Final = "kubelend.db"


class StoreReport(msgspec.Struct, frozen=True):
    """What `audit check --json` prints; the keys are API."""

    violations: int
    clusters: int
    reservations: int
    live: int
    overcommitted: list[str]
    revision: int
    details: list[str]
    gone: list[str]


StoreFile = Annotated[
    str,
    typer.Option(
        help="Store of the broker, which may be running; it is only read.",
        envvar="KUBELEND_STORE",
    ),
]


def audit(
    context: typer.Context,
    store: Annotated[str, typer.Option(hidden=True)] = "",
    json: Annotated[bool, typer.Option("--json", hidden=True)] = False,
) -> None:
    """`kubelend audit check --store`, the former name of `audit check`; without flags, the help."""
    if context.invoked_subcommand is not None:
        return
    if store or json:
        check_store(store or os.environ.get("KUBELEND_STORE") or DEFAULT_STORE, json)
    else:
        print(context.get_help())


def check_store(
    store: StoreFile = DEFAULT_STORE,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Check all invariants of a store, and compare it with its audit log."""
    report = _check(store)
    print(output.json(report) if json else _report_text(report))
    if report.violations:
        raise typer.Exit(ExitCode.VIOLATED)


def _check(store: str) -> StoreReport:
    from kubelend.core import audit as invariants
    from kubelend.stores import audit as stores_audit

    ledger, details, gone = stores_audit.audit_store(store)
    return StoreReport(
        violations=len(details),
        clusters=len(ledger.clusters),
        reservations=len(ledger.reservations),
        live=sum(found.is_live for found in ledger.reservations.values()),
        overcommitted=[str(found) for found in invariants.overcommitted_clusters(ledger)],
        revision=ledger.revision,
        details=details,
        gone=[str(found) for found in gone],
    )


def _report_text(report: StoreReport) -> str:
    clusters = tables.format_count(report.clusters, "cluster")
    reservations = tables.format_count(report.reservations, "reservation")
    lines = [
        f"{_report_heading(report.violations)}: {clusters}, {reservations}"
        f" ({report.live} live), revision {report.revision}",
        *report.details,
    ]
    if report.overcommitted:
        names = ", ".join(report.overcommitted)
        lines.append(f"Overcommitted by their own pods, no violation: {names}")
    if report.gone:
        lines.append(f"Deleted together with their objects, no violation: {', '.join(report.gone)}")
    return "\n".join(lines)


def _report_heading(violations: int) -> str:
    if not violations:
        return "No violations"
    verb = "is" if violations == 1 else "are"
    return f"{tables.format_count(violations, 'invariant')} {verb} violated"


@options.takes(settings=options.client)
def audit_log(
    *,
    actor: Annotated[str, typer.Option(help="Only actions of this caller.", metavar="NAME")] = "",
    action: Annotated[str, typer.Option(help="Only this event or operation.")] = "",
    subject: Annotated[
        str, typer.Option(help="Only changes of this cluster or object.", metavar="NAME")
    ] = "",
    refused: Annotated[bool, typer.Option("--refused", help="Only rejected calls.")] = False,
    since: Annotated[str, typer.Option(help="Not before this time.", metavar="TIME")] = "",
    until: Annotated[str, typer.Option(help="Before this time.", metavar="TIME")] = "",
    tail: Annotated[int, typer.Option(help="Number of lines, the newest.", min=1)] = 50,
    format: options.Output = Format.TABLE,
    settings: ClientSettings,
) -> None:
    """Print the audit log: every change and every rejected call, oldest first."""
    named = {"actor": actor, "action": action, "subject": subject, "since": since, "until": until}
    filters = {name: value for name, value in named.items() if value}
    if refused:
        filters["refused"] = "true"
    found = calls.call_broker(
        settings, lambda client: client.audit.latest(filters, tail), _FILTER_FLAGS
    )
    lines = found[::-1]
    output.show_list(
        lines,
        format,
        kind="AuditLine",
        noun="lines",
        names=[f"auditline/{line.number}" for line in lines],
        text=lambda: audit_table(lines, wide=format is Format.WIDE, width=output.width()),
    )


_FILTER_FLAGS: Final = {
    name: f"--{name}" for name in ("actor", "action", "subject", "since", "until")
}


class ChainReport(msgspec.Struct, frozen=True):
    """What `audit verify --json` prints; the keys are API."""

    breaks: int
    lines: int
    first: int
    last: int
    head: str
    details: list[str]
    notes: list[str]


def verify_chain(
    store: StoreFile = DEFAULT_STORE,
    anchor: Annotated[
        str,
        typer.Option(
            help="Head that an earlier verify printed: that line has to be there unchanged.",
            metavar="NUMBER:DIGEST",
        ),
    ] = "",
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Verify the hash chain of the audit log: finds lines that were changed or removed."""
    from kubelend.stores import factory

    wanted = _parse_anchor(anchor) if anchor else None
    opened = factory.open_readonly(store)
    try:
        report = _verify(opened, wanted)
    finally:
        opened.close()
    print(output.json(report) if json else _chain_text(report))
    if report.breaks:
        raise typer.Exit(ExitCode.VIOLATED)


def _verify(opened: AnyStore, anchor: tuple[int, str] | None) -> ChainReport:
    from kubelend.core import audit_log as core_audit_log

    start, end = opened.audit_log_bounds()
    details = list(core_audit_log.verify_chain(_lines(opened, start.number), start, end))
    notes: list[str] = []
    if anchor is not None and anchor[0] < start.number:
        notes.append(
            f"line {anchor[0]} of the anchor is older than the retention: use the new head"
        )
    elif anchor is not None:
        details += _anchor_problems(opened, *anchor)
    return ChainReport(
        breaks=len(details),
        lines=end.number - start.number,
        first=start.number + 1,
        last=end.number,
        head=f"{end.number}:{end.digest.hex()}",
        details=details,
        notes=notes,
    )


def _lines(opened: AnyStore, after: int) -> Iterator[AuditLine]:
    while lines := opened.audit_lines(after, READ_BATCH):
        yield from lines
        after = lines[-1].number


def _parse_anchor(text: str) -> tuple[int, str]:
    number, _, digest = text.partition(":")
    if not (number.isascii() and number.isdigit() and len(digest) == 64):
        raise InvalidInput(
            f"--anchor: {text[:80]!r} is no head of an audit log",
            hint="write NUMBER:DIGEST, as `kubelend audit verify` prints it",
        )
    return int(number), digest.lower()


def _anchor_problems(opened: AnyStore, number: int, digest: str) -> Iterator[str]:
    start, _ = opened.audit_log_bounds()
    at = start if number == start.number else None
    found = at or next((line.head for line in opened.audit_lines(number - 1, 1)), None)
    if found is None or found.number != number:
        yield f"line {number} of the anchor is missing"
    elif found.digest.hex() != digest:
        yield f"line {number} is not the one of the anchor: the audit log was rewritten"


def _chain_text(report: ChainReport) -> str:
    counted = tables.format_count(report.lines, "line")
    if report.breaks:
        heading = (
            f"The audit log is broken: {counted}, {tables.format_count(report.breaks, 'break')}"
        )
    else:
        heading = f"The audit log is intact: {counted}"
    return "\n".join([heading, *report.details, *report.notes, f"Head: {report.head}"])


def audit_table(
    lines: list[admin_bodies.AuditLine], *, wide: bool, width: int | None = None
) -> str:
    """A table; on a terminal the changes are below each line, in a file behind it."""
    headers = ["LINE", "TIME", "ACTOR", "ACTION", "SUBJECT"]
    if wide:
        headers.insert(3, "FROM")
    rows = [_row(line, wide=wide) for line in lines]
    if width is None:
        both = zip(rows, lines, strict=True)
        return tables.format_table(
            [*headers, "CHANGE"], [[*row, _line_text(line)] for row, line in both]
        )
    heading, *shown = tables.format_table(headers, rows).splitlines()
    below = (_wrapped(_line_text(line), width) for line in lines)
    return "\n".join(
        [heading, *(text for pair in zip(shown, below, strict=True) for text in pair if text)]
    )


def _wrapped(text: str, width: int) -> str:
    indent = " " * 6
    return textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent)


def _row(line: admin_bodies.AuditLine, *, wide: bool) -> list[str]:
    who = f"{line.actor.role} {line.actor.name}".strip()
    cells = [
        str(line.number),
        f"{line.at:%Y-%m-%dT%H:%M:%SZ}",
        who if line.actor.role != line.actor.name else line.actor.name,
        line.action,
        line.subject,
    ]
    if wide:
        through = f" via {line.actor.via}" if line.actor.via else ""
        cells.insert(3, f"{line.actor.remote}{through}")
    return cells


def _line_text(line: admin_bodies.AuditLine) -> str:
    if line.code:
        return f"rejected: {line.code}: {line.message}"
    changes = [f"{name}: {_change(line, name)}" for name in line.before | line.after]
    return "; ".join([*changes, line.message] if line.message else changes)


def _change(line: admin_bodies.AuditLine, name: str) -> str:
    after = _value_text(name, line.after.get(name))
    return f"{_value_text(name, line.before[name])} -> {after}" if name in line.before else after


def _value_text(name: str, value: Any) -> str:
    """A value in words; of an unknown kind, as JSON."""
    match value:
        case None:
            return "none"
        case str():
            return value
        case {"serial": serial, "ends_at": end}:
            return f"{serial} until {end}"
        case dict() if name == "resources":
            return Resources.of(_amounts(value)).describe()
    return msgspec.json.encode(value).decode()


def _amounts(value: dict[str, Any]) -> dict[str, int]:
    named = {name: amount for name, amount in value.items() if name != "extended"}
    return {**named, **value.get("extended", {})}
