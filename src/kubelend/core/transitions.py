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
    Failed,
    FailoverBlocked,
    HoldReported,
    LimitsEvent,
    Nominated,
    Placed,
    PolicySet,
    ProviderRecovered,
    QuotaSet,
    Released,
    Renewed,
    ReservationEvent,
)
from kubelend.core.lifecycle import ALLOWED_TRANSITIONS, FINAL, Phase, Reason
from kubelend.core.models import Charge, ClusterId, Limits, Request, Reservation, ReservationId
from kubelend.core.prices import Prices

ChangedFields = dict[str, Any]


def new_placed_reservation(
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
        message=_locked_message(target),
        target=target,
        reserved_at=now,
        expires_at=now + request.duration,
        hourly=0 if prices is None else prices.hourly_cost(request.resources),
        currency="" if prices is None else prices.currency,
    )


def placed_event(
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
    hourly = prices.hourly_cost(found.request.resources)
    return Placed(now, found.id, target, expires_at, reason, hourly, prices.currency)


def apply_reservation_event(
    reservation: Reservation, event: ReservationEvent, revision: int
) -> Reservation:
    """Returns the reservation after the event; raises `WrongPhase` for a forbidden transition."""
    fields = _changed_fields(event, reservation)
    phase = fields.get("phase", reservation.phase)
    if phase not in ALLOWED_TRANSITIONS[reservation.phase]:
        raise WrongPhase(
            f"{reservation.id} is {reservation.phase} and cannot become {phase}",
            hint=next_phase_hint(reservation.phase),
        )
    return replace(reservation, revision=revision, **fields)


def apply_limits_event(limits: Limits, event: LimitsEvent, revision: int) -> Limits:
    """Returns the limits after the event."""
    match event:
        case PolicySet():
            return replace(limits, policy=event.policy, revision=revision)
        case QuotaSet():
            return replace(limits, quota=event.quota, revision=revision)
    raise TypeError(f"not a limits event: {type(event).__name__}")


def next_phase_hint(phase: Phase) -> str:
    """The hint for a `WrongPhase` error."""
    if phase in FINAL:
        return "the reservation is finished; request a new one"
    return f"allowed next phases: {', '.join(sorted(ALLOWED_TRANSITIONS[phase] - {phase}))}"


@singledispatch
def _changed_fields(event: ReservationEvent, reservation: Reservation) -> ChangedFields:
    raise TypeError(f"no transition for {type(event).__name__} of {reservation.id}")


@_changed_fields.register
def _(event: Nominated, _: Reservation) -> ChangedFields:
    return {"nominated_cluster": event.cluster}


@_changed_fields.register
def _(event: Placed, reservation: Reservation) -> ChangedFields:
    before = () if reservation.target is None else (reservation.target,)
    return {
        "phase": Phase.RESERVED,
        "reason": event.reason,
        "message": _locked_message(event.target) + (f". {event.detail}" if event.detail else ""),
        "target": event.target,
        "left": (*reservation.left, *before),
        "nominated_cluster": None,
        "reserved_at": event.at,
        "expires_at": event.expires_at,
        "acknowledged_at": None,
        "held": None,
        "activated_at": None,
        "hourly": event.hourly,
        "currency": event.currency,
        "charges": (*reservation.charges, *_charge_until(reservation, event.at)),
    }


@_changed_fields.register
def _(event: Acknowledged, _: Reservation) -> ChangedFields:
    return {"acknowledged_at": event.at}


@_changed_fields.register
def _(event: HoldReported, _: Reservation) -> ChangedFields:
    return {"held": event.held}


@_changed_fields.register
def _(event: Activated, reservation: Reservation) -> ChangedFields:
    return {
        "phase": Phase.ACTIVE,
        "reason": Reason.IN_USE,
        "message": _in_use_message(reservation),
        "activated_at": event.at,
    }


@_changed_fields.register
def _(event: FailoverBlocked, _: Reservation) -> ChangedFields:
    return {"reason": Reason.PROVIDER_UNREACHABLE, "message": event.message}


@_changed_fields.register
def _(event: ProviderRecovered, reservation: Reservation) -> ChangedFields:  # noqa: ARG001 - singledispatch needs it
    if reservation.phase is Phase.ACTIVE:
        return {"reason": Reason.IN_USE, "message": _in_use_message(reservation)}
    reason = Reason.MOVED if reservation.left else Reason.LOCKED
    return {"reason": reason, "message": _locked_message(reservation.target)}


@_changed_fields.register
def _(event: Renewed, _: Reservation) -> ChangedFields:
    return {"expires_at": event.expires_at}


@_changed_fields.register
def _(event: Released, _: Reservation) -> ChangedFields:
    return _finished_fields(Phase.RELEASED, event)


@_changed_fields.register
def _(event: Failed, _: Reservation) -> ChangedFields:
    return _finished_fields(Phase.FAILED, event)


def _charge_until(reservation: Reservation, until: datetime) -> tuple[Charge, ...]:
    """The cost at the provider that it leaves."""
    since = reservation.reserved_at
    if since is None or not reservation.hourly:
        return ()
    return (Charge(since, until, reservation.hourly, reservation.currency),)


def _locked_message(target: ClusterId | None) -> str:
    return f"Resources locked in cluster {target}"


def _in_use_message(reservation: Reservation) -> str:
    return f"Resources in use in cluster {reservation.target}"


def _finished_fields(phase: Phase, event: Released | Failed) -> ChangedFields:
    return {
        "phase": phase,
        "reason": event.reason,
        "message": event.message,
        "nominated_cluster": None,
        "finished_at": event.at,
    }
