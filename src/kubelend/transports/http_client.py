"""Client of the broker's REST API: one method for each route.

Used by the command line, the agent, the demo and the benchmarks. Sending, errors and retries are in
`transports.session`.

    async with BrokerClient("https://broker:8443", Path("certs/cluster-1")) as client:
        reservation = await client.reserve(request)
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kubelend.core.errors import NotReady
from kubelend.kits.backoff import Backoff
from kubelend.transports import calls, paging, sessions, streams
from kubelend.transports.audit_client import AuditClient
from kubelend.transports.certificates import CertificateClient
from kubelend.transports.following import ReportError
from kubelend.transports.limits_client import PolicyClient, QuotaClient
from kubelend.transports.membership_client import MemberClient, TokenClient
from kubelend.transports.sessions import Session
from kubelend.wire import bodies, grant_bodies, route


class BrokerClient:
    """A client of one broker; open it with `async with`."""

    def __init__(
        self,
        url: str,
        directory: Path,
        *,
        timeout: timedelta = sessions.REQUEST_TIMEOUT,
        backoff: Backoff = sessions.DEFAULT_BACKOFF,
        check_every: timedelta = sessions.RELOAD_INTERVAL,
        report: ReportError = lambda _: None,
        instance: str = "",
    ) -> None:
        """`check_every` and `report` configure the reload of its directory, see `Session`.

        `instance` is for agents: a name that changes with each start. One instance per cluster is active.
        """
        self._session = Session(
            url,
            directory,
            timeout=timeout,
            backoff=backoff,
            check_every=check_every,
            report=report,
            instance=instance,
        )
        # Other nouns than clusters and reservations have their own small classes.
        self.certificates = CertificateClient(self._session)
        self.audit = AuditClient(self._session)
        self.tokens = TokenClient(self._session)
        self.members = MemberClient(self._session)
        self.policies = PolicyClient(self._session)
        self.quotas = QuotaClient(self._session)

    async def __aenter__(self) -> Self:
        await self._session.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._session.__aexit__(kind, error, trace)

    async def refresh(self) -> bool:
        """Reloads changed files of the directory now; True if it did."""
        return await self._session.refresh()

    # -- for clusters

    async def publish(self, advertisement: bodies.Advertisement) -> bodies.PublishResult:
        return await self._session.call(bodies.PublishResult, "publish", body=advertisement)

    async def get_advertisement(self, cluster: str) -> bodies.Advertisement:
        return await self._session.call(bodies.Advertisement, "get_advertisement", cluster)

    async def reserve(
        self, request: bodies.ReservationRequest, *, key: str = ""
    ) -> bodies.Reservation:
        """Reserves; without a key one is generated, so that retries do not reserve twice."""
        headers = {route.IDEMPOTENCY_KEY: route.check_idempotency_key(key or uuid.uuid4().hex)}
        return await self._session.call(
            bodies.Reservation, "reserve", body=request, headers=headers
        )

    async def reserve_dry_run(self, request: bodies.ReservationRequest) -> bodies.Explanation:
        """Dry run of `reserve`: returns the explanation; changes nothing."""
        return await self._session.call(
            bodies.Explanation, "reserve", body=request, query={"dryRun": "true"}
        )

    async def activate(self, reservation: str) -> bodies.Reservation:
        return await self._session.call(bodies.Reservation, "activate", reservation)

    async def renew(self, reservation: str, duration: str = "") -> bodies.Reservation:
        """Renews for `duration` from now; by default for the requested duration."""
        body = bodies.RenewRequest(duration)
        return await self._session.call(bodies.Reservation, "renew", reservation, body=body)

    async def release(self, reservation: str) -> bodies.Reservation:
        return await self._session.call(bodies.Reservation, "release", reservation)

    # -- queries

    async def get_reservation(self, reservation: str) -> bodies.Reservation:
        return await self._session.call(bodies.Reservation, "get_reservation", reservation)

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
        query = {"role": role, "phase": phase, "cluster": cluster, **calls.page_query(limit, after)}
        return await self._session.call(bodies.ReservationList, "list_reservations", query=query)

    async def all_reservations(
        self, *, role: str = "", phase: str = "", cluster: str = ""
    ) -> list[bodies.Reservation]:
        """Returns all pages."""
        ask = partial(
            self.list_reservations,
            role=role,
            phase=phase,
            cluster=cluster,
            limit=route.MAX_PAGE_SIZE,
        )
        return await paging.all_pages(ask, lambda page: page.reservations)

    async def explain(
        self, request: bodies.ReservationRequest, *, limit: int = 0
    ) -> bodies.Explanation:
        return await self._session.call(
            bodies.Explanation, "explain", body=request, query=calls.page_query(limit)
        )

    async def explain_reservation(self, reservation: str, *, limit: int = 0) -> bodies.Explanation:
        return await self._session.call(
            bodies.Explanation, "explain_reservation", reservation, query=calls.page_query(limit)
        )

    # -- instructions

    async def instructions(self) -> list[bodies.Reservation]:
        """Returns the reservations that this cluster has to hold."""
        answer = await self._session.send(calls.make_request("instructions"))
        # The published broker returns null for an empty list.
        return [] if answer.body.strip() == b"null" else answer.decode(list[bodies.Reservation])

    async def acknowledge(self, reservation: str) -> bodies.Reservation:
        return await self._session.call(bodies.Reservation, "acknowledge", reservation)

    async def refuse(self, reservation: str, reason: str = "") -> bodies.Reservation:
        body = bodies.RefuseRequest(reason)
        return await self._session.call(bodies.Reservation, "refuse", reservation, body=body)

    def stream(
        self,
        *,
        after: str = "",
        on_reset: Callable[[], None] | None = None,
        backoff: Backoff | None = None,
        read_timeout: timedelta = streams.STREAM_TIMEOUT,
    ) -> AsyncGenerator[bodies.Instruction, None]:
        """Yields instructions after an event ID; reconnects when the connection breaks.

        `on_reset` is called when the broker starts over: the following instructions are the complete state,
        and every other reservation is finished. `backoff` limits consecutive reconnects without an event or a
        long-lived connection in between; then the error is raised. Leave the loop early only within
        `contextlib.aclosing`, which closes the connection. When the certificate is rotated, it reconnects; no
        event is lost or duplicated.
        """
        return streams.stream_instructions(
            self._session,
            after=after,
            on_reset=on_reset,
            backoff=backoff or self._session.backoff,
            read_timeout=read_timeout,
        )

    # -- for administrators

    async def get_cluster(self, cluster: str) -> bodies.Cluster:
        return await self._session.call(bodies.Cluster, "get_cluster", cluster)

    async def list_clusters(self, *, limit: int = 0, after: str = "") -> bodies.ClusterList:
        """Returns one page; `after` is the `next` of the previous page."""
        return await self._session.call(
            bodies.ClusterList, "list_clusters", query=calls.page_query(limit, after)
        )

    async def all_clusters(self) -> list[bodies.Cluster]:
        """Returns all pages."""
        return await paging.all_pages(self.list_clusters, lambda page: page.clusters)

    async def cordon(self, cluster: str, reason: str = "") -> bodies.Cluster:
        return await self._session.call(
            bodies.Cluster, "cordon", cluster, body=bodies.CordonRequest(reason)
        )

    async def uncordon(self, cluster: str) -> bodies.Cluster:
        return await self._session.call(bodies.Cluster, "uncordon", cluster)

    async def drain(self, cluster: str, reason: str = "") -> bodies.DrainResult:
        return await self._session.call(
            bodies.DrainResult, "drain", cluster, body=bodies.CordonRequest(reason)
        )

    async def remove_cluster(self, cluster: str) -> None:
        await self._session.send(calls.make_request("remove_cluster", cluster))

    # -- the broker itself

    async def version(self) -> bodies.Version:
        return await self._session.call(bodies.Version, "version")

    async def grant(self, reservation: str) -> str:
        """Returns the signed grant of a reservation."""
        return (await self._session.call(grant_bodies.SignedGrant, "grant", reservation)).grant

    async def grant_keys(self) -> grant_bodies.KeySet:
        return await self._session.call(grant_bodies.KeySet, "grant_keys")

    async def openapi(self) -> dict[str, Any]:
        return await self._session.call(dict[str, Any], "openapi")

    async def healthz(self) -> str:
        return (await self._session.send(calls.make_request("healthz"))).text

    async def readyz(self) -> str:
        """Raises `NotReady` with the reason if the broker is not ready."""
        answer = await self._session.send(calls.make_request("readyz"))
        if answer.status != 200:
            raise NotReady(f"the broker is {answer.text.strip()}", hint="try again later")
        return answer.text
