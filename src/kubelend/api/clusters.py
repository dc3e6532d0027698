"""Handlers of clusters and their advertisements."""

from __future__ import annotations

from aiohttp import web

from kubelend.api import request
from kubelend.api.request import RequestContext, json_response, paginate
from kubelend.broker import authorization
from kubelend.broker.service import ClusterView
from kubelend.wire import bodies, conversion, validation

NO_CONTENT = 204


async def list_clusters(call: RequestContext) -> web.StreamResponse:
    limit = call.page_size()
    found = await call.broker.clusters(call.request.query.get("continue", ""), limit + 1)
    views, more = paginate(found, limit, lambda view: view.cluster.id)
    return json_response(bodies.ClusterList([_cluster_body(call, view) for view in views], more))


async def get_cluster(call: RequestContext) -> web.StreamResponse:
    request.check_own_cluster(call, call.cluster)
    return json_response(_cluster_body(call, await call.broker.cluster(call.cluster)))


async def cordon(call: RequestContext) -> web.StreamResponse:
    reason = await _read_reason(call)
    return json_response(_cluster_body(call, await call.broker.cordon(call.cluster, reason)))


async def uncordon(call: RequestContext) -> web.StreamResponse:
    return json_response(_cluster_body(call, await call.broker.uncordon(call.cluster)))


async def drain(call: RequestContext) -> web.StreamResponse:
    reason = await _read_reason(call)
    view, drained = await call.broker.drain(call.cluster, reason)
    reservations = [conversion.from_reservation(found) for found in drained]
    return json_response(bodies.DrainResult(_cluster_body(call, view), reservations))


async def remove_cluster(call: RequestContext) -> web.StreamResponse:
    await call.broker.remove(call.cluster)
    return web.Response(status=NO_CONTENT)


async def _read_reason(call: RequestContext) -> str:
    body = await call.optional_body(bodies.CordonRequest)
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
    advertisement = conversion.to_advertisement(body, cluster, call.broker.clock())
    view, holds = await call.broker.advertise(advertisement, call.caller.until)
    return json_response(
        bodies.PublishResult(
            conversion.published_advertisement(body, view.cluster, view.reserved),
            [conversion.from_reservation(found) for found in holds],
        )
    )


async def get_advertisement(call: RequestContext) -> web.StreamResponse:
    request.check_own_cluster(call, call.cluster)
    view = await call.broker.cluster(call.cluster)
    return json_response(conversion.from_cluster(view.cluster, view.reserved))
