"""State transitions: old record and event in, new record out. Pure."""

from __future__ import annotations

from datetime import datetime
from functools import singledispatch
from typing import Any

from msgspec.structs import replace

from kubelend.core.errors import WrongPhase
from kubelend.core.events import (
    Acknowledged,
    Activated,
    Earmarked,
    Failed,
    LimitsEvent,
    Placed,
    PolicySet,
    QuotaSet,
    Regained,
    Released,
    Renewed,
    ReservationEvent,
    Stranded,
)
from kubelend.core.lifecycle import FINAL, FOLLOWS, Phase, Reason, may_follow
from kubelend.core.limits import Limits
from kubelend.core.models import Charge, ClusterId, Request, Reservation, ReservationId
from kubelend.core.prices import Prices

Fields = dict[str, Any]


def placed_at_once(
    new_id: ReservationId,
    request: Request,
    target: ClusterId,
    prices: Prices | None,
    now: datetime,
) -> Reservation:
    """A new reservation that is placed immediately, with the same fields as after a `Placed` event."""
    return Reservation(
        new_id,
        request,
        now,
        phase=Phase.RESERVED,
        reason=Reason.LOCKED,
        message=_locked(target),
        target=target,
        reserved_at=now,
        expires_at=now + request.duration,
        hourly=0 if prices is None else prices.agreed(request.resources),
        currency="" if prices is None else prices.currency,
    )


def placed(
    found: Reservation,
    target: ClusterId,
    prices: Prices | None,
    expires_at: datetime,
    reason: Reason,
    now: datetime,
) -> Placed:
    """The event that places an existing reservation, at the provider's current price."""
    if prices is None:
        return Placed(now, found.id, target, expires_at, reason)
    hourly = prices.agreed(found.request.resources)
    return Placed(now, found.id, target, expires_at, reason, hourly, prices.currency)


def evolve(reservation: Reservation, event: ReservationEvent, revision: int) -> Reservation:
    """Returns the reservation after the event; raises `WrongPhase` for a forbidden transition."""
    fields = _fields(event, reservation)
    check(reservation, fields.get("phase", reservation.phase))
    return replace(reservation, revision=revision, **fields)


def limited(limits: Limits, event: LimitsEvent, revision: int) -> Limits:
    """Returns the limits after the event."""
    match event:
        case PolicySet():
            return replace(limits, policy=event.policy, revision=revision)
        case QuotaSet():
            return replace(limits, quota=event.quota, revision=revision)
    raise TypeError(f"not a limits event: {type(event).__name__}")


def check(reservation: Reservation, phase: Phase) -> None:
    """Raises `WrongPhase` if the lifecycle does not allow the transition."""
    if not may_follow(reservation.phase, phase):
        raise WrongPhase(
            f"{reservation.id} is {reservation.phase} and cannot become {phase}",
            hint=next_step(reservation.phase),
        )


def next_step(phase: Phase) -> str:
    """The hint for a `WrongPhase` error."""
    if phase in FINAL:
        return "the reservation is finished; request a new one"
    return f"allowed next phases: {', '.join(sorted(FOLLOWS[phase] - {phase}))}"


@singledispatch
def _fields(event: ReservationEvent, reservation: Reservation) -> Fields:
    raise TypeError(f"no transition for {type(event).__name__} of {reservation.id}")


@_fields.register
def _(event: Earmarked, _: Reservation) -> Fields:
    return {"earmark": event.cluster}


@_fields.register
def _(event: Placed, reservation: Reservation) -> Fields:
    left = (
        reservation.left if reservation.target is None else (*reservation.left, reservation.target)
    )
    return {
        "phase": Phase.RESERVED,
        "reason": event.reason,
        "message": _locked(event.target) + (f". {event.why}" if event.why else ""),
        "target": event.target,
        "left": left,
        "earmark": None,
        "reserved_at": event.at,
        "expires_at": event.expires_at,
        "acknowledged_at": None,
        "activated_at": None,
        "hourly": event.hourly,
        "currency": event.currency,
        "charges": (*reservation.charges, *_charge(reservation, event.at)),
    }


@_fields.register
def _(event: Acknowledged, _: Reservation) -> Fields:
    return {"acknowledged_at": event.at}


@_fields.register
def _(event: Activated, reservation: Reservation) -> Fields:
    return {
        "phase": Phase.ACTIVE,
        "reason": Reason.IN_USE,
        "message": _in_use(reservation),
        "activated_at": event.at,
    }


@_fields.register
def _(event: Stranded, _: Reservation) -> Fields:
    return {"reason": Reason.PROVIDER_SILENT, "message": event.message}


@_fields.register
def _(event: Regained, reservation: Reservation) -> Fields:  # noqa: ARG001 - singledispatch needs it
    if reservation.phase is Phase.ACTIVE:
        return {"reason": Reason.IN_USE, "message": _in_use(reservation)}
    reason = Reason.MOVED if reservation.left else Reason.LOCKED
    return {"reason": reason, "message": _locked(reservation.target)}


@_fields.register
def _(event: Renewed, _: Reservation) -> Fields:
    return {"expires_at": event.expires_at}


@_fields.register
def _(event: Released, _: Reservation) -> Fields:
    return _finished(Phase.RELEASED, event)


@_fields.register
def _(event: Failed, _: Reservation) -> Fields:
    return _finished(Phase.FAILED, event)


def _charge(reservation: Reservation, until: datetime) -> tuple[Charge, ...]:
    """The cost at the provider that it leaves."""
    since = reservation.reserved_at
    if since is None or not reservation.hourly:
        return ()
    return (Charge(since, until, reservation.hourly, reservation.currency),)


def _locked(target: ClusterId | None) -> str:
    return f"Resources locked in cluster {target}"


def _in_use(reservation: Reservation) -> str:
    return f"Resources in use in cluster {reservation.target}"


def _finished(phase: Phase, event: Released | Failed) -> Fields:
    return {
        "phase": phase,
        "reason": event.reason,
        "message": event.message,
        "earmark": None,
        "finished_at": event.at,
    }
