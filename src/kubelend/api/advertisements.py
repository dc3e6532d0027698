"""Handlers of advertisements."""

from __future__ import annotations

from aiohttp import web

from kubelend.api import access
from kubelend.api.calls import Call, json
from kubelend.broker import parties
from kubelend.wire import bodies, conversion


async def publish(call: Call) -> web.StreamResponse:
    body = await call.body(bodies.Advertisement)
    cluster = call.caller.cluster
    parties.check_speaker(body.cluster_id, cluster)
    advertisement = conversion.to_advertisement(body, cluster, call.broker.clock())
    view, holds = await call.broker.advertise(advertisement, call.caller.until)
    return json(
        bodies.Published(
            conversion.accepted(body, view.cluster, view.reserved),
            [conversion.from_reservation(found) for found in holds],
        )
    )


async def get_advertisement(call: Call) -> web.StreamResponse:
    access.only_itself(call, call.cluster)
    view = await call.broker.cluster(call.cluster)
    return json(conversion.from_cluster(view.cluster, view.reserved))
