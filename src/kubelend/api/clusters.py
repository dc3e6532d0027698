"""Handlers of clusters and their advertisements."""

from __future__ import annotations

from aiohttp import web

from kubelend.api import access
from kubelend.api.calls import RequestContext, json_response, paginate
from kubelend.broker.views import ClusterView
from kubelend.wire import bodies, conversion, texts

NO_CONTENT = 204


async def list_clusters(call: RequestContext) -> web.StreamResponse:
    limit = call.page_size()
    found = await call.broker.clusters(call.request.query.get("continue", ""), limit + 1)
    views, more = paginate(found, limit, lambda view: view.cluster.id)
    return json_response(bodies.ClusterList([_cluster_body(call, view) for view in views], more))


async def get_cluster(call: RequestContext) -> web.StreamResponse:
    access.check_own_cluster(call, call.cluster)
    return json_response(_cluster_body(call, await call.broker.cluster(call.cluster)))


async def cordon(call: RequestContext) -> web.StreamResponse:
    why = await _read_reason(call)
    return json_response(_cluster_body(call, await call.broker.cordon(call.cluster, why)))


async def uncordon(call: RequestContext) -> web.StreamResponse:
    return json_response(_cluster_body(call, await call.broker.uncordon(call.cluster)))


async def drain(call: RequestContext) -> web.StreamResponse:
    why = await _read_reason(call)
    view, drained = await call.broker.drain(call.cluster, why)
    reservations = [conversion.from_reservation(found) for found in drained]
    return json_response(bodies.DrainResult(_cluster_body(call, view), reservations))


async def remove_cluster(call: RequestContext) -> web.StreamResponse:
    await call.broker.remove(call.cluster)
    return web.Response(status=NO_CONTENT)


async def _read_reason(call: RequestContext) -> str:
    body = await call.optional_body(bodies.CordonRequest)
    return texts.check_plain(body.reason, "reason") or f"by {call.caller.name}"


def _cluster_body(call: RequestContext, view: ClusterView) -> bodies.Cluster:
    cluster, reserved, lent, holds = view
    return bodies.Cluster(
        conversion.from_cluster(cluster, reserved),
        conversion.from_cluster_status(cluster, reserved, lent, holds, call.broker.clock()),
    )
