"""Routes of lending policies and quotas."""

from __future__ import annotations

from kubelend.core import errors
from kubelend.wire import limit_bodies
from kubelend.wire.route import API, PAGE_PARAMETERS, Access, Route

_POLICY_PATH = f"{API}/clusters/{{cluster}}/policy"
_QUOTA_PATH = f"{API}/quotas/{{cluster}}"
_LIMIT_ERRORS = (
    errors.InvalidInput,
    errors.InvalidQuantity,
    errors.Forbidden,
    errors.NotFound,
)

LIMIT_ROUTES: tuple[Route, ...] = (
    Route(
        "get_policy",
        "GET",
        _POLICY_PATH,
        "Get the lending policies of a cluster: advertised, set by an administrator, and effective",
        Access.OWNER,
        {200: limit_bodies.PolicyStatus},
        errors=(errors.Forbidden, errors.NotFound),
    ),
    Route(
        "set_policy",
        "PUT",
        _POLICY_PATH,
        "Set the administrator's lending policy of a cluster; the stricter of it and the advertised applies",
        Access.ADMIN,
        {200: limit_bodies.PolicyStatus},
        limit_bodies.PolicyRequest,
        errors=_LIMIT_ERRORS,
    ),
    Route(
        "clear_policy",
        "DELETE",
        _POLICY_PATH,
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
        parameters=PAGE_PARAMETERS,
        errors=(errors.InvalidInput, errors.Forbidden),
    ),
    Route(
        "get_quota",
        "GET",
        _QUOTA_PATH,
        "Get a cluster's quota and its usage",
        Access.OWNER,
        {200: limit_bodies.QuotaStatus},
        errors=(errors.Forbidden, errors.NotFound),
    ),
    Route(
        "set_quota",
        "PUT",
        _QUOTA_PATH,
        "Set a cluster's quota",
        Access.ADMIN,
        {200: limit_bodies.QuotaStatus},
        limit_bodies.QuotaRequest,
        errors=_LIMIT_ERRORS,
    ),
    Route(
        "clear_quota",
        "DELETE",
        _QUOTA_PATH,
        "Delete a cluster's quota",
        Access.ADMIN,
        {204: None},
        errors=(errors.Forbidden, errors.NotFound),
    ),
)
