"""Handlers of lending policies and quotas."""

from __future__ import annotations

from aiohttp import web

from kubelend.api import access
from kubelend.api.calls import Call, cut, json
from kubelend.broker.limiting import PolicyView, QuotaView
from kubelend.core.errors import InvalidIdentity, NotFound
from kubelend.core.models import ClusterId
from kubelend.pki import identities
from kubelend.wire import limit_bodies, limit_conversion

NO_CONTENT = 204


async def get_policy(call: Call) -> web.StreamResponse:
    access.only_itself(call, call.cluster)
    return json(_policy(await call.context.limiting.policy(call.cluster)))


async def set_policy(call: Call) -> web.StreamResponse:
    cluster = _named(call)
    body = await call.body(limit_bodies.PolicyRequest)
    policy = limit_conversion.to_policy(body)
    return json(_policy(await call.context.limiting.set_policy(cluster, policy)))


async def clear_policy(call: Call) -> web.StreamResponse:
    await call.context.limiting.clear_policy(call.cluster)
    return web.Response(status=NO_CONTENT)


async def list_quotas(call: Call) -> web.StreamResponse:
    limit = call.page_size()
    found = await call.context.limiting.quotas(call.request.query.get("continue", ""), limit + 1)
    views, more = cut(found, limit, lambda view: view.cluster)
    return json(limit_bodies.QuotaList([_quota(view) for view in views], more))


async def get_quota(call: Call) -> web.StreamResponse:
    access.only_itself(call, call.cluster)
    return json(_quota(await call.context.limiting.quota(call.cluster)))


async def set_quota(call: Call) -> web.StreamResponse:
    cluster = _named(call)
    quota = limit_conversion.to_quota(await call.body(limit_bodies.QuotaRequest))
    return json(_quota(await call.context.limiting.set_quota(cluster, quota)))


async def clear_quota(call: Call) -> web.StreamResponse:
    await call.context.limiting.clear_quota(call.cluster)
    return web.Response(status=NO_CONTENT)


def _named(call: Call) -> ClusterId:
    """Returns the cluster in the path, known or not; raises `NotFound` for an invalid name."""
    try:
        identities.check_name(call.cluster)
    except InvalidIdentity as problem:
        raise NotFound(
            f"invalid cluster name {call.cluster[:64]!r}", hint=problem.message
        ) from None
    return call.cluster


def _policy(view: PolicyView) -> limit_bodies.PolicyStatus:
    return limit_bodies.PolicyStatus(
        view.cluster,
        admin=limit_conversion.from_policy(view.ordered),
        advertised=limit_conversion.from_policy(view.advertised),
        effective=limit_conversion.from_lending(view.holds),
    )


def _quota(view: QuotaView) -> limit_bodies.QuotaStatus:
    return limit_conversion.from_quota(view.cluster, view.account, view.at)
