"""Handlers of clusters, their advertisements, lending policies and quotas."""

from __future__ import annotations

from http import HTTPStatus

from aiohttp import web

from kubelend.api import request
from kubelend.api.request import JsonResponse, RequestContext, paginate
from kubelend.broker import authorization
from kubelend.broker.service import ClusterView, PolicyView, QuotaView
from kubelend.wire import admin_bodies, admin_conversion, bodies, conversion, validation


async def list_clusters(call: RequestContext) -> web.StreamResponse:
    limit = call.page_size()
    found = await call.broker.clusters(call.request.query.get("continue", ""), limit + 1)
    views, more = paginate(found, limit, lambda view: view.cluster.id)
    return JsonResponse(bodies.ClusterList([_cluster_body(call, view) for view in views], more))


async def get_cluster(call: RequestContext) -> web.StreamResponse:
    request.check_own_cluster(call, call.cluster)
    return JsonResponse(_cluster_body(call, await call.broker.cluster(call.cluster)))


async def cordon(call: RequestContext) -> web.StreamResponse:
    reason = await _read_reason(call)
    return JsonResponse(_cluster_body(call, await call.broker.cordon(call.cluster, reason)))


async def uncordon(call: RequestContext) -> web.StreamResponse:
    return JsonResponse(_cluster_body(call, await call.broker.uncordon(call.cluster)))


async def drain(call: RequestContext) -> web.StreamResponse:
    reason = await _read_reason(call)
    view, drained = await call.broker.drain(call.cluster, reason)
    reservations = [conversion.from_reservation(found) for found in drained]
    return JsonResponse(bodies.DrainResult(_cluster_body(call, view), reservations))


async def remove_cluster(call: RequestContext) -> web.StreamResponse:
    await call.broker.remove(call.cluster)
    return web.Response(status=HTTPStatus.NO_CONTENT)


async def _read_reason(call: RequestContext) -> str:
    body = await call.body(bodies.CordonRequest, optional=True)
    return validation.check_plain(body.reason, "reason") or f"by {call.caller.name}"


def _cluster_body(call: RequestContext, view: ClusterView) -> bodies.Cluster:
    cluster, reserved, lent, holds = view
    return bodies.Cluster(
        conversion.from_cluster(cluster, reserved),
        conversion.from_cluster_status(cluster, reserved, lent, holds, call.broker.clock()),
    )


async def publish_advertisement(call: RequestContext) -> web.StreamResponse:
    body = await call.body(bodies.Advertisement)
    cluster = call.caller.cluster
    authorization.check_cluster_id(body.cluster_id, cluster)
    with call.charge_patterns():
        advertisement = conversion.to_advertisement(body, cluster, call.broker.clock())
    view, holds = await call.broker.advertise(advertisement, call.caller.until)
    return JsonResponse(
        bodies.PublishResult(
            conversion.published_advertisement(body, view.cluster, view.reserved),
            [conversion.from_reservation(found) for found in holds],
        )
    )


async def get_advertisement(call: RequestContext) -> web.StreamResponse:
    request.check_own_cluster(call, call.cluster)
    view = await call.broker.cluster(call.cluster)
    return JsonResponse(conversion.from_cluster(view.cluster, view.reserved))


async def list_policies(call: RequestContext) -> web.StreamResponse:
    limit = call.page_size()
    found = await call.app.limits.policies(call.request.query.get("continue", ""), limit + 1)
    views, more = paginate(found, limit, lambda view: view.cluster)
    return JsonResponse(admin_bodies.PolicyList([_policy_body(view) for view in views], more))


async def get_policy(call: RequestContext) -> web.StreamResponse:
    request.check_own_cluster(call, call.cluster)
    return JsonResponse(_policy_body(await call.app.limits.policy(call.cluster)))


async def set_policy(call: RequestContext) -> web.StreamResponse:
    request.check_path_name(call.cluster, "cluster name")
    body = await call.body(admin_bodies.PolicyRequest)
    with call.charge_patterns():
        policy = admin_conversion.to_policy(body)
    return JsonResponse(_policy_body(await call.app.limits.set_policy(call.cluster, policy)))


async def clear_policy(call: RequestContext) -> web.StreamResponse:
    await call.app.limits.clear_policy(call.cluster)
    return web.Response(status=HTTPStatus.NO_CONTENT)


async def list_quotas(call: RequestContext) -> web.StreamResponse:
    limit = call.page_size()
    found = await call.app.limits.quotas(call.request.query.get("continue", ""), limit + 1)
    views, more = paginate(found, limit, lambda view: view.cluster)
    return JsonResponse(admin_bodies.QuotaList([_quota_body(view) for view in views], more))


async def get_quota(call: RequestContext) -> web.StreamResponse:
    request.check_own_cluster(call, call.cluster)
    return JsonResponse(_quota_body(await call.app.limits.quota(call.cluster)))


async def set_quota(call: RequestContext) -> web.StreamResponse:
    request.check_path_name(call.cluster, "cluster name")
    quota = admin_conversion.to_quota(await call.body(admin_bodies.QuotaRequest))
    return JsonResponse(_quota_body(await call.app.limits.set_quota(call.cluster, quota)))


async def clear_quota(call: RequestContext) -> web.StreamResponse:
    await call.app.limits.clear_quota(call.cluster)
    return web.Response(status=HTTPStatus.NO_CONTENT)


def _policy_body(view: PolicyView) -> admin_bodies.PolicyStatus:
    return admin_bodies.PolicyStatus(
        view.cluster,
        admin=admin_conversion.from_policy(view.admin_policy),
        advertised=admin_conversion.from_policy(view.advertised),
        effective=admin_conversion.from_lending(view.effective),
    )


def _quota_body(view: QuotaView) -> admin_bodies.QuotaStatus:
    return admin_conversion.from_quota(view.cluster, view.usage, view.at)
