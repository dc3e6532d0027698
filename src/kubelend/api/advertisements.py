"""What clusters say of themselves."""

from __future__ import annotations

from aiohttp import web

from kubelend.api import access
from kubelend.api.calls import Call, json
from kubelend.core.errors import Forbidden
from kubelend.wire import bodies, conversion


async def publish(call: Call) -> web.Response:
    """A cluster speaks only for itself: the certificate names it, the body has to agree."""
    body = await call.body(bodies.Advertisement)
    cluster = call.caller.cluster
    if body.cluster_id != cluster:
        raise Forbidden(
            f"clusterID {body.cluster_id[:64]!r} is not the certificate's {cluster!r}",
            hint="send the common name of the certificate",
        )
    advertisement = conversion.to_advertisement(body, cluster, call.broker.clock())
    view, holds = await call.broker.advertise(advertisement, call.caller.until)
    return json(
        bodies.Published(
            conversion.accepted(body, view.cluster, view.reserved),
            [conversion.from_reservation(found) for found in holds],
        )
    )


async def get_advertisement(call: Call) -> web.Response:
    access.only_itself(call, call.cluster)
    view = await call.broker.cluster(call.cluster)
    return json(conversion.from_cluster(view.cluster, view.reserved))
