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
from kubelend.cli.options import flag
from kubelend.cli.output import Column, ExitCode, OutputFormat, Printer
from kubelend.core.errors import InvalidInput
from kubelend.core.resources import Resources
from kubelend.kits import tables
from kubelend.wire.admin_bodies import AuditLine

if TYPE_CHECKING:
    from kubelend.core import audit_log as core_audit_log
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
    flag("Store of the broker, which may be running; it is only read.", envvar="KUBELEND_STORE"),
]
AsJson = Annotated[bool, flag("Print the report as JSON.", None, "--json")]


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


def check_store(store: StoreFile = DEFAULT_STORE, json: AsJson = False) -> None:
    """Check all invariants of a store, and compare it with its audit log."""
    report = _check(store)
    print(output.json(report) if json else _report_text(report))
    if report.violations:
        raise typer.Exit(ExitCode.VIOLATED)


def _check(store: str) -> StoreReport:
    from kubelend.core import audit as invariants
    from kubelend.stores import factory

    ledger, details, gone = factory.audit_store(store)
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
    verb = "is" if report.violations == 1 else "are"
    violated = f"{tables.format_count(report.violations, 'invariant')} {verb} violated"
    lines = [
        f"{violated if report.violations else 'No violations'}: {clusters}, {reservations}"
        f" ({report.live} live), revision {report.revision}",
        *report.details,
    ]
    if report.overcommitted:
        names = ", ".join(report.overcommitted)
        lines.append(f"Overcommitted by their own pods, no violation: {names}")
    if report.gone:
        lines.append(f"Deleted together with their objects, no violation: {', '.join(report.gone)}")
    return "\n".join(lines)


@options.takes(settings=options.client)
def audit_log(
    *,
    actor: Annotated[str, flag("Only actions of this caller.", "NAME")] = "",
    action: Annotated[str, flag("Only this event or operation.", "NAME")] = "",
    subject: Annotated[str, flag("Only changes of this cluster or object.", "NAME")] = "",
    refused: Annotated[bool, flag("Only rejected calls.", None, "--refused")] = False,
    since: Annotated[str, flag("Not before this time.", "TIME")] = "",
    until: Annotated[str, flag("Before this time.", "TIME")] = "",
    tail: Annotated[int, flag("Number of lines, the newest.", "N", min=1)] = 50,
    format: options.Output = OutputFormat.TABLE,
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
    lines, wide = found[::-1], format is OutputFormat.WIDE
    LINES.show_list(lines, format, text=lambda: audit_table(lines, output.width(), wide=wide))


_FILTER_FLAGS: Final = calls.fields_of("", "actor", "action", "subject", "since", "until")


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
        flag(
            "Head that an earlier verify printed: that line has to be there unchanged.",
            "NUMBER:DIGEST",
        ),
    ] = "",
    json: AsJson = False,
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


def _lines(opened: AnyStore, after: int) -> Iterator[core_audit_log.AuditLine]:
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
    state = "broken" if report.breaks else "intact"
    breaks = f", {tables.format_count(report.breaks, 'break')}" if report.breaks else ""
    heading = f"The audit log is {state}: {tables.format_count(report.lines, 'line')}{breaks}"
    return "\n".join([heading, *report.details, *report.notes, f"Head: {report.head}"])


def audit_table(lines: list[AuditLine], width: int | None, *, wide: bool) -> str:
    """A table; on a terminal the changes are below each line, in a file behind it."""
    if width is None:
        return LINES.table(lines, output.now(), wide=wide)
    without_changes = LINES._replace(columns=LINES.columns[:-1])
    heading, *rows = without_changes.table(lines, output.now(), wide=wide).splitlines()
    below = [textwrap.indent(textwrap.fill(_line_text(line), width - 6), " " * 6) for line in lines]
    pairs = zip(rows, below, strict=True)
    return "\n".join([heading, *(text for pair in pairs for text in pair if text)])


def _actor(line: AuditLine) -> str:
    role, name = line.actor.role, line.actor.name
    return name if role == name else f"{role} {name}".strip()


def _origin(line: AuditLine) -> str:
    return line.actor.remote + (f" via {line.actor.via}" if line.actor.via else "")


def _line_text(line: AuditLine) -> str:
    if line.code:
        return f"rejected: {line.code}: {line.message}"
    changes = [f"{name}: {_change(line, name)}" for name in line.before | line.after]
    return "; ".join([*changes, line.message] if line.message else changes)


def _change(line: AuditLine, name: str) -> str:
    after = _value_text(name, line.after.get(name))
    return f"{_value_text(name, line.before[name])} -> {after}" if name in line.before else after


def _value_text(name: str, value: Any) -> str:
    """A value in words; of an unknown kind, as JSON."""
    match value:
        case None:
            return "none"
        case str():
            return value
        case {"serial": serial, "expires_at": end}:
            return f"{serial} until {end}"
        case dict() if name == "resources":
            named = {name: amount for name, amount in value.items() if name != "extended"}
            return Resources.of({**named, **value.get("extended", {})}).describe()
    return msgspec.json.encode(value).decode()


LINES: Final[Printer[AuditLine]] = Printer(
    "AuditLine",
    "lines",
    lambda line: f"auditline/{line.number}",
    [
        Column("LINE", lambda line, _: str(line.number)),
        Column("TIME", lambda line, _: f"{line.at:%Y-%m-%dT%H:%M:%SZ}"),
        Column("ACTOR", lambda line, _: _actor(line)),
        Column("FROM", lambda line, _: _origin(line), is_wide=True),
        Column("ACTION", lambda line, _: line.action),
        Column("SUBJECT", lambda line, _: line.subject),
        Column("CHANGE", lambda line, _: _line_text(line)),
    ],
)
