"""Handlers of clusters and their advertisements."""

from __future__ import annotations

from aiohttp import web

from kubelend.api import access
from kubelend.api.calls import Call, cut, json
from kubelend.broker.views import ClusterView
from kubelend.wire import bodies, conversion, texts

NO_CONTENT = 204


async def list_clusters(call: Call) -> web.StreamResponse:
    limit = call.page_size()
    found = await call.broker.clusters(call.request.query.get("continue", ""), limit + 1)
    views, more = cut(found, limit, lambda view: view.cluster.id)
    return json(bodies.ClusterList([_body(call, view) for view in views], more))


async def get_cluster(call: Call) -> web.StreamResponse:
    access.only_itself(call, call.cluster)
    return json(_body(call, await call.broker.cluster(call.cluster)))


async def cordon(call: Call) -> web.StreamResponse:
    why = await _reason(call)
    return json(_body(call, await call.broker.cordon(call.cluster, why)))


async def uncordon(call: Call) -> web.StreamResponse:
    return json(_body(call, await call.broker.uncordon(call.cluster)))


async def drain(call: Call) -> web.StreamResponse:
    why = await _reason(call)
    view, drained = await call.broker.drain(call.cluster, why)
    reservations = [conversion.from_reservation(found) for found in drained]
    return json(bodies.Drained(_body(call, view), reservations))


async def remove_cluster(call: Call) -> web.StreamResponse:
    await call.broker.remove(call.cluster)
    return web.Response(status=NO_CONTENT)


async def _reason(call: Call) -> str:
    body = await call.optional_body(bodies.CordonRequest)
    return texts.checked(body.reason, "reason") or f"by {call.caller.name}"


def _body(call: Call, view: ClusterView) -> bodies.Cluster:
    cluster, reserved, lent, holds = view
    return bodies.Cluster(
        conversion.from_cluster(cluster, reserved),
        conversion.from_cluster_status(cluster, reserved, lent, holds, call.broker.clock()),
    )
