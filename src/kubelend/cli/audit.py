"""`kubelend audit`: does a store still keep every promise?"""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from kubelend.cli import output, tables
from kubelend.cli.exits import Code


class Report(msgspec.Struct, frozen=True):
    """What was counted and what was found; the keys are API."""

    violations: int
    clusters: int
    reservations: int
    live: int
    overcommitted: list[str]
    revision: int
    details: list[str]
    gone: list[str]


def audit(
    context: typer.Context,
    store: Annotated[
        str,
        typer.Option(help="The broker's store; it may be running.", envvar="KUBELEND_STORE"),
    ] = "kubelend.db",
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Check all invariants of a store from scratch, and hold it against its journal. It is only read."""
    if context.invoked_subcommand is not None:
        return
    report = _report(store)
    print(output.json(report) if json else _text(report))
    if report.violations:
        raise typer.Exit(Code.VIOLATED)


def _report(store: str) -> Report:
    from kubelend.apps import audits
    from kubelend.core import audit as invariants

    ledger, details, gone = audits.of(store)
    return Report(
        violations=len(details),
        clusters=len(ledger.clusters),
        reservations=len(ledger.reservations),
        live=sum(found.is_live for found in ledger.reservations.values()),
        overcommitted=[str(found) for found in invariants.overcommitted(ledger)],
        revision=ledger.revision,
        details=details,
        gone=[str(found) for found in gone],
    )


def _text(report: Report) -> str:
    clusters = tables.counted(report.clusters, "cluster")
    reservations = tables.counted(report.reservations, "reservation")
    lines = [
        f"{_verdict(report.violations)}: {clusters}, {reservations}"
        f" ({report.live} live), revision {report.revision}",
        *report.details,
    ]
    if report.overcommitted:
        names = ", ".join(report.overcommitted)
        lines.append(f"Overcommitted by their own pods, no violation: {names}")
    if report.gone:
        lines.append(f"Gone with their deleted objects, no violation: {', '.join(report.gone)}")
    return "\n".join(lines)


def _verdict(violations: int) -> str:
    if not violations:
        return "All is well"
    verb = "is" if violations == 1 else "are"
    return f"{tables.counted(violations, 'invariant')} {verb} violated"
