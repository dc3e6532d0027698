"""Conversion between wire bodies and core records; texts are parsed and formatted only here.

The identity of the caller is a parameter, because it comes from the verified certificate and not from the
body.
"""

from __future__ import annotations

from datetime import datetime, timedelta

import msgspec
from msgspec.structs import replace

from kubelend.core import durations, explanations, lending, models, prices, resources, scoring
from kubelend.core.errors import InvalidDuration, InvalidInput
from kubelend.core.lending import OpeningHours
from kubelend.core.models import ClusterId, RequestKey
from kubelend.wire import admin_conversion, bodies, quantities, validation
from kubelend.wire.broker_objects import ClusterAdvertisementSpec


class RequestLimits(msgspec.Struct, frozen=True):
    """The broker's defaults and limits for requests."""

    default_duration: timedelta
    max_duration: timedelta
    max_wait: timedelta


# -- from the wire


def to_advertisement(
    body: bodies.Advertisement, cluster: ClusterId, now: datetime
) -> models.Advertisement:
    """Convert an advertisement. A missing allocatable defaults to capacity, a missing allocated to zero."""
    _check_texts(body)
    capacity = quantities.parse_offered(body.resources.capacity, "resources.capacity")
    allocatable, allocated = body.resources.allocatable, body.resources.allocated
    return models.Advertisement(
        cluster=cluster,
        name=body.cluster_name,
        capacity=capacity,
        allocatable=capacity
        if allocatable is None
        else quantities.parse_offered(allocatable, "resources.allocatable"),
        allocated=resources.NOTHING
        if allocated is None
        else quantities.parse_requested(allocated, "resources.allocated"),
        sent_at=body.timestamp or now,
        prices=to_prices(body.cost),
        labels=_labels_with_region(body.labels, body.region, "labels"),
        valid_for=positive_duration(body.valid_for, "validFor") if body.valid_for else None,
        endpoint=body.endpoint_url,
        policy=None if body.policy is None else admin_conversion.to_policy(body.policy, "policy"),
    )


def to_request(
    body: bodies.ReservationRequest, requester: ClusterId, key: str, limits: RequestLimits
) -> models.Request:
    """Convert a request of any interface into the record that the ledger works with."""
    scoring.check_policy(body.policy or "headroom", body.weights)
    return models.Request(
        requester=requester,
        resources=quantities.parse_reservation_amounts(body.requested_resources),
        duration=bounded_duration(body.duration, limits),
        priority=body.priority,
        wait=_parse_wait(body.wait, limits),
        policy=body.policy or "headroom",
        weights=body.weights,
        constraints=_to_constraints(body),
        key=RequestKey(key) if key else None,
        failover=body.failover,
    )


def bounded_duration(text: str, limits: RequestLimits) -> timedelta:
    """Return the requested or default duration. Every reservation expires, so that a lost client cannot
    lock resources forever.
    """
    if not text:
        return limits.default_duration
    requested = positive_duration(text, "duration")
    if requested > limits.max_duration:
        raise InvalidInput(
            f"duration: {text} exceeds the broker's maximum",
            hint=f"request at most {durations.format_duration_short(limits.max_duration)}, and renew",
        )
    return requested


def renewal_duration(text: str, limits: RequestLimits) -> timedelta | None:
    """Return the duration of a renewal; None for the original one."""
    return bounded_duration(text, limits) if text else None


def positive_duration(text: str, where: str) -> timedelta:
    """Parse a duration above zero; errors name the field."""
    parsed = _parse_duration(text, where)
    if parsed <= timedelta():
        raise InvalidDuration(f"{where}: {text!r} is not above zero", hint="use for example 1h30m")
    return parsed


def to_prices(body: bodies.Cost | None) -> prices.Prices | None:
    """Convert prices. A cost without any amount means no price, not a price of zero."""
    if body is None:
        return None
    currency = _parse_currency(body.currency, "cost.currency")
    if not (body.cpu_cost or body.memory_cost or body.gpu_cost or body.storage_cost):
        return None
    return prices.Prices(
        currency=currency or prices.DEFAULT_CURRENCY,
        cpu=prices.parse_price(body.cpu_cost or "0", "cost.cpuCost"),
        memory=prices.parse_price(body.memory_cost or "0", "cost.memoryCost"),
        gpu=prices.parse_price(body.gpu_cost or "0", "cost.gpuCost"),
        storage=prices.parse_price(body.storage_cost or "0", "cost.storageCost"),
    )


def _parse_currency(text: str, where: str) -> str:
    return prices.parse_currency(text, where) if text else ""


def _check_texts(body: bodies.Advertisement) -> None:
    """Check all texts at once, because every advertisement passes here; on failure find the field."""
    named, labels = (body.cluster_name, body.region, body.endpoint_url), body.labels
    if validation.is_plain("".join((*named, *labels, *labels.values()))):
        return
    for name, text in zip(("clusterName", "region", "endpointURL"), named, strict=True):
        validation.check_plain(text, name)
    validation.check_labels(labels, "labels")


def _parse_duration(text: str, where: str) -> timedelta:
    try:
        return durations.parse_duration(text)
    except InvalidDuration as error:
        raise InvalidDuration(f"{where}: {error.message}", hint=error.hint) from None


def _parse_wait(text: str, limits: RequestLimits) -> timedelta:
    requested = _parse_duration(text, "wait") if text else timedelta()
    if requested < timedelta():
        raise InvalidDuration(f"wait: {text!r} is below zero", hint="use for example 5m, or 0s")
    if requested > limits.max_wait:
        limit = durations.format_duration_short(limits.max_wait)
        raise InvalidInput(
            f"wait: {text} exceeds the broker's maximum", hint=f"wait at most {limit}"
        )
    return requested


def _to_constraints(body: bodies.ReservationRequest) -> models.Constraints:
    constraints = body.constraints
    if constraints is bodies.UNCONSTRAINED and not body.target_cluster_id:
        return models.UNCONSTRAINED
    validation.check_labels(constraints.labels, "constraints.labels")
    validation.check_plain(constraints.region, "constraints.region")
    maximum = constraints.max_price_per_hour
    return models.Constraints(
        labels=_labels_with_region(constraints.labels, constraints.region, "constraints.labels"),
        pinned=ClusterId(validation.check_plain(body.target_cluster_id, "targetClusterID")) or None,
        excluded=tuple(
            ClusterId(validation.check_plain(name, "constraints.exclude"))
            for name in constraints.exclude
        ),
        max_price=prices.parse_price(maximum, "constraints.maxPricePerHour") if maximum else None,
        currency=_parse_currency(constraints.currency, "constraints.currency"),
    )


def _labels_with_region(labels: dict[str, str], region: str, where: str) -> dict[str, str]:
    """Add the region as a label. The limit is checked here, because the labels are returned with the region
    in them.
    """
    if not region:
        return labels
    whole = {**labels, models.REGION_LABEL: region}
    if len(whole) > bodies.MAX_LABELS:
        raise InvalidInput(
            f"{where}: too many labels: {len(whole)} including the region",
            hint=f"use at most {bodies.MAX_LABELS}",
        )
    return whole


# -- to the wire


def from_cluster(cluster: models.Cluster, reserved: resources.Resources) -> bodies.Advertisement:
    """Return the advertisement with reserved and available as computed by the broker."""
    known = cluster.advertisement
    return bodies.Advertisement(
        cluster_id=known.cluster,
        cluster_name=known.name,
        resources=bodies.Metrics(
            capacity=quantities.to_quantities(known.capacity),
            allocatable=quantities.to_quantities(known.allocatable),
            allocated=quantities.to_quantities(known.allocated),
            reserved=quantities.to_quantities(reserved),
            available=quantities.to_quantities((cluster.ceiling - reserved).clamped()),
        ),
        timestamp=known.sent_at,
        cost=None if known.prices is None else _from_prices(known.prices),
        labels=known.labels,
        region=known.labels.get(models.REGION_LABEL, ""),
        valid_for=durations.format_duration(known.valid_for) if known.valid_for else "",
        endpoint_url=known.endpoint,
        policy=admin_conversion.from_policy(known.policy),
    )


def published_advertisement(
    body: bodies.Advertisement, cluster: models.Cluster, reserved: resources.Resources
) -> bodies.Advertisement:
    """Return the body that was sent, with reserved and available as computed by the broker.

    This is the response to every advertisement, so unchanged fields are reused instead of formatted again.
    """
    sent = body.resources
    return replace(
        body,
        resources=bodies.Metrics(
            capacity=sent.capacity,
            allocatable=sent.allocatable or sent.capacity,
            allocated=sent.allocated or quantities.to_quantities(cluster.advertisement.allocated),
            reserved=quantities.to_quantities(reserved),
            available=quantities.to_quantities((cluster.ceiling - reserved).clamped()),
        ),
        timestamp=cluster.advertisement.sent_at,
    )


def from_cluster_status(
    cluster: models.Cluster,
    reserved: resources.Resources,
    lent: int,
    lending: lending.EffectivePolicy | None,
    now: datetime,
) -> bodies.ClusterStatus:
    stale = cluster.is_stale(now)
    available = cluster.ceiling - reserved
    rating = resources.display_score(available, cluster.advertisement.allocatable)
    return bodies.ClusterStatus(
        phase="Stale" if stale else "Active",
        active=not stale,
        score=resources.display_score_text(rating),
        rating=resources.display_band(rating),
        last_update_time=cluster.received_at,
        valid_until=cluster.valid_until,
        cordoned=cluster.cordon is not None,
        cordon_reason=cluster.cordon or "",
        reservations=lent,
        message="Overcommitted: the cluster's own pods use resources that it has lent"
        if any(amount < 0 for _, amount in available.items())
        else "",
        certificate_until=cluster.certificate_until,
        policy=admin_conversion.from_lending(lending),
        withheld=admin_conversion.withheld_amounts(lending, available, reserved),
        closed=lending is not None and not OpeningHours(lending.hours).is_open(now),
    )


def to_hold_report(body: bodies.HoldReport) -> models.HoldReport:
    return models.HoldReport(body.held, body.reason, validation.to_single_line(body.message))


def from_hold_report(found: models.HoldReport | None) -> bodies.HoldReport | None:
    return None if found is None else bodies.HoldReport(found.is_held, found.reason, found.message)


def from_reservation(found: models.Reservation) -> bodies.Reservation:
    return bodies.Reservation(
        id=found.id,
        requester_id=found.requester,
        target_cluster_id=found.target or "",
        requested_resources=quantities.to_quantities(found.request.resources),
        status=bodies.ReservationStatus(
            phase=found.phase.value,
            message=found.message,
            reason=found.reason.value,
            reserved_at=found.reserved_at,
            expires_at=found.expires_at,
            wait_until=found.wait_until,
            acknowledged_at=found.acknowledged_at,
            held=from_hold_report(found.held),
            activated_at=found.activated_at,
            finished_at=found.finished_at,
        ),
        created_at=found.created_at,
        priority=found.request.priority,
        duration=durations.format_duration(found.request.duration),
        previous_cluster_ids=list(found.left),
        cost=bodies.AgreedCost(prices.format_price(found.hourly), found.currency)
        if found.currency
        else None,
        revision=found.revision,
    )


def from_explanation(explanation: explanations.Explanation) -> bodies.Explanation:
    return bodies.Explanation(
        summary=str(explanation),
        total=explanation.total,
        fitting=explanation.fitting,
        rejections={refusal.value: count for refusal, count in explanation.rejections.items()},
        candidates=[_from_candidate(candidate) for candidate in explanation.candidates],
        suggestion=_from_suggestion(explanation.suggestion),
        quota=[str(excess) for excess in explanation.quota],
    )


def _from_candidate(candidate: explanations.Candidate) -> bodies.Candidate:
    return bodies.Candidate(
        cluster_id=candidate.cluster,
        fits=not candidate.rejections,
        rejections=[refusal.value for refusal in candidate.rejections],
        score=None if candidate.score is None else round(candidate.score, 4),
        price_per_hour=""
        if candidate.price is None
        else prices.format_price(round(candidate.price * prices.BILLIONTHS)),
        currency=candidate.currency,
        suggestion=_from_suggestion(candidate.suggestion),
    )


def _from_suggestion(suggestion: explanations.Suggestion | None) -> bodies.Suggestion | None:
    if suggestion is None:
        return None
    return bodies.Suggestion(
        cluster_id=suggestion.cluster,
        text=suggestion.text,
        less=admin_conversion.from_amounts(suggestion.less),
        max_price_per_hour=""
        if suggestion.max_price is None
        else prices.format_price(suggestion.max_price),
        currency=suggestion.currency,
        drop_labels=suggestion.drop_labels,
    )


def _from_prices(known: prices.Prices) -> bodies.Cost:
    return bodies.Cost(
        cpu_cost=prices.format_price(known.cpu),
        memory_cost=prices.format_price(known.memory),
        gpu_cost=prices.format_price(known.gpu) if known.gpu else "",
        storage_cost=prices.format_price(known.storage) if known.storage else "",
        currency=known.currency,
    )


def advertisement_from_spec(spec: ClusterAdvertisementSpec) -> bodies.Advertisement:
    """Ignores reserved and available, which the broker computes."""
    amounts = spec.resources
    measured = bodies.Metrics(amounts.capacity, amounts.allocatable, amounts.allocated)
    return bodies.copy_fields(spec, bodies.Advertisement, resources=measured)
