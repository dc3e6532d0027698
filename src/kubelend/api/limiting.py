"""Handlers of lending policies and quotas."""

from __future__ import annotations

from aiohttp import web

from kubelend.api import access
from kubelend.api.calls import RequestContext, json_response, paginate
from kubelend.broker.limiting import PolicyView, QuotaView
from kubelend.core.errors import InvalidIdentity, NotFound
from kubelend.core.models import ClusterId
from kubelend.pki import identities
from kubelend.wire import limit_bodies, limit_conversion

NO_CONTENT = 204


async def get_policy(call: RequestContext) -> web.StreamResponse:
    access.check_own_cluster(call, call.cluster)
    return json_response(_policy_body(await call.app.limits.policy(call.cluster)))


async def set_policy(call: RequestContext) -> web.StreamResponse:
    cluster = _cluster_in_path(call)
    body = await call.body(limit_bodies.PolicyRequest)
    policy = limit_conversion.to_policy(body)
    return json_response(_policy_body(await call.app.limits.set_policy(cluster, policy)))


async def clear_policy(call: RequestContext) -> web.StreamResponse:
    await call.app.limits.clear_policy(call.cluster)
    return web.Response(status=NO_CONTENT)


async def list_quotas(call: RequestContext) -> web.StreamResponse:
    limit = call.page_size()
    found = await call.app.limits.quotas(call.request.query.get("continue", ""), limit + 1)
    views, more = paginate(found, limit, lambda view: view.cluster)
    return json_response(limit_bodies.QuotaList([_quota_body(view) for view in views], more))


async def get_quota(call: RequestContext) -> web.StreamResponse:
    access.check_own_cluster(call, call.cluster)
    return json_response(_quota_body(await call.app.limits.quota(call.cluster)))


async def set_quota(call: RequestContext) -> web.StreamResponse:
    cluster = _cluster_in_path(call)
    quota = limit_conversion.to_quota(await call.body(limit_bodies.QuotaRequest))
    return json_response(_quota_body(await call.app.limits.set_quota(cluster, quota)))


async def clear_quota(call: RequestContext) -> web.StreamResponse:
    await call.app.limits.clear_quota(call.cluster)
    return web.Response(status=NO_CONTENT)


def _cluster_in_path(call: RequestContext) -> ClusterId:
    """Returns the cluster in the path, known or not; raises `NotFound` for an invalid name."""
    try:
        identities.check_common_name(call.cluster)
    except InvalidIdentity as problem:
        raise NotFound(
            f"invalid cluster name {call.cluster[:64]!r}", hint=problem.message
        ) from None
    return call.cluster


def _policy_body(view: PolicyView) -> limit_bodies.PolicyStatus:
    return limit_bodies.PolicyStatus(
        view.cluster,
        admin=limit_conversion.from_policy(view.admin_policy),
        advertised=limit_conversion.from_policy(view.advertised),
        effective=limit_conversion.from_lending(view.effective),
    )


def _quota_body(view: QuotaView) -> limit_bodies.QuotaStatus:
    return limit_conversion.from_quota(view.cluster, view.usage, view.at)
