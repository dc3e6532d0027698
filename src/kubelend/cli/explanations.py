"""Why a request fits where it fits and nowhere else: `explain`, and the dry run of `borrow`."""

from __future__ import annotations

import textwrap
from typing import Annotated

import typer

from kubelend.apps.settings import ClientSettings
from kubelend.cli import amounts, calling, escapes, options, output, tables, wishes
from kubelend.cli.output import Format
from kubelend.core.errors import InvalidInput
from kubelend.wire import bodies

MOST = 100
"""How many clusters a broker looks at closely."""

HEADERS = ("CLUSTER", "FITS", "SCORE", "PRICE", "WHY NOT, AND WHAT WOULD HELP")


@options.takes(request=wishes.read, settings=options.client)
def explain(
    request: bodies.ReservationRequest | None,
    name: Annotated[
        str,
        typer.Argument(metavar="[RESERVATION]", help="Explain this one, anew.", show_default=False),
    ] = "",
    limit: Annotated[
        int, typer.Option(help="How many clusters to show at most.", min=1, max=MOST)
    ] = 20,
    format: options.Output = Format.TABLE,
    *,
    settings: ClientSettings,
) -> None:
    """Where a request would fit, best first, and why not elsewhere. Nothing changes.

    For example: kubelend explain --cpu 4 --memory 8Gi --max-price 0.50
    """
    _check(name, request)
    if name:
        found = calling.call(settings, lambda desk: desk.explain_reservation(name, limit=limit))
    else:
        asked = wishes.complete(request)
        found = calling.call(settings, lambda desk: desk.explain(asked, limit=limit))
    show(found, format)


def _check(name: str, request: bodies.ReservationRequest | None) -> None:
    if name and request is not None:
        raise InvalidInput(
            "either a reservation or amounts, not both",
            hint="leave out the name, or the flags that say what is wanted",
        )
    if not name and request is None:
        raise InvalidInput(
            "one of both is needed: a reservation, or amounts",
            hint="give --cpu and --memory, or the name of a reservation",
        )


def show(found: bodies.Explanation, format: Format) -> None:
    fitting = [one.cluster_id for one in found.candidates if one.fits]
    output.show(found, format, text=lambda: text(found, output.width()), names=fitting)


def text(found: bodies.Explanation, width: int | None) -> str:
    """The sum, the clusters, and the nearest remedy if none fits."""
    parts = [
        escapes.line(found.summary),
        *(_filled(f"Quota: {text}.", width) for text in found.quota),
    ]
    if found.candidates:
        rows = [_cells(one) for one in found.candidates]
        parts.append(tables.columns(HEADERS, rows, width=width))
    if found.total > len(found.candidates) > 0:
        more = "; --limit shows more" if len(found.candidates) < MOST else ""
        parts.append(f"Shown {len(found.candidates)} of {found.total}{more}.")
    if found.remedy is not None:
        parts.append(_filled(f"Nearest: {found.remedy.text}.", width))
    return "\n\n".join(parts)


def _filled(text: str, width: int | None) -> str:
    text = escapes.line(text)
    return text if width is None else textwrap.fill(text, width)


def _cells(one: bodies.Candidate) -> tuple[str, ...]:
    why = ", ".join(one.refusals)
    if one.remedy is not None:
        # The row names the cluster already.
        _, _, step = one.remedy.text.partition(" fits if you ")
        why = f"{why}: {step or one.remedy.text}"
    return (
        one.cluster_id,
        "yes" if one.fits else "no",
        "" if one.score is None else f"{one.score:.4f}",
        f"{amounts.money(one.price_per_hour)} {one.currency}/h" if one.price_per_hour else "",
        why,
    )
