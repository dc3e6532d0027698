"""Client of the policy and quota routes."""

from __future__ import annotations

from kubelend.transports import calls, paging
from kubelend.transports.sessions import Session
from kubelend.wire import limit_bodies as bodies


class PolicyClient:
    """`client.policies`: policies by provider."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def get(self, cluster: str) -> bodies.PolicyStatus:
        return await self._session.call(bodies.PolicyStatus, "get_policy", cluster)

    async def set(self, cluster: str, policy: bodies.PolicyRequest) -> bodies.PolicyStatus:
        """Replaces what was set before."""
        return await self._session.call(bodies.PolicyStatus, "set_policy", cluster, body=policy)

    async def clear(self, cluster: str) -> None:
        await self._session.send(calls.make_request("clear_policy", cluster))


class QuotaClient:
    """`client.quotas`: quotas by requester."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def get(self, cluster: str) -> bodies.QuotaStatus:
        return await self._session.call(bodies.QuotaStatus, "get_quota", cluster)

    async def page(self, *, limit: int = 0, after: str = "") -> bodies.QuotaList:
        """Returns one page; `after` is the `next` of the previous page."""
        return await self._session.call(
            bodies.QuotaList, "list_quotas", query=calls.page_query(limit, after)
        )

    async def all(self) -> list[bodies.QuotaStatus]:
        """Returns all pages."""
        return await paging.all_pages(self.page, lambda page: page.quotas)

    async def set(self, cluster: str, quota: bodies.QuotaRequest) -> bodies.QuotaStatus:
        """Replaces what was set before."""
        return await self._session.call(bodies.QuotaStatus, "set_quota", cluster, body=quota)

    async def clear(self, cluster: str) -> None:
        await self._session.send(calls.make_request("clear_quota", cluster))
