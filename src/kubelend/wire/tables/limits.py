"""Routes of lending policies and quotas."""

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
        "Get the lending policies of a cluster: advertised, set by an administrator, and effective",
        Access.OWNER,
        {200: limit_bodies.PolicyStatus},
        errors=(errors.Forbidden, errors.NotFound),
    ),
    Route(
        "set_policy",
        "PUT",
        _POLICY,
        "Set the administrator's lending policy of a cluster; the stricter of it and the advertised applies",
        Access.ADMIN,
        {200: limit_bodies.PolicyStatus},
        limit_bodies.PolicyRequest,
        errors=_UNUSABLE,
    ),
    Route(
        "clear_policy",
        "DELETE",
        _POLICY,
        "Delete the administrator's lending policy of a cluster",
        Access.ADMIN,
        {204: None},
        errors=(errors.Forbidden, errors.NotFound),
    ),
    Route(
        "list_quotas",
        "GET",
        f"{API}/quotas",
        "List quotas and their usage",
        Access.READER,
        {200: limit_bodies.QuotaList},
        parameters=PAGE,
        errors=(errors.InvalidInput, errors.Forbidden),
    ),
    Route(
        "get_quota",
        "GET",
        _QUOTA,
        "Get a cluster's quota and its usage",
        Access.OWNER,
        {200: limit_bodies.QuotaStatus},
        errors=(errors.Forbidden, errors.NotFound),
    ),
    Route(
        "set_quota",
        "PUT",
        _QUOTA,
        "Set a cluster's quota",
        Access.ADMIN,
        {200: limit_bodies.QuotaStatus},
        limit_bodies.QuotaRequest,
        errors=_UNUSABLE,
    ),
    Route(
        "clear_quota",
        "DELETE",
        _QUOTA,
        "Delete a cluster's quota",
        Access.ADMIN,
        {204: None},
        errors=(errors.Forbidden, errors.NotFound),
    ),
)
