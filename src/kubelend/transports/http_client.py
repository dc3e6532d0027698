"""The broker as its callers see it: one method for each route, its bodies in and out.

The command line, the demo and the benchmarks call the broker through this, and so will the agent. An
error of the broker is raised here as the very class which was raised there; no answer at all is
`BrokerUnreachable`. What can be repeated without harm is retried while the error says that this may help.

    async with BrokerClient("https://broker:8443", Path("certs/cluster-1")) as client:
        reservation = await client.reserve(request)
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Callable
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
import yarl

from kubelend.core.errors import BrokerUnreachable, KubelendError, LimitExceeded, NotReady
from kubelend.kits.backoff import Backoff
from kubelend.transports import calls, event_streams, failures, tls
from kubelend.transports.calls import Answer, Call
from kubelend.wire import bodies, problems, route

TIMEOUT = timedelta(seconds=30)
SILENCE = timedelta(seconds=60)
"""A stream that says nothing for so long is dead: the broker gives a sign of life every 15 seconds."""

_BACKOFF = Backoff()


class BrokerClient:
    """One caller's connections to one broker; open it with `async with`."""

    def __init__(
        self,
        url: str,
        directory: Path,
        *,
        timeout: timedelta = TIMEOUT,
        backoff: Backoff = _BACKOFF,
    ) -> None:
        self._url = url.rstrip("/")
        self._peer = failures.Peer(self._url, directory)
        self._timeout = timeout
        self._backoff = backoff
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        context = tls.client_context(self._peer.directory)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=context, limit=0),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.close()
        self._session = None

    # -- a cluster, for itself

    async def publish(self, advertisement: bodies.Advertisement) -> bodies.Published:
        call = calls.make("publish", body=advertisement)
        return (await self._send(call)).read(bodies.Published)

    async def get_advertisement(self, cluster: str) -> bodies.Advertisement:
        call = calls.make("get_advertisement", cluster)
        return (await self._send(call)).read(bodies.Advertisement)

    async def reserve(
        self, request: bodies.ReservationRequest, *, key: str = ""
    ) -> bodies.Reservation:
        """Without a key of the caller's, one for this call: so that its retries reserve once."""
        headers = {route.IDEMPOTENCY_KEY: calls.checked_key(key or uuid.uuid4().hex)}
        call = calls.make("reserve", body=request, headers=headers)
        return (await self._send(call)).read(bodies.Reservation)

    async def plan(self, request: bodies.ReservationRequest) -> bodies.Explanation:
        """The dry run of `reserve`: what it would choose and why; nothing changes."""
        call = calls.make("reserve", body=request, query={"dryRun": "true"})
        return (await self._send(call)).read(bodies.Explanation)

    async def activate(self, reservation: str) -> bodies.Reservation:
        return await self._reservation(calls.make("activate", reservation))

    async def renew(self, reservation: str, duration: str = "") -> bodies.Reservation:
        """For `duration` from now, or for as long as it was asked for at first."""
        body = bodies.RenewRequest(duration)
        return await self._reservation(calls.make("renew", reservation, body=body))

    async def release(self, reservation: str) -> bodies.Reservation:
        return await self._reservation(calls.make("release", reservation))

    # -- questions

    async def get_reservation(self, reservation: str) -> bodies.Reservation:
        return await self._reservation(calls.make("get_reservation", reservation))

    async def list_reservations(
        self,
        *,
        role: str = "",
        phase: str = "",
        cluster: str = "",
        limit: int = 0,
        after: str = "",
    ) -> bodies.ReservationList:
        """One page; `after` is the `next` of the page before."""
        query = {"role": role, "phase": phase, "cluster": cluster, **calls.page(limit, after)}
        call = calls.make("list_reservations", query=query)
        return (await self._send(call)).read(bodies.ReservationList)

    async def all_reservations(
        self, *, role: str = "", phase: str = "", cluster: str = ""
    ) -> list[bodies.Reservation]:
        """All pages."""
        found: list[bodies.Reservation] = []
        after = ""
        while True:
            page = await self.list_reservations(
                role=role, phase=phase, cluster=cluster, after=after
            )
            found += page.reservations
            if not (after := page.next):
                return found

    async def explain(
        self, request: bodies.ReservationRequest, *, limit: int = 0
    ) -> bodies.Explanation:
        call = calls.make("explain", body=request, query=calls.page(limit))
        return (await self._send(call)).read(bodies.Explanation)

    async def explain_reservation(self, reservation: str, *, limit: int = 0) -> bodies.Explanation:
        call = calls.make("explain_reservation", reservation, query=calls.page(limit))
        return (await self._send(call)).read(bodies.Explanation)

    # -- instructions

    async def instructions(self) -> list[bodies.Reservation]:
        """What this cluster has to hold for others."""
        answer = await self._send(calls.make("instructions"))
        # The published broker answers null where it has none.
        return [] if answer.body.strip() == b"null" else answer.read(list[bodies.Reservation])

    async def acknowledge(self, reservation: str) -> bodies.Reservation:
        return await self._reservation(calls.make("acknowledge", reservation))

    async def refuse(self, reservation: str, reason: str = "") -> bodies.Reservation:
        body = bodies.RefuseRequest(reason)
        return await self._reservation(calls.make("refuse", reservation, body=body))

    async def stream(
        self,
        *,
        after: str = "",
        on_reset: Callable[[], None] | None = None,
        backoff: Backoff | None = None,
        silence: timedelta = SILENCE,
    ) -> AsyncGenerator[bodies.Instruction, None]:
        """Instructions as they come, from after an event on, across broken connections.

        `on_reset` is called when the broker begins anew instead: what it then says is all that is
        open, and anything else is over. `backoff` bounds how often it connects again in a row, without
        an event or a long life in between; after that the error is raised. Leave the loop early only
        within `contextlib.aclosing`, which closes the connection.
        """
        backoff = backoff or self._backoff
        delays, clock = backoff.delays(), asyncio.get_running_loop().time
        while True:
            began = clock()
            error: KubelendError = BrokerUnreachable("the broker ended the stream")
            try:
                async with contextlib.aclosing(self._listen(after, silence)) as events:
                    async for event in events:
                        after, delays = event.id or after, backoff.delays()
                        if event.name == "instruction":
                            yield Answer(200, event.data.encode()).read(bodies.Instruction)
                        elif event.name == "reset" and on_reset is not None:
                            on_reset()
            except KubelendError as problem:
                error = problem
            if clock() - began > backoff.longest.total_seconds():
                delays = backoff.delays()
            await _pause(error, next(delays, None), backoff.longest)

    # -- clusters, for administrators

    async def get_cluster(self, cluster: str) -> bodies.Cluster:
        return await self._cluster(calls.make("get_cluster", cluster))

    async def list_clusters(self, *, limit: int = 0, after: str = "") -> bodies.ClusterList:
        """One page; `after` is the `next` of the page before."""
        call = calls.make("list_clusters", query=calls.page(limit, after))
        return (await self._send(call)).read(bodies.ClusterList)

    async def all_clusters(self) -> list[bodies.Cluster]:
        """All pages."""
        found: list[bodies.Cluster] = []
        after = ""
        while True:
            page = await self.list_clusters(after=after)
            found += page.clusters
            if not (after := page.next):
                return found

    async def cordon(self, cluster: str, reason: str = "") -> bodies.Cluster:
        return await self._cluster(calls.make("cordon", cluster, body=bodies.CordonRequest(reason)))

    async def uncordon(self, cluster: str) -> bodies.Cluster:
        return await self._cluster(calls.make("uncordon", cluster))

    async def drain(self, cluster: str, reason: str = "") -> bodies.Drained:
        call = calls.make("drain", cluster, body=bodies.CordonRequest(reason))
        return (await self._send(call)).read(bodies.Drained)

    async def remove_cluster(self, cluster: str) -> None:
        await self._send(calls.make("remove_cluster", cluster))

    # -- the broker itself

    async def version(self) -> bodies.Version:
        return (await self._send(calls.make("version"))).read(bodies.Version)

    async def openapi(self) -> dict[str, Any]:
        return (await self._send(calls.make("openapi"))).read(dict[str, Any])

    async def healthz(self) -> str:
        return (await self._send(calls.make("healthz"))).text

    async def readyz(self) -> str:
        """`NotReady` says why, if it is not."""
        answer = await self._send(calls.make("readyz"))
        if answer.status != 200:
            raise NotReady(f"the broker is {answer.text.strip()}", hint="try again later")
        return answer.text

    # -- how all of them are made

    async def _reservation(self, call: Call) -> bodies.Reservation:
        return (await self._send(call)).read(bodies.Reservation)

    async def _cluster(self, call: Call) -> bodies.Cluster:
        return (await self._send(call)).read(bodies.Cluster)

    async def _send(self, call: Call) -> Answer:
        delays = self._backoff.delays() if call.is_repeatable else iter(())
        while True:
            try:
                return await self._once(call)
            except KubelendError as error:
                await _pause(error, next(delays, None), self._backoff.longest)

    async def _once(self, call: Call) -> Answer:
        timeout = aiohttp.ClientTimeout(total=self._timeout.total_seconds())
        with self._peer.translated(self._timeout):
            async with self._request(call, timeout) as response:
                content = await response.read()
        return self._accepted(call, response, content)

    async def _listen(
        self, after: str, silence: timedelta
    ) -> AsyncGenerator[event_streams.Event, None]:
        """One connection's worth of events."""
        call = calls.make("stream", headers={route.LAST_EVENT_ID: after} if after else None)
        timeout = aiohttp.ClientTimeout(
            connect=self._timeout.total_seconds(), sock_read=silence.total_seconds()
        )
        parser = event_streams.Parser()
        with self._peer.translated(silence):
            async with self._request(call, timeout) as response:
                if response.status not in call.route.answers:
                    self._accepted(call, response, await response.read())
                self._peer.has_answered = True
                async for chunk in response.content.iter_any():
                    for event in parser.feed(chunk):
                        yield event

    def _request(
        self, call: Call, timeout: aiohttp.ClientTimeout
    ) -> contextlib.AbstractAsyncContextManager[aiohttp.ClientResponse]:
        if self._session is None:
            raise RuntimeError("open the client with `async with` first")
        return self._session.request(
            call.route.method,
            yarl.URL(self._url + call.target, encoded=True),
            data=call.body,
            headers=call.headers,
            timeout=timeout,
            allow_redirects=False,
        )

    def _accepted(self, call: Call, response: aiohttp.ClientResponse, content: bytes) -> Answer:
        self._peer.has_answered = True
        if response.status in call.route.answers:
            return Answer(response.status, content)
        error = problems.from_answer(response.status, content)
        if isinstance(error, LimitExceeded):
            error.retry_after = _seconds(response.headers.get("Retry-After"), error.retry_after)
        raise error


def _seconds(header: str | None, otherwise: float) -> float:
    # It may be a date as well; our broker's never is.
    return float(header) if header and header.isascii() and header.isdigit() else otherwise


async def _pause(error: KubelendError, delay: float | None, longest: timedelta) -> None:
    """Wait before the next try, or raise the error if there is none or it would not help."""
    asked = error.retry_after if isinstance(error, LimitExceeded) else 0.0
    # A certificate that is not trusted now will not be in a second.
    is_distrust = isinstance(error.__cause__, aiohttp.ClientSSLError)
    if delay is None or not error.retryable or is_distrust or asked > longest.total_seconds():
        raise error
    await asyncio.sleep(max(delay, asked))
