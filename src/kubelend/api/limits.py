"""Handlers of lending policies and quotas."""

from __future__ import annotations

from aiohttp import web

from kubelend.api import request
from kubelend.api.request import RequestContext, json_response, paginate
from kubelend.broker.service import PolicyView, QuotaView
from kubelend.core.errors import InvalidIdentity, NotFound
from kubelend.core.models import ClusterId
from kubelend.pki import identity
from kubelend.wire import admin_bodies, admin_conversion

NO_CONTENT = 204


async def get_policy(call: RequestContext) -> web.StreamResponse:
    request.check_own_cluster(call, call.cluster)
    return json_response(_policy_body(await call.app.limits.policy(call.cluster)))


async def set_policy(call: RequestContext) -> web.StreamResponse:
    cluster = _cluster_in_path(call)
    body = await call.body(admin_bodies.PolicyRequest)
    policy = admin_conversion.to_policy(body)
    return json_response(_policy_body(await call.app.limits.set_policy(cluster, policy)))


async def clear_policy(call: RequestContext) -> web.StreamResponse:
    await call.app.limits.clear_policy(call.cluster)
    return web.Response(status=NO_CONTENT)


async def list_quotas(call: RequestContext) -> web.StreamResponse:
    limit = call.page_size()
    found = await call.app.limits.quotas(call.request.query.get("continue", ""), limit + 1)
    views, more = paginate(found, limit, lambda view: view.cluster)
    return json_response(admin_bodies.QuotaList([_quota_body(view) for view in views], more))


async def get_quota(call: RequestContext) -> web.StreamResponse:
    request.check_own_cluster(call, call.cluster)
    return json_response(_quota_body(await call.app.limits.quota(call.cluster)))


async def set_quota(call: RequestContext) -> web.StreamResponse:
    cluster = _cluster_in_path(call)
    quota = admin_conversion.to_quota(await call.body(admin_bodies.QuotaRequest))
    return json_response(_quota_body(await call.app.limits.set_quota(cluster, quota)))


async def clear_quota(call: RequestContext) -> web.StreamResponse:
    await call.app.limits.clear_quota(call.cluster)
    return web.Response(status=NO_CONTENT)


def _cluster_in_path(call: RequestContext) -> ClusterId:
    """Returns the cluster in the path, known or not; raises `NotFound` for an invalid name."""
    try:
        identity.check_common_name(call.cluster)
    except InvalidIdentity as error:
        raise NotFound(f"invalid cluster name {call.cluster[:64]!r}", hint=error.message) from None
    return call.cluster


def _policy_body(view: PolicyView) -> admin_bodies.PolicyStatus:
    return admin_bodies.PolicyStatus(
        view.cluster,
        admin=admin_conversion.from_policy(view.admin_policy),
        advertised=admin_conversion.from_policy(view.advertised),
        effective=admin_conversion.from_lending(view.effective),
    )


def _quota_body(view: QuotaView) -> admin_bodies.QuotaStatus:
    return admin_conversion.from_quota(view.cluster, view.usage, view.at)
