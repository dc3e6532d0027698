"""The spec and status fields of a ClusterAdvertisement that the broker computes. Pure.

`controllers.advertisements` patches what differs. The store writes the record and its timestamps.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Final

import msgspec

from kubelend.broker.views import ClusterView
from kubelend.controllers import marks
from kubelend.core.resources import Resources
from kubelend.wire import bodies, conversion, quantities
from kubelend.wire.bodies import Amounts
from kubelend.wire.broker_objects import (
    ClusterAdvertisement,
    ClusterAdvertisementStatus,
    Condition,
)

Change = dict[str, object]


def spec_change(found: ClusterAdvertisement, view: ClusterView) -> Change:
    """The merge patch that corrects reserved and available; empty if they are correct."""
    current = found.spec.resources
    left = (view.cluster.ceiling - view.reserved).clamped()
    wanted = {"available": (current.available, left), "reserved": (current.reserved, view.reserved)}
    changed = {
        name: _amounts(before, after)
        for name, (before, after) in wanted.items()
        if not _is_said(before, after)
    }
    return {"resources": changed} if changed else {}


def status_change(
    found: ClusterAdvertisement, view: ClusterView | None, problem: str, now: datetime
) -> Change:
    """The merge patch of the status; empty if nothing differs. `error` is a problem with the spec."""
    wanted = _unknown(found, problem) if view is None else _known(found, view, problem, now)
    before, after = _builtins(found.status), _builtins(wanted)
    changed = {name: after.get(name) for name in _SHOWN if before.get(name) != after.get(name)}
    if "phase" in changed:
        changed["active"] = wanted.active  # explicitly, or the printer column would be empty
    is_news = changed.keys() - {"observedGeneration", "conditions"} or _differs(found, wanted)
    # The store raises the generation of managed objects with every advertisement: nobody waits for that.
    if not is_news and marks.is_own(found.metadata):
        return {}
    return changed


def conditions(
    before: Iterable[Condition], after: Iterable[Condition], now: datetime
) -> tuple[Condition, ...]:
    """Conditions of others stay; an unchanged one keeps its transition time."""
    known = {one.type: one for one in before}
    dated = [_dated(known.pop(one.type, None), one, now) for one in after]
    return (*known.values(), *dated)


_SHOWN: Final = (
    "phase",
    "lastUpdateTime",
    "active",
    "message",
    "score",
    "conditions",
    "observedGeneration",
    "validUntil",
    "cordonReason",
    "reservations",
)


def _known(
    found: ClusterAdvertisement, view: ClusterView, problem: str, now: datetime
) -> ClusterAdvertisementStatus:
    status = conversion.from_cluster_status(*view, now)
    generation = found.metadata.generation
    message = problem or _message(status, view)
    wanted = [
        _ready(status, message),
        _condition("Stale", "AdvertisementAge", _age(status), is_true=not status.active),
        _condition("Overcommitted", "ResourceCheck", status.message, is_true=bool(status.message)),
    ]
    noted = [msgspec.structs.replace(one, observed_generation=generation) for one in wanted]
    return ClusterAdvertisementStatus(
        phase=status.phase,
        last_update_time=status.last_update_time,
        active=status.active and not status.cordoned,
        message=message,
        score=status.score,
        conditions=conditions(found.status.conditions, noted, now),
        observed_generation=generation,
        valid_until=status.valid_until,
        cordon_reason=status.cordon_reason,
        reservations=status.reservations,
    )


def _unknown(found: ClusterAdvertisement, problem: str) -> ClusterAdvertisementStatus:
    """The status of an advertisement that is not in the ledger, because it is invalid."""
    return ClusterAdvertisementStatus(
        message=problem,
        conditions=found.status.conditions,
        observed_generation=found.metadata.generation,
    )


def _message(said: bodies.ClusterStatus, view: ClusterView) -> str:
    if not said.active:
        return _age(said)
    if said.message:
        return said.message
    return f"Closed to new reservations: {said.cordon_reason}" if view.cluster.cordon else ""


def _ready(said: bodies.ClusterStatus, message: str) -> Condition:
    if not said.active:
        return _condition("Ready", "ClusterStale", message, is_true=False)
    if said.cordoned:
        return _condition("Ready", "ClusterCordoned", message, is_true=False)
    return _condition("Ready", "ClusterActive", message, is_true=True)


def _age(said: bodies.ClusterStatus) -> str:
    return (
        ""
        if said.active
        else f"Stale: no advertisement since {said.last_update_time:%Y-%m-%dT%H:%M:%SZ}"
    )


def _condition(type: str, reason: str, message: str, *, is_true: bool) -> Condition:
    return Condition(type, "True" if is_true else "False", reason, message)


def _dated(before: Condition | None, after: Condition, now: datetime) -> Condition:
    is_same = before is not None and before.status == after.status
    since = before.last_transition_time if before is not None and is_same else None
    return msgspec.structs.replace(after, last_transition_time=since or now.replace(microsecond=0))


def _differs(found: ClusterAdvertisement, wanted: ClusterAdvertisementStatus) -> bool:
    """Whether a condition differs in more than its observed generation."""

    def said(conditions: Iterable[Condition]) -> list[Condition]:
        return [msgspec.structs.replace(one, observed_generation=0) for one in conditions]

    return said(found.status.conditions) != said(wanted.conditions)


def _is_said(before: Amounts | None, after: Resources) -> bool:
    if before is None:
        return not after
    return _texts(before) == _texts(quantities.of(after))


def _amounts(before: Amounts | None, after: Resources) -> Change:
    """With null for fields to remove."""
    wanted = _texts(quantities.of(after))
    deleted: Change = {} if before is None else dict.fromkeys(_texts(before).keys() - wanted.keys())
    return {**deleted, **wanted}


def _texts(amounts: Amounts) -> Change:
    texts: Change = msgspec.to_builtins(amounts)
    return {name: value for name, value in texts.items() if value not in ("", {})}


def _builtins(status: ClusterAdvertisementStatus) -> Change:
    texts: Change = msgspec.to_builtins(status)
    return {**texts, "active": status.active}
