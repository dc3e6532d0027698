"""Client of the token and member routes."""

from __future__ import annotations

from functools import partial

from kubelend.transports import calls, paging
from kubelend.transports.sessions import Session
from kubelend.wire import membership_bodies as bodies


class TokenClient:
    """`client.tokens`."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def create(self, request: bodies.TokenRequest) -> bodies.NewToken:
        """Creates a token. Not retried: a lost response would leave a second token."""
        return await self._session.call(bodies.NewToken, "create_token", body=request)

    async def all(self) -> list[bodies.Token]:
        return (await self._session.call(bodies.TokenList, "list_tokens")).tokens

    async def delete(self, token: str) -> None:
        await self._session.send(calls.make_request("delete_token", token))


class MemberClient:
    """`client.members`: members by role and name."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def page(
        self, *, standing: str = "", limit: int = 0, after: str = ""
    ) -> bodies.MemberList:
        """Returns one page; `after` is the `next` of the previous page."""
        query = {"standing": standing, **calls.page_query(limit, after)}
        return await self._session.call(bodies.MemberList, "list_members", query=query)

    async def all(self, *, standing: str = "") -> list[bodies.Member]:
        """Returns all pages."""
        ask = partial(self.page, standing=standing)
        return await paging.all_pages(ask, lambda page: page.members)

    async def approve(
        self, role: str, name: str, key: str = "", *, keep_old: bool = False
    ) -> bodies.Member:
        body = bodies.AcceptRequest(key, keep_old)
        return await self._session.call(bodies.Member, "accept_member", role, name, body=body)

    async def deny(self, role: str, name: str) -> None:
        await self._session.send(calls.make_request("reject_member", role, name))

    async def revoke(
        self, role: str, name: str, *, release: bool, reason: str = ""
    ) -> bodies.Revocation:
        body = bodies.RevokeRequest(release, reason)
        return await self._session.call(bodies.Revocation, "revoke_member", role, name, body=body)

    async def remove(self, role: str, name: str) -> bodies.Removal:
        return await self._session.call(bodies.Removal, "remove_member", role, name)
