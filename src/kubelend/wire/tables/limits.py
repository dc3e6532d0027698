"""Who may use whom, and how much of it: policies of providers, quotas of requesters."""

from __future__ import annotations

from kubelend.core import errors
from kubelend.wire import limit_bodies
from kubelend.wire.route import API, PAGE, Access, Route

_POLICY = f"{API}/clusters/{{cluster}}/policy"
_QUOTA = f"{API}/quotas/{{cluster}}"
_UNUSABLE = (
    errors.InvalidInput,
    errors.InvalidQuantity,
    errors.Forbidden,
    errors.NotFound,
)

ROUTES: tuple[Route, ...] = (
    Route(
        "get_policy",
        "GET",
        _POLICY,
        "To whom a cluster lends, how much and when: what it says, what an administrator says, what holds",
        Access.OWNER,
        {200: limit_bodies.PolicyStatus},
        errors=(errors.Forbidden, errors.NotFound),
    ),
    Route(
        "set_policy",
        "PUT",
        _POLICY,
        "Say so for a cluster, beside what it says itself: the stricter of both holds",
        Access.ADMIN,
        {200: limit_bodies.PolicyStatus},
        limit_bodies.PolicyRequest,
        errors=_UNUSABLE,
    ),
    Route(
        "clear_policy",
        "DELETE",
        _POLICY,
        "Let only what the cluster says itself hold",
        Access.ADMIN,
        {204: None},
        errors=(errors.Forbidden, errors.NotFound),
    ),
    Route(
        "list_quotas",
        "GET",
        f"{API}/quotas",
        "All quotas, and what of each is used",
        Access.READER,
        {200: limit_bodies.QuotaList},
        parameters=PAGE,
        errors=(errors.InvalidInput, errors.Forbidden),
    ),
    Route(
        "get_quota",
        "GET",
        _QUOTA,
        "What a cluster may hold, wait for and spend, and what of it is used",
        Access.OWNER,
        {200: limit_bodies.QuotaStatus},
        errors=(errors.Forbidden, errors.NotFound),
    ),
    Route(
        "set_quota",
        "PUT",
        _QUOTA,
        "Bound what a cluster may hold, wait for and spend",
        Access.ADMIN,
        {200: limit_bodies.QuotaStatus},
        limit_bodies.QuotaRequest,
        errors=_UNUSABLE,
    ),
    Route(
        "clear_quota",
        "DELETE",
        _QUOTA,
        "Bound it no more",
        Access.ADMIN,
        {204: None},
        errors=(errors.Forbidden, errors.NotFound),
    ),
)
