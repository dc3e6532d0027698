"""Peering with Liqo's command line, sized per reservation and removed afterwards.

    connect     liqoctl peer --create-resource-slice=false            once for each provider
    size        liqoctl create resourceslice RESERVATION ...          a slice of class kubelend, and a node
    ready       kubectl get resourceslices/... nodes/...
    disconnect  kubectl delete resourceslices RESERVATION, and liqoctl unpeer after the last one

Commands and flags are those of Liqo v1.2.0. There, `peer` with a size would resize the slice of the first
reservation, exit code 0 does not mean that anything was granted, and no command deletes a slice: hence one
slice per reservation, and kubectl. The kubeconfigs of both clusters are in one directory, named
`<cluster ID>.kubeconfig`; without one for its own cluster the agent uses liqoctl's default. The broker's
cluster IDs have to be those of Liqo.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Final, NamedTuple

from kubelend.agent.ports import DONE, HandshakeExchange, Peer, Readiness
from kubelend.core import durations
from kubelend.core.errors import (
    InvalidInput,
    InvalidSettings,
    KubelendError,
    Unavailable,
)
from kubelend.core.resources import Resources
from kubelend.kits import subprocesses
from kubelend.peerings.liqo_objects import (
    GRANT_ANNOTATION,
    IDENTITY_RESOURCE,
    SLICE_CLASS,
    SLICE_RESOURCE,
    existing_names,
    liqo_quantities,
    parse_objects,
    slice_readiness,
)
from kubelend.wire import bodies

COMMAND_TIMEOUT: Final = timedelta(minutes=5)
GET_TIMEOUT: Final = timedelta(seconds=30)
"""For a `kubectl get` in the agent's own cluster, which waits for no other cluster."""

MAX_FAILURE_CACHE_TIME: Final = timedelta(seconds=30)
"""Upper bound for not retrying a provider whose peering failed: see `_CachedFailure`."""

GATEWAY_FLAGS: Final = ("--gw-server-service-type", "NodePort")
"""How the networks of the two clusters are connected; the default of the published agent."""

_TIMEOUT_HINT: Final = "check that the provider's API server is reachable from this cluster"
_VALID_NAME: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?", re.ASCII)


class LiqoctlPeering:
    """Runs one command at a time per provider; different providers do not wait for each other.

    A call takes at most twice `timeout`: once for waiting for another command, once for its own.
    """

    def __init__(  # noqa: PLR0913 - explicit dependencies
        self,
        kubeconfigs: Path,
        cluster: str,
        *,
        exchange: HandshakeExchange | None = None,
        liqoctl: str = "liqoctl",
        kubectl: str = "kubectl",
        timeout: timedelta = COMMAND_TIMEOUT,
        arguments: Sequence[str] = GATEWAY_FLAGS,
        environment: Mapping[str, str] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`cluster` is the agent's own; `arguments` go to `liqoctl peer`; `now` returns seconds.

        `exchange` gives the broker's grant of a reservation, which the provider's agent asks for.
        """
        self._kubeconfigs = kubeconfigs
        self._exchange = exchange
        self._cluster = cluster
        self._liqoctl_program = liqoctl
        self._kubectl_program = kubectl
        self._timeout = timeout
        self._arguments = tuple(arguments)
        self._environment = environment
        self._now = now
        self._locks = ProviderLocks(timeout, now)
        self._failures: dict[str, _CachedFailure] = {}
        """The cached failure of each provider whose last peering attempt failed."""
        self._peered: set[str] = set()
        """Providers that are peered, as far as is known."""
        self._reservations: dict[str, set[str]] = defaultdict(set)
        """The reservations that use a provider, possibly without a slice yet."""
        self._sized: dict[str, tuple[str, Resources]] = {}

    async def watch(self, on_change: Callable[[str], None]) -> None:  # noqa: ARG002
        await asyncio.Event().wait()

    async def connect(self, peer: Peer) -> Readiness:
        _check_names(peer)
        async with self._locks.acquire(peer.cluster) as session:
            self._reservations[peer.cluster].add(peer.reservation)
            if peer.cluster not in self._peered:
                await self._peer(peer.cluster, session)
                self._peered.add(peer.cluster)
        return DONE

    async def size(self, peer: Peer) -> Readiness:
        _check_names(peer)
        wanted = (peer.cluster, peer.resources)
        async with self._locks.acquire(peer.cluster) as session:
            if self._sized.get(peer.reservation) == wanted:
                return DONE
            arguments = [*self._slice_arguments(peer), *await self._grant_flag(peer)]
            try:
                await self._liqoctl(session, "create", "resourceslice", *arguments)
            except KubelendError:
                self._invalidate(peer)
                raise
            self._sized[peer.reservation] = wanted
        return DONE

    async def ready(self, peer: Peer) -> Readiness:
        _check_names(peer)
        named = (f"{SLICE_RESOURCE}/{peer.reservation}", f"nodes/{peer.reservation}")
        alone = TimeBudget(peer.cluster, self._timeout, self._now)
        found = parse_objects(await self._get(alone, *named, *_tenant_namespace(peer)))
        if peer.reservation not in existing_names(one for one in found if one.kind != "Node"):
            self._invalidate(peer)
        return slice_readiness(found, peer)

    async def disconnect(self, peer: Peer) -> Readiness:
        _check_names(peer)
        async with self._locks.acquire(peer.cluster, is_urgent=True) as session:
            self._reservations[peer.cluster].discard(peer.reservation)
            self._sized.pop(peer.reservation, None)
            others = await self._delete_slice(peer, session)
            if others or self._reservations[peer.cluster]:
                return DONE
            self._peered.discard(peer.cluster)
            if await self._is_peered(peer, session):
                flags = (*self._kubeconfig_flags(peer.cluster), *self._timeout_flag(session))
                await self._liqoctl(session, "unpeer", *flags)
        return DONE

    # -- commands

    async def _peer(self, cluster: str, budget: TimeBudget) -> None:
        failure, began = self._failures.get(cluster), self._now()
        if failure is not None and began < failure.until:
            raise Unavailable(failure.error.message, hint=failure.error.hint)
        flags = ("--create-resource-slice=false", *self._arguments, *self._timeout_flag(budget))
        try:
            await self._liqoctl(budget, "peer", *self._kubeconfig_flags(cluster), *flags)
        except Unavailable as error:
            ended = self._now()
            believed = min(ended - began, MAX_FAILURE_CACHE_TIME.total_seconds())
            self._failures[cluster] = _CachedFailure(error, ended + believed)
            raise
        self._failures.pop(cluster, None)

    async def _delete_slice(self, peer: Peer, budget: TimeBudget) -> set[str]:
        """Delete the reservation's slice; returns the names of the provider's other slices."""
        found = parse_objects(await self._get(budget, SLICE_RESOURCE, *_tenant_namespace(peer)))
        names = existing_names(found)
        if peer.reservation in names:
            # Without waiting: Liqo finishes the deletion once the provider agrees.
            named = (f"{SLICE_RESOURCE}/{peer.reservation}", *_tenant_namespace(peer))
            await self._kubectl(budget, "delete", *named, "--ignore-not-found", "--wait=false")
        return names - {peer.reservation}

    async def _is_peered(self, peer: Peer, budget: TimeBudget) -> bool:
        """Checked first, because `unpeer` fails without a peering.

        By the Identity: a ForeignCluster stays after a peering, and says for minutes that it is a provider.
        """
        name = f"controlplane-{peer.cluster}"
        identity = (f"{IDENTITY_RESOURCE}/{name}", *_tenant_namespace(peer))
        return name in existing_names(parse_objects(await self._get(budget, *identity)))

    async def _get(self, budget: TimeBudget, *arguments: str) -> bytes:
        return await self._kubectl(budget, "get", *arguments, "--ignore-not-found", "--output=json")

    async def _kubectl(self, budget: TimeBudget, *arguments: str) -> bytes:
        arguments += self._own_kubeconfig_flag()
        return await self._run(self._kubectl_program, arguments, budget.remaining(GET_TIMEOUT))

    async def _liqoctl(self, budget: TimeBudget, *arguments: str) -> None:
        arguments += ("--skip-confirm",)
        await self._run(self._liqoctl_program, arguments, budget.remaining(self._timeout))

    async def _run(self, program: str, arguments: tuple[str, ...], timeout: timedelta) -> bytes:
        return await subprocesses.run_program(
            program,
            *arguments,
            timeout=timeout,
            environment=self._environment,
            timeout_hint=_TIMEOUT_HINT,
        )

    # -- arguments

    def _kubeconfig_flags(self, cluster: str) -> tuple[str, ...]:
        remote = self._kubeconfigs / f"{cluster}.kubeconfig"
        if not remote.is_file():
            raise InvalidSettings(
                f"kubeconfig of cluster {cluster} not found: {remote}",
                hint="get one from the cluster's administrator (`liqoctl generate peering-user`)",
            )
        return (*self._own_kubeconfig_flag(), "--remote-kubeconfig", str(remote))

    def _own_kubeconfig_flag(self) -> tuple[str, ...]:
        own = self._kubeconfigs / f"{self._cluster}.kubeconfig"
        return ("--kubeconfig", str(own)) if own.is_file() else ()

    def _timeout_flag(self, budget: TimeBudget) -> tuple[str, str]:
        """Slightly shorter than the command's own limit, so that liqoctl reports what it waited for."""
        seconds = budget.remaining(self._timeout).total_seconds() * 0.9
        return "--timeout", f"{max(1, round(seconds))}s"

    def _slice_arguments(self, peer: Peer) -> list[str]:
        wanted = liqo_quantities(peer.resources)
        sized = ["--cpu", wanted.pop("cpu"), "--memory", wanted.pop("memory")]
        for name, amount in wanted.items():
            sized += ["--resource", f"{name}={amount}"]
        named = [peer.reservation, "--remote-cluster-id", peer.cluster, "--class", SLICE_CLASS]
        return [*named, *sized, *self._own_kubeconfig_flag()]

    async def _grant_flag(self, peer: Peer) -> list[str]:
        if self._exchange is None:
            return []
        own = bodies.Handshake(self._cluster)
        grant = (await self._exchange.exchange_handshake(peer.reservation, own)).grant
        return ["--global-annotations", f"{GRANT_ANNOTATION}={grant}"] if grant else []

    def _invalidate(self, peer: Peer) -> None:
        """Another client may have removed what was created here: create it again on the next call."""
        self._peered.discard(peer.cluster)
        self._sized.pop(peer.reservation, None)


class _CachedFailure(NamedTuple):
    """A failed peering attempt, cached for as long as the attempt took, within bounds.

    Of many reservations on a provider that hangs, one finds out and the others get the cached error.
    What fails quickly may be retried quickly.
    """

    error: Unavailable
    until: float


def _tenant_namespace(peer: Peer) -> tuple[str, str]:
    """The namespace in which Liqo keeps the objects of a provider."""
    return "--namespace", f"liqo-tenant-{peer.cluster}"


def _check_names(peer: Peer) -> None:
    """Names become command arguments and a file path: invalid ones must not reach a program."""
    for name in (peer.cluster, peer.reservation):
        if not _VALID_NAME.fullmatch(name):
            raise InvalidInput(
                f"{name[:64]!r}: not a valid Liqo cluster ID or slice name",
                hint="use letters, digits and dashes",
            )


LOCK_SLACK: Final = timedelta(seconds=1)
"""How much longer a waiter waits than the holder may run, so that it gets the holder's error and not
a timeout."""


class TimeBudget:
    """The time left for the commands of the lock holder."""

    def __init__(self, cluster: str, limit: timedelta, now: Callable[[], float]) -> None:
        self._cluster = cluster
        self._limit = limit
        self._now = now
        self._end = now() + limit.total_seconds()

    def remaining(self, limit: timedelta) -> timedelta:
        """For the next command, at most `limit`; `Unavailable` if no time is left."""
        left = timedelta(seconds=round(self._end - self._now(), 2))  # also shown to people
        if left <= timedelta():
            timeout = durations.format_duration_short(self._limit)
            raise Unavailable(f"peering commands for {self._cluster} exceeded {timeout}")
        return min(left, limit)


class ProviderLocks:
    """The lock of each provider, with its waiters."""

    def __init__(self, limit: timedelta, now: Callable[[], float]) -> None:
        """`limit` is for the commands of one holder, and as much for waiting; `now` returns seconds."""
        self._limit = limit
        self._now = now
        self._waiters: dict[str, _Waiters] = {}
        """The waiters of each provider whose lock is held."""

    @asynccontextmanager
    async def acquire(self, cluster: str, *, is_urgent: bool = False) -> AsyncIterator[TimeBudget]:
        """Acquire the lock; `Unavailable` if that takes too long. An urgent caller goes before all others."""
        await self._lock(cluster, is_urgent)
        try:
            yield TimeBudget(cluster, self._limit, self._now)
        finally:
            self._release(cluster)

    async def _lock(self, cluster: str, is_urgent: bool) -> None:
        line = self._waiters.get(cluster)
        if line is None:
            self._waiters[cluster] = _Waiters(deque(), deque())
            return
        try:
            async with asyncio.timeout((self._limit + LOCK_SLACK).total_seconds()):
                await self._wait_in_queue(line, cluster, is_urgent)
        except TimeoutError:
            timeout = durations.format_duration_short(self._limit)
            raise Unavailable(
                f"another peering command for {cluster} is still running after {timeout}"
            ) from None

    async def _wait_in_queue(self, waiters: _Waiters, cluster: str, is_urgent: bool) -> None:
        called = asyncio.get_running_loop().create_future()
        waiting = waiters.urgent if is_urgent else waiters.others
        waiting.append(called)
        try:
            await called
        except asyncio.CancelledError:
            if called.cancelled():
                with contextlib.suppress(ValueError):
                    waiting.remove(called)
            else:  # acquired at the same moment
                self._release(cluster)
            raise

    def _release(self, cluster: str) -> None:
        line = self._waiters[cluster]
        for waiting in line:
            while waiting:
                called = waiting.popleft()
                if not called.done():
                    called.set_result(None)
                    return
        del self._waiters[cluster]


class _Waiters(NamedTuple):
    """Waiters, in order of arrival."""

    urgent: deque[asyncio.Future[None]]
    others: deque[asyncio.Future[None]]
