"""Conversion of lending policies, quotas, members and tokens between wire bodies and core records."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from kubelend.core import lending as core_lending
from kubelend.core import members, models, prices, resources
from kubelend.core.accounts import QuotaUsage
from kubelend.core.errors import InvalidInput
from kubelend.core.lending import EffectivePolicy, LendingPolicy
from kubelend.core.models import ClusterId
from kubelend.core.resources import Resources
from kubelend.wire import admin_bodies, bodies

# -- from the wire


def to_policy(body: bodies.LendingPolicy, where: str = "") -> LendingPolicy:
    """Convert and validate a lending policy; errors name the field."""
    prefix = f"{where}." if where else ""
    allow, deny = tuple(body.allow), tuple(body.deny)
    core_lending.check_name_patterns(allow, f"{prefix}allow")
    core_lending.check_name_patterns(deny, f"{prefix}deny")
    return LendingPolicy(
        allow=allow,
        deny=deny,
        keep_back=resources.parse_requested(_texts(body.keep_back), f"{prefix}keepBack"),
        max_lent=resources.parse_caps(_texts(body.max_lent), f"{prefix}maxLent"),
        max_per_requester=resources.parse_caps(
            _texts(body.max_per_requester), f"{prefix}maxPerRequester"
        ),
        hours=_checked_hours(tuple(body.hours), f"{prefix}hours"),
    )


def to_quota(body: admin_bodies.QuotaRequest) -> models.Quota:
    return models.Quota(
        amounts=resources.parse_caps(_texts(body.amounts), "amounts"),
        reservations=body.reservations,
        budget=prices.parse_price(body.budget, "budget") if body.budget else None,
        currency=prices.parse_currency(body.currency or prices.DEFAULT_CURRENCY, "currency"),
    )


def _checked_hours(texts: tuple[str, ...], where: str) -> tuple[str, ...]:
    try:
        for text in texts:
            core_lending.parse_opening_hours(text)
    except InvalidInput as error:
        raise InvalidInput(f"{where}: {error.message}", hint=error.hint) from None
    return texts


def _texts(amounts: Mapping[str, str | int]) -> dict[str, str]:
    return {name: str(amount) for name, amount in amounts.items()}


# -- to the wire


def from_policy(policy: LendingPolicy | None) -> bodies.LendingPolicy | None:
    if policy is None:
        return None
    return bodies.LendingPolicy(
        allow=list(policy.allow),
        deny=list(policy.deny),
        keep_back=dict(from_amounts(policy.keep_back)),
        max_lent=dict(from_amounts(policy.max_lent)),
        max_per_requester=dict(from_amounts(policy.max_per_requester)),
        hours=list(policy.hours),
    )


def from_lending(lending: EffectivePolicy | None) -> bodies.EffectivePolicy | None:
    if lending is None:
        return None
    return bodies.EffectivePolicy(
        allow=[list(names) for names in lending.access.allow],
        deny=list(lending.access.deny),
        keep_back=from_amounts(lending.keep_back),
        max_lent=from_amounts(lending.max_lent),
        max_per_requester=from_amounts(lending.max_per_requester),
        hours=[list(texts) for texts in lending.hours],
    )


def withheld_amounts(
    lending: EffectivePolicy | None, available: Resources, reserved: Resources
) -> dict[str, str]:
    """Return the available amounts that the policy withholds now."""
    if lending is None:
        return {}
    free = available.clamped()
    return from_amounts(free - lending.lendable(free, reserved))


def from_quota(cluster: ClusterId, account: QuotaUsage, now: datetime) -> admin_bodies.QuotaStatus:
    quota = account.quota
    has_budget = quota.budget is not None
    return admin_bodies.QuotaStatus(
        cluster,
        admin_bodies.Quota(
            amounts=from_amounts(quota.amounts),
            reservations=quota.reservations,
            budget=prices.format_price(quota.budget) if quota.budget is not None else "",
            currency=quota.currency if has_budget else "",
        ),
        admin_bodies.QuotaUse(
            held=from_amounts(account.held),
            waited_for=from_amounts(account.pending),
            reservations=account.held_count,
            waiting=account.pending_count,
            spent_today=prices.format_price(account.spent_today(now)) if has_budget else "",
        ),
    )


def from_amounts(amounts: Resources | Mapping[str, int]) -> dict[str, str]:
    """Format amounts by name. A vector omits zeros; caps keep them, because zero means none at all."""
    return {name: resources.format_amount(name, amount) for name, amount in amounts.items()}


def from_token(token: members.Token, now: datetime) -> admin_bodies.Token:
    return admin_bodies.Token(
        id=token.id,
        state="Expired" if token.expires_at <= now else "Valid" if token.uses_left else "Used",
        role=token.role.value,
        uses_left=token.uses_left,
        created_at=token.created_at,
        created_by=token.created_by,
        expires_at=token.expires_at,
        name=token.name,
    )


def from_member(member: members.Member) -> admin_bodies.Member:
    known = member.certificate
    return admin_bodies.Member(
        role=member.role.value,
        name=member.name,
        status=member.status.value,
        requested_at=member.requested_at,
        pending_key=member.pending_key,
        token=member.token or "",
        decided_at=member.decided_at,
        decided_by=member.decided_by,
        certificate=None
        if known is None
        else admin_bodies.MemberCertificate(
            known.serial, known.issued_at, known.expires_at, known.authority
        ),
        revoked_at=member.revoked_at,
        reason=member.reason,
    )
