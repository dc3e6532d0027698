"""Client of the broker's REST API: one method for each route.

Used by the command line, the agent, the demo and the benchmarks. Sending, errors and retries are in
`transports.session`.

    async with BrokerClient("https://broker:8443", Path("certs/cluster-1")) as client:
        reservation = await client.reserve(request)

For processes without a certificate there is the enrolment listener: `fetch_authorities` fetches the CA
certificates over an unverified connection, and the caller checks them against a pin; `send_join_request`
sends the token over a connection that is verified with those CAs.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from datetime import timedelta
from functools import cached_property, partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, Protocol, TypeVar

import aiohttp
import msgspec
import yarl

from kubelend.core.errors import BrokerUnreachable, KubelendError, NotReady, UnexpectedResponse
from kubelend.kits.backoff import Backoff
from kubelend.transports import errors, session, tls
from kubelend.transports import session as transports_session
from kubelend.transports.session import Response, ServerSentEvent, Session
from kubelend.wire import admin_bodies, bodies, route, routes
from kubelend.wire.admin_bodies import AuditLine, AuditLog, JoinPending, JoinRequest, JoinResult
from kubelend.wire.routes import EnrolmentRoute

STREAM_TIMEOUT = timedelta(seconds=60)
"""A stream without data for this long is dead: the broker sends a keep-alive every 15 seconds."""


class _NounClient:
    """The routes of one noun, called through the client that has it as an attribute."""

    def __init__(self, client: Session) -> None:
        self._client = client


class AuditClient(_NounClient):
    """`client.audit`."""

    async def page(
        self, filters: Mapping[str, str], *, limit: int = 0, after: str = ""
    ) -> AuditLog:
        """Returns one page, newest first; `filters` are query parameters of the route."""
        query = {**filters, **session.page_query(limit, after)}
        return await self._client.call(AuditLog, "audit_log", query=query)

    async def latest(self, filters: Mapping[str, str], limit: int) -> list[AuditLine]:
        """Returns the newest `limit` lines, from as many pages as needed."""
        found: list[AuditLine] = []
        after = ""
        while len(found) < limit:
            page = await self.page(filters, limit=min(limit - len(found), 1000), after=after)
            found += page.lines
            if not (after := page.next):
                break
        return found


class CertificateClient(_NounClient):
    """`client.certificates`; `kubelend.apps.join` calls it."""

    async def renew(self, request: str) -> admin_bodies.IssuedCertificate:
        """Renews the own certificate for the key of this signing request (PEM)."""
        body = admin_bodies.CertificateRequest(request)
        return await self._client.call(
            admin_bodies.IssuedCertificate, "renew_certificate", body=body
        )


class PolicyClient(_NounClient):
    """`client.policies`: policies by provider."""

    async def get(self, cluster: str) -> admin_bodies.PolicyStatus:
        return await self._client.call(admin_bodies.PolicyStatus, "get_policy", cluster)

    async def page(self, *, limit: int = 0, after: str = "") -> admin_bodies.PolicyList:
        """Returns one page; `after` is the `next` of the previous page."""
        query = session.page_query(limit, after)
        return await self._client.call(admin_bodies.PolicyList, "list_policies", query=query)

    async def all(self) -> list[admin_bodies.PolicyStatus]:
        return await all_pages(self.page, lambda page: page.policies)

    async def set(
        self, cluster: str, policy: admin_bodies.PolicyRequest
    ) -> admin_bodies.PolicyStatus:
        """Replaces what was set before."""
        return await self._client.call(
            admin_bodies.PolicyStatus, "set_policy", cluster, body=policy
        )

    async def clear(self, cluster: str) -> None:
        await self._client.send("clear_policy", cluster)


class QuotaClient(_NounClient):
    """`client.quotas`: quotas by requester."""

    async def get(self, cluster: str) -> admin_bodies.QuotaStatus:
        return await self._client.call(admin_bodies.QuotaStatus, "get_quota", cluster)

    async def page(self, *, limit: int = 0, after: str = "") -> admin_bodies.QuotaList:
        """Returns one page; `after` is the `next` of the previous page."""
        query = session.page_query(limit, after)
        return await self._client.call(admin_bodies.QuotaList, "list_quotas", query=query)

    async def all(self) -> list[admin_bodies.QuotaStatus]:
        return await all_pages(self.page, lambda page: page.quotas)

    async def set(self, cluster: str, quota: admin_bodies.QuotaRequest) -> admin_bodies.QuotaStatus:
        """Replaces what was set before."""
        return await self._client.call(admin_bodies.QuotaStatus, "set_quota", cluster, body=quota)

    async def clear(self, cluster: str) -> None:
        await self._client.send("clear_quota", cluster)


class TokenClient(_NounClient):
    """`client.tokens`."""

    async def create(self, request: admin_bodies.TokenRequest) -> admin_bodies.NewToken:
        """Creates a token. Not retried: a lost response would leave a second token."""
        return await self._client.call(admin_bodies.NewToken, "create_token", body=request)

    async def all(self) -> list[admin_bodies.Token]:
        return (await self._client.call(admin_bodies.TokenList, "list_tokens")).tokens

    async def delete(self, token: str) -> None:
        await self._client.send("delete_token", token)


class MemberClient(_NounClient):
    """`client.members`: members by role and name."""

    async def page(
        self, *, status: str = "", outdated: bool = False, limit: int = 0, after: str = ""
    ) -> admin_bodies.MemberList:
        """Returns one page; `after` is the `next` of the previous page."""
        query = {"status": status, "outdated": "true" if outdated else ""}
        query |= session.page_query(limit, after)
        return await self._client.call(admin_bodies.MemberList, "list_members", query=query)

    async def all(self, *, status: str = "", outdated: bool = False) -> list[admin_bodies.Member]:
        return await all_pages(
            partial(self.page, status=status, outdated=outdated), lambda page: page.members
        )

    async def approve(
        self, role: str, name: str, key: str = "", *, keep_old: bool = False
    ) -> admin_bodies.Member:
        body = admin_bodies.ApproveRequest(key, keep_old)
        return await self._client.call(admin_bodies.Member, "approve_member", role, name, body=body)

    async def deny(self, role: str, name: str) -> None:
        await self._client.send("deny_member", role, name)

    async def revoke(
        self, role: str, name: str, *, release: bool, reason: str = ""
    ) -> admin_bodies.Revocation:
        body = admin_bodies.RevokeRequest(release, reason)
        return await self._client.call(
            admin_bodies.Revocation, "revoke_member", role, name, body=body
        )

    async def remove(self, role: str, name: str) -> admin_bodies.Removal:
        return await self._client.call(admin_bodies.Removal, "remove_member", role, name)


class ListPage(Protocol):
    """The body of a list."""

    @property
    def next(self) -> str:
        """The continue token; empty on the last page."""


SomePage = TypeVar("SomePage", bound=ListPage)
Item = TypeVar("Item")


async def all_pages(
    call: Callable[..., Awaitable[SomePage]], items: Callable[[SomePage], list[Item]]
) -> list[Item]:
    found: list[Item] = []
    after = ""
    while True:
        page = await call(after=after)
        found += items(page)
        if not (after := page.next):
            return found


class BrokerClient(Session):
    """A client of one broker; open it with `async with`."""

    # Other nouns than clusters and reservations have their own small classes.
    audit = cached_property(AuditClient)
    certificates = cached_property(CertificateClient)
    tokens = cached_property(TokenClient)
    members = cached_property(MemberClient)
    policies = cached_property(PolicyClient)
    quotas = cached_property(QuotaClient)

    # -- for clusters

    async def publish(self, advertisement: bodies.Advertisement) -> bodies.PublishResult:
        return await self.call(bodies.PublishResult, "publish", body=advertisement)

    async def get_advertisement(self, cluster: str) -> bodies.Advertisement:
        return await self.call(bodies.Advertisement, "get_advertisement", cluster)

    async def reserve(
        self, request: bodies.ReservationRequest, *, key: str = ""
    ) -> bodies.Reservation:
        """Reserves; without a key one is generated, so that retries do not reserve twice."""
        headers = {route.IDEMPOTENCY_KEY: route.check_idempotency_key(key or uuid.uuid4().hex)}
        return await self.call(bodies.Reservation, "reserve", body=request, headers=headers)

    async def reserve_dry_run(self, request: bodies.ReservationRequest) -> bodies.Explanation:
        """Dry run of `reserve`: returns the explanation; changes nothing."""
        query = {"dryRun": "true"}
        return await self.call(bodies.Explanation, "reserve", body=request, query=query)

    async def activate(self, reservation: str) -> bodies.Reservation:
        return await self.call(bodies.Reservation, "activate", reservation)

    async def renew(self, reservation: str, duration: str = "") -> bodies.Reservation:
        """Renews for `duration` from now; by default for the requested duration."""
        body = bodies.RenewRequest(duration)
        return await self.call(bodies.Reservation, "renew", reservation, body=body)

    async def release(self, reservation: str) -> bodies.Reservation:
        return await self.call(bodies.Reservation, "release", reservation)

    # -- queries

    async def get_reservation(self, reservation: str) -> bodies.Reservation:
        return await self.call(bodies.Reservation, "get_reservation", reservation)

    async def list_reservations(
        self,
        *,
        role: str = "",
        phase: str = "",
        cluster: str = "",
        limit: int = 0,
        after: str = "",
    ) -> bodies.ReservationList:
        """Returns one page; `after` is the `next` of the previous page."""
        filters = {"role": role, "phase": phase, "cluster": cluster}
        query = {**filters, **session.page_query(limit, after)}
        return await self.call(bodies.ReservationList, "list_reservations", query=query)

    async def all_reservations(
        self, *, role: str = "", phase: str = "", cluster: str = ""
    ) -> list[bodies.Reservation]:
        filters = {"role": role, "phase": phase, "cluster": cluster}
        fetch = partial(self.list_reservations, **filters, limit=route.MAX_PAGE_SIZE)
        return await all_pages(fetch, lambda page: page.reservations)

    async def explain(
        self, request: bodies.ReservationRequest, *, limit: int = 0
    ) -> bodies.Explanation:
        query = session.page_query(limit)
        return await self.call(bodies.Explanation, "explain", body=request, query=query)

    async def explain_reservation(self, reservation: str, *, limit: int = 0) -> bodies.Explanation:
        query = session.page_query(limit)
        return await self.call(bodies.Explanation, "explain_reservation", reservation, query=query)

    # -- instructions

    async def instructions(self) -> list[bodies.Reservation]:
        """Returns the reservations that this cluster has to hold."""
        answer = await self.send("instructions")
        # The published broker returns null for an empty list.
        return [] if answer.body.strip() == b"null" else answer.decode(list[bodies.Reservation])

    async def acknowledge(
        self, reservation: str, held: bodies.HoldReport | None = None
    ) -> bodies.Reservation:
        body = None if held is None else bodies.AcknowledgeRequest(held)
        return await self.call(bodies.Reservation, "acknowledge", reservation, body=body)

    async def refuse(self, reservation: str, reason: str = "") -> bodies.Reservation:
        body = bodies.RefuseRequest(reason)
        return await self.call(bodies.Reservation, "refuse", reservation, body=body)

    async def exchange_handshake(
        self, reservation: str, handshake: bodies.Handshake
    ) -> bodies.HandshakeResult:
        """Sends this cluster's part of the peering handshake; returns the other side's."""
        return await self.call(
            bodies.HandshakeResult, "exchange_handshake", reservation, body=handshake
        )

    async def stream(
        self,
        *,
        after: str = "",
        on_reset: Callable[[], None] = lambda: None,
        on_handshake: Callable[[str], None] = lambda _: None,
        backoff: Backoff | None = None,
        read_timeout: timedelta = STREAM_TIMEOUT,
    ) -> AsyncGenerator[bodies.Instruction, None]:
        """Yields instructions after an event ID; reconnects when the connection breaks.

        `on_reset` is called when the broker starts over: the following instructions are the complete state,
        and every other reservation is finished. `on_handshake` is called with a reservation whose other side
        has sent a new handshake. `backoff` limits consecutive reconnects without an event or a
        long-lived connection in between; then the error is raised. Leave the loop early only within
        `contextlib.aclosing`, which closes the connection. When the certificate is rotated, it reconnects; no
        event is lost or duplicated.
        """
        backoff = backoff or self.backoff
        delays, clock = backoff.delays(), asyncio.get_running_loop().time
        while True:
            began = clock()
            try:
                async with contextlib.aclosing(self._stream_events(after, read_timeout)) as events:
                    async for event in events:
                        after, delays = event.id or after, backoff.delays()
                        if event.name == "instruction":
                            yield Response(200, event.data.encode()).decode(bodies.Instruction)
                        elif event.name == "reset":
                            # Earlier event IDs are invalid: the broker may have reset its revisions.
                            after = event.id
                            on_reset()
                        elif event.name == "handshake":
                            on_handshake(msgspec.json.decode(event.data)["reservation"])
            except KubelendError as error:
                if clock() - began > backoff.longest.total_seconds():
                    delays = backoff.delays()
                await self.wait_before_retry(error, next(delays, None), backoff)

    async def _stream_events(
        self, after: str, read_timeout: timedelta
    ) -> AsyncGenerator[ServerSentEvent, None]:
        """Yields the events of one connection; ends without an error only for a new certificate."""
        headers = {route.LAST_EVENT_ID: after} if after else {}
        call = session.make_request("stream", headers=headers)
        parser = session.EventStreamParser()
        async with contextlib.aclosing(self.stream_chunks(call, read_timeout)) as chunks:
            async for chunk in chunks:
                for event in parser.feed(chunk):
                    yield event

    # -- for administrators

    async def get_cluster(self, cluster: str) -> bodies.Cluster:
        return await self.call(bodies.Cluster, "get_cluster", cluster)

    async def list_clusters(self, *, limit: int = 0, after: str = "") -> bodies.ClusterList:
        """Returns one page; `after` is the `next` of the previous page."""
        query = session.page_query(limit, after)
        return await self.call(bodies.ClusterList, "list_clusters", query=query)

    async def all_clusters(self) -> list[bodies.Cluster]:
        return await all_pages(self.list_clusters, lambda page: page.clusters)

    async def cordon(self, cluster: str, reason: str = "") -> bodies.Cluster:
        body = bodies.CordonRequest(reason)
        return await self.call(bodies.Cluster, "cordon", cluster, body=body)

    async def uncordon(self, cluster: str) -> bodies.Cluster:
        return await self.call(bodies.Cluster, "uncordon", cluster)

    async def drain(self, cluster: str, reason: str = "") -> bodies.DrainResult:
        body = bodies.CordonRequest(reason)
        return await self.call(bodies.DrainResult, "drain", cluster, body=body)

    async def remove_cluster(self, cluster: str) -> None:
        await self.send("remove_cluster", cluster)

    # -- the broker itself

    async def version(self) -> bodies.Version:
        return await self.call(bodies.Version, "version")

    async def grant(self, reservation: str) -> str:
        return (await self.call(bodies.SignedGrant, "grant", reservation)).grant

    async def grant_keys(self) -> bodies.KeySet:
        return await self.call(bodies.KeySet, "grant_keys")

    async def openapi(self) -> dict[str, Any]:
        return await self.call(dict[str, Any], "openapi")

    async def healthz(self) -> str:
        return (await self.send("healthz")).text

    async def readyz(self) -> str:
        """Raises `NotReady` with the reason if the broker is not ready."""
        answer = await self.send("readyz")
        if answer.status != 200:
            raise NotReady(f"the broker is {answer.text.strip()}", hint="try again later")
        return answer.text


MAX_RESPONSE_BYTES = 1 << 20
"""Maximum bytes of a response, which comes from an unverified server."""


async def fetch_authorities(
    url: str, timeout: timedelta = transports_session.REQUEST_TIMEOUT
) -> str:
    """Fetches the CA certificates (PEM), unverified."""
    answer = await _send_request(url, routes.AUTHORITIES_ROUTE, tls.enrolment_context(), timeout)
    try:
        return answer.body.decode("ascii")
    except UnicodeDecodeError as error:
        raise UnexpectedResponse(
            f"{url}: not a response of a broker", hint="check address and port"
        ) from error


async def send_join_request(
    url: str,
    body: JoinRequest,
    trusted: str,
    timeout: timedelta = transports_session.REQUEST_TIMEOUT,
) -> JoinResult | JoinPending:
    """Sends a join request to a broker whose certificate these CAs (PEM) have signed."""
    context, content = tls.enrolment_context(trusted), msgspec.json.encode(body)
    answer = await _send_request(url, routes.JOIN_ROUTE, context, timeout, content)
    if answer.status == HTTPStatus.ACCEPTED:
        return answer.decode(JoinPending)
    return answer.decode(JoinResult)


async def _send_request(
    url: str,
    route: EnrolmentRoute,
    context: ssl.SSLContext,
    timeout: timedelta,
    content: bytes | None = None,
) -> Response:
    address = yarl.URL(url.rstrip("/") + route.path)
    with _UnverifiedEndpoint(url, Path()).translate_errors(timeout):
        async with (
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(ssl=context),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=timeout.total_seconds()),
            ) as session,
            session.request(
                route.method,
                address,
                data=content,
                headers={"Content-Type": "application/json"} if content else None,
                allow_redirects=False,
            ) as response,
        ):
            text = await transports_session.read_response(response, MAX_RESPONSE_BYTES)
    if response.status not in (HTTPStatus.OK, HTTPStatus.ACCEPTED):
        raise transports_session.response_error(response, text)
    return Response(response.status, text)


class _UnverifiedEndpoint(errors.BrokerEndpoint):
    """A broker of which only the address is known, called without a client certificate."""

    def _verification_error(self, text: str) -> BrokerUnreachable:
        return BrokerUnreachable(
            f"the certificate of {self.url} is not signed by the CA with that hash: {text}",
            hint="the connection may be intercepted: no token was sent; check with `kubelend ca show`",
        )

    def _disconnect_error(self, error: Exception) -> BrokerUnreachable:
        return BrokerUnreachable(
            f"the broker at {self.url} closed the connection ({type(error).__name__})",
            hint="check address and port: join at the broker's --enrol-port, 8444 by default",
        )
