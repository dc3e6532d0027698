"""Handlers of advertisements."""

from __future__ import annotations

from aiohttp import web

from kubelend.api import access
from kubelend.api.calls import RequestContext, json_response
from kubelend.broker import parties
from kubelend.wire import bodies, conversion


async def publish_advertisement(call: RequestContext) -> web.StreamResponse:
    body = await call.body(bodies.Advertisement)
    cluster = call.caller.cluster
    parties.check_cluster_id(body.cluster_id, cluster)
    advertisement = conversion.to_advertisement(body, cluster, call.broker.clock())
    view, holds = await call.broker.advertise(advertisement, call.caller.until)
    return json_response(
        bodies.PublishResult(
            conversion.published_advertisement(body, view.cluster, view.reserved),
            [conversion.from_reservation(found) for found in holds],
        )
    )


async def get_advertisement(call: RequestContext) -> web.StreamResponse:
    access.check_own_cluster(call, call.cluster)
    view = await call.broker.cluster(call.cluster)
    return json_response(conversion.from_cluster(view.cluster, view.reserved))
