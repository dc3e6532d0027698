"""Amounts of resources in words. Tables round what is large; lists and programs get it exactly."""

from __future__ import annotations

from decimal import ROUND_HALF_UP, Decimal

from kubelend.core.errors import InvalidQuantity
from kubelend.core.quantities import Quantity
from kubelend.wire import bodies

_UNITS = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")


def texts(amounts: bodies.Amounts | None) -> dict[str, str]:
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


def sentence(amounts: bodies.Quantities) -> str:
    """ "500m cpu, 256Mi memory" """
    return ", ".join(f"{amount} {name}" for name, amount in texts(amounts).items())


def money(price: str) -> str:
    """Four decimals are enough to compare by, unless there is nothing before them."""
    known = Decimal(price)
    rounded = known.quantize(Decimal("0.0001"), ROUND_HALF_UP)
    return price if known and rounded < Decimal("0.001") else f"{rounded.normalize():f}"


def short(amount: str) -> str:
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
