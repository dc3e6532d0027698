"""How a provider decides on a ResourceSlice of class `kubelend`. Pure.

A slice is accepted with exactly the reserved amounts if this cluster holds the reservation for that requester
and the broker has signed a grant that covers it. One that was granted is never denied afterwards: Liqo leaves
its Quota as it is then, and no longer cordons it.
"""

from __future__ import annotations

from datetime import datetime
from typing import Final, NamedTuple

from kubelend.core import grants, resources
from kubelend.core.errors import InvalidInput
from kubelend.core.grants import Grant
from kubelend.core.resources import Resources
from kubelend.peerings import liqo_objects
from kubelend.peerings.liqo_objects import RESERVATION_LABEL, SLICE_CLASS, LiqoResource, Manifest

ACCEPTED, DENIED = "Accepted", "Denied"
NO_GRANT, INVALID_GRANT, UNKNOWN_KEY = "NoGrant", "InvalidGrant", "UnknownKey"
EXPIRED, NOT_YET_VALID = "Expired", "NotYetValid"
MORE_THAN_RESERVED, INVALID_QUANTITY = "MoreThanReserved", "InvalidQuantity"

_KEPT: Final = {EXPIRED, UNKNOWN_KEY, MORE_THAN_RESERVED, INVALID_QUANTITY}
"""Denials that leave an accepted slice with the reserved amounts: its grant was valid at that time."""
PASSING: Final = {UNKNOWN_KEY, NOT_YET_VALID}
"""Denials that time alone can end."""


class LentReservation(NamedTuple):
    """A reservation that this cluster holds."""

    requester: str
    resources: Resources
    expires_at: datetime | None = None
    """As the broker reports it now: later than in a grant that was signed before a renewal."""


class Denial(NamedTuple):
    """Why a slice is not accepted, or its grant does not count."""

    reason: str
    message: str


class SliceDecision(NamedTuple):
    """The decision of the provider on a slice."""

    status: str
    reason: str
    message: str
    amounts: dict[str, str] = {}  # noqa: RUF012 - never changed


def grant_denial(
    grant: Grant, reservation: str, lent: LentReservation, cluster: str, now: datetime
) -> Denial | None:
    """Why a grant with a valid signature does not cover a reservation of this cluster; None if it does.

    The grant proves that the broker has decided it. How long it lasts is what the broker reports now: a
    renewal does not reach the grant in a slice.
    """
    if grant.jti != reservation:
        return Denial("OtherReservation", f"the grant is of reservation {grant.jti}")
    if grant.sub != lent.requester:
        return Denial("OtherRequester", f"the grant is of requester {grant.sub}")
    if grant.aud != cluster or grant.iss != grants.GRANT_ISSUER:
        return Denial("OtherProvider", f"the grant is for provider {grant.aud}")
    try:
        granted = resources.parse_offered(grant.resources)
    except InvalidInput as error:
        return Denial(INVALID_GRANT, error.message)
    if not lent.resources.fits_in(granted):
        return Denial("MoreThanGranted", f"only {granted.describe()} is granted")
    return _grant_time_denial(grant, lent, now)


def _grant_time_denial(grant: Grant, lent: LentReservation, now: datetime) -> Denial | None:
    if now.timestamp() < grant.nbf - grants.LEEWAY:
        return Denial(NOT_YET_VALID, f"the grant of {grant.jti} is not valid yet")
    renewed = grant.exp if lent.expires_at is None else lent.expires_at.timestamp()
    if now.timestamp() >= max(grant.exp, renewed):
        return Denial(EXPIRED, f"the grant of {grant.jti} has expired")
    return None


def decide_slice(
    found: LiqoResource,
    requester: str,
    lent: LentReservation | None,
    unproven: Denial | None = None,
) -> SliceDecision | None:
    """Returns the decision on a slice; None if it is not for us, or not authenticated by Liqo yet.

    `unproven` is why its grant does not count.
    """
    if not is_ours(found) or not is_accepted(found, "Authentication"):
        return None
    name = liqo_objects.reservation_of(found)
    if lent is None:
        return SliceDecision(DENIED, "NotReserved", f"this cluster holds no reservation {name}")
    if requester != lent.requester:
        return SliceDecision(DENIED, "OtherRequester", f"reservation {name} is not yours")
    denial = unproven or _amounts_denial(found, lent)
    if denial is not None and not (denial.reason in _KEPT and is_granted(found)):
        return SliceDecision(DENIED, *denial)
    amounts = liqo_objects.slice_amounts(lent.resources)
    message = f"reservation {name}" + (f"; {denial.message}" if denial else "")
    return SliceDecision(ACCEPTED, "Reserved", message, amounts)


def _amounts_denial(found: LiqoResource, lent: LentReservation) -> Denial | None:
    try:
        wanted = liqo_objects.parse_amounts(found.spec.get("resources") or {})
    except InvalidInput as error:
        return Denial(INVALID_QUANTITY, error.message)
    if wanted.fits_in(lent.resources):
        return None
    return Denial(MORE_THAN_RESERVED, f"only {lent.resources.describe()} is reserved")


def is_ours(found: LiqoResource) -> bool:
    """Slices of other classes are Liqo's, or of other controllers."""
    return found.spec.get("class") == SLICE_CLASS


def is_granted(found: LiqoResource) -> bool:
    """Whether Liqo has a Quota of it: a denial afterwards changes nothing of that."""
    return bool(found.status.get("resources"))


def ended_decision(found: LiqoResource, *, is_overdue: bool) -> SliceDecision:
    """The decision after the end: still Accepted, because Liqo leaves the Quota of a denied slice."""
    amounts = {name: str(amount) for name, amount in found.status["resources"].items()}
    if is_overdue:
        amounts = dict.fromkeys(amounts, "0")
    message = f"reservation {found.metadata.name} has ended"
    return SliceDecision(ACCEPTED, "Ended", message, amounts)


def status_patch(found: LiqoResource, decision: SliceDecision, now: datetime) -> Manifest:
    """Returns the change of a slice's status; empty if it says that already.

    The list of conditions is replaced as a whole, because Liqo's CRD gives it no keys: with another list the
    condition of Liqo itself would be lost.
    """
    known = _condition(found, "Resources")
    is_same = (known.get("status"), known.get("message")) == (decision.status, decision.message)
    amounts = found.status.get("resources") or {}
    if is_same and (decision.status == DENIED or amounts == decision.amounts):
        return {}
    others = [one for one in found.status["conditions"] if one.get("type") != "Resources"]
    condition = {
        "type": "Resources",
        "status": decision.status,
        "reason": decision.reason,
        "message": decision.message,
        "lastTransitionTime": f"{now:%Y-%m-%dT%H:%M:%SZ}",
    }
    status: Manifest = {"conditions": [*others, condition]}
    if decision.status == ACCEPTED:
        stale = dict.fromkeys(amounts.keys() - decision.amounts.keys())
        status["resources"] = {**stale, **decision.amounts}
        status["nodeLabels"] = {RESERVATION_LABEL: liqo_objects.reservation_of(found)}
    return {"metadata": {"resourceVersion": found.metadata.resource_version}, "status": status}


def _condition(found: LiqoResource, kind: str) -> Manifest:
    conditions = found.status.get("conditions") or []
    return next((one for one in conditions if one.get("type") == kind), {})


def is_accepted(found: LiqoResource, kind: str) -> bool:
    return _condition(found, kind).get("status") == ACCEPTED
