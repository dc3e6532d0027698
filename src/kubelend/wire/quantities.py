"""Conversion of amounts between wire bodies and core vectors.

Separate from `wire.conversion`, because agents import it and must not load numpy.
"""

from __future__ import annotations

from collections.abc import Mapping

from kubelend.core import resources
from kubelend.core.errors import InvalidInput, InvalidQuantity
from kubelend.wire import bodies


def parse_requested(body: bodies.Quantities, where: str) -> resources.Resources:
    """Parse requested amounts, rounded up; errors name the field."""
    return _parse_common(body) or resources.parse_requested(_texts(body), where)


def parse_offered(body: bodies.Quantities, where: str) -> resources.Resources:
    """Parse offered amounts, rounded down; errors name the field."""
    return _parse_common(body) or resources.parse_offered(_texts(body), where)


def parse_reservation_amounts(body: bodies.Quantities) -> resources.Resources:
    """Parse the amounts of a reservation request, rounded up. CPU and memory are required."""
    amounts = parse_requested(body, "requestedResources")
    for name in ("cpu", "memory"):
        if not amounts.amount(name):
            raise InvalidQuantity(
                f"requestedResources.{name}: must be more than zero",
                hint="use for example 500m or 256Mi",
            )
    return amounts


def to_quantities(amounts: resources.Resources) -> bodies.Quantities:
    """Format amounts as a body."""
    text = resources.format_amount
    return bodies.Quantities(
        text("cpu", amounts.cpu),
        text("memory", amounts.memory),
        text("gpu", amounts.gpu) if amounts.gpu else "",
        text("storage", amounts.storage) if amounts.storage else "",
        {name: text(name, amount) for name, amount in sorted(amounts.extended.items())},
    )


def requested_fields(
    amounts: resources.Resources,
) -> tuple[str, str, str, str, dict[str, str | int]]:
    """Format amounts as the leading fields of `objects.RequestedAmounts`."""
    texts = amounts.quantities()
    named = (texts.pop("cpu"), texts.pop("memory"), texts.pop("gpu", ""), texts.pop("storage", ""))
    return *named, {**texts}


def _parse_common(body: bodies.Quantities) -> resources.Resources | None:
    """Fast path: parse amounts in common notations that need no rounding. None if there are others."""
    if body.extended:
        return None
    return resources.parse_exact(str(body.cpu), str(body.memory), str(body.gpu), str(body.storage))


def _texts(body: bodies.Quantities) -> Mapping[str, str]:
    texts = {"cpu": str(body.cpu), "memory": str(body.memory)}
    if body.gpu != "":
        texts["gpu"] = str(body.gpu)
    if body.storage != "":
        texts["storage"] = str(body.storage)
    for name, text in body.extended.items():
        if name in _NAMED_RESOURCES:
            raise InvalidInput(
                f"extended.{name}: not an extended resource", hint=f"use the field {name}"
            )
        texts[name] = str(text)
    return texts


_NAMED_RESOURCES = frozenset({"cpu", "memory", "gpu", "storage"})
