"""Leader election of broker replicas by a Lease, as in client-go.

The holder renews the lease; a replica that has observed it unchanged for its whole duration acquires it.
Clocks of different replicas are never compared: each measures from its own last observed change, with a
monotonic clock. The leader steps down before others may take over, because its time starts before the
request was sent, and immediately when the lease has another holder or was deleted. If a process is
suspended in the middle of a write, the store's fencing rejects it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import ClassVar, Final, NamedTuple

import structlog
from msgspec.structs import replace

from kubelend.core.errors import Conflict, KubelendError, Unavailable
from kubelend.kube import resources
from kubelend.kube.client import Client
from kubelend.wire.objects import Metadata, Object, ObjectStruct


class LeaseSpec(ObjectStruct, frozen=True):
    """Holder of the lease and its timestamps."""

    holder_identity: str | None = None
    """Empty or absent if there is no holder."""
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None
    """Number of changes of the holder."""


class Lease(Object, frozen=True):
    """A lock that one process at a time holds."""

    group: ClassVar[str] = "coordination.k8s.io"
    version: ClassVar[str] = "v1"
    kind: ClassVar[str] = "Lease"
    plural: ClassVar[str] = "leases"

    metadata: Metadata
    spec: LeaseSpec = LeaseSpec()


LEASES = resources.resource_for(Lease)

log = structlog.get_logger("kubelend.election")


class LeaseTimings(NamedTuple):
    """Durations of the election. Each has to be longer than the next."""

    lease_duration: timedelta = timedelta(seconds=15)
    """How long the others wait after the last observed renewal before they acquire the lease."""
    renew_deadline: timedelta = timedelta(seconds=10)
    """How long a leader that cannot renew its lease stays leader."""
    retry_period: timedelta = timedelta(seconds=2)
    """Interval of renewals by the leader and of attempts by the others."""


class LeaseIdentity(NamedTuple):
    """Identity of a replica, and the lease that it competes for."""

    identity: str
    """Unique for each process; displayed as the current leader."""
    namespace: str
    name: str = "kubelend-broker"


class LeaderElection:
    """Use `run` as a root task. Fulfils the broker's port `Leadership`."""

    def __init__(
        self,
        client: Client,
        identity: LeaseIdentity,
        timings: LeaseTimings,
        clock: Callable[[], datetime],
        monotonic: Callable[[], float],
    ) -> None:
        self.leader = ""
        self.term = 0
        self._client = client
        self._identity = identity
        self._timings = timings
        self._clock = clock
        self._monotonic = monotonic
        self._leader_until = float("-inf")
        self._observed: Lease | None = None
        self._observed_at = 0.0
        self._won = asyncio.Event()
        self._lock = asyncio.Lock()

    @property
    def is_leader(self) -> bool:
        return self._monotonic() < self._leader_until

    async def wait_for_leadership(self) -> None:
        while not self.is_leader:
            self._won.clear()
            await self._won.wait()

    async def refresh(self) -> None:
        """Acquire, renew or observe the lease now. Errors are ignored: `run` retries soon."""
        with suppress(KubelendError):
            await self._try_with_timeout()

    async def run(self) -> None:
        """Acquire the lease when it is free, and renew it. Runs until cancelled."""
        last_error = ""
        while True:
            try:
                await self._try_with_timeout()
                last_error = ""
            except KubelendError as error:
                if str(error) != last_error:
                    log.warning("Failed to read or update the lease, will retry", error=str(error))
                last_error = str(error)
            await asyncio.sleep(self._timings.retry_period.total_seconds())

    async def try_acquire_or_renew(self) -> None:
        """Renew the lease, acquire it, or observe its holder."""
        async with self._lock:
            started_at = self._monotonic()
            self._observe(await self._get_lease())
            if not self._is_held_by_other(started_at) and await self._try_write(self._own_spec()):
                if not self.is_leader:
                    self.term += 1
                self._leader_until = started_at + self._timings.renew_deadline.total_seconds()
                self._won.set()

    async def _try_with_timeout(self) -> None:
        """With a timeout that leaves time for another attempt before the renew deadline."""
        timeout = (self._timings.renew_deadline - self._timings.retry_period) / 2
        try:
            async with asyncio.timeout(timeout.total_seconds()):
                await self.try_acquire_or_renew()
        except TimeoutError:
            raise Unavailable(
                "the API server did not respond in time", hint="check its load and the network"
            ) from None

    async def release(self) -> None:
        """Release the lease, so that another replica can acquire it immediately."""
        if not self.is_leader or self._observed is None:
            return
        self._leader_until = float("-inf")
        free = replace(self._observed.spec, holder_identity="", lease_duration_seconds=1)
        await self._write(free)

    async def _get_lease(self) -> Lease | None:
        return await self._client.find(LEASES, self._identity.name, self._identity.namespace)

    async def _try_write(self, spec: LeaseSpec) -> bool:
        """False if another replica has written first. After a conflict the lease is read again: a write
        whose response was lost may have succeeded.
        """
        try:
            self._observe(await self._write(spec))
        except Conflict:
            self._observe(await self._get_lease())
        return self._observed is not None and self._observed.spec == spec

    def _observe(self, found: Lease | None) -> None:
        """Record the lease; steps down if this replica does not hold it, because another may lead."""
        before = None if self._observed is None else self._observed.metadata.resource_version
        if found is None or found.metadata.resource_version != before:
            self._observed_at = self._monotonic()
        self._observed = found
        self.leader = "" if found is None else found.spec.holder_identity or ""
        if self.leader != self._identity.identity:
            self._leader_until = float("-inf")

    def _is_held_by_other(self, now: float) -> bool:
        if self._observed is None or self.leader in ("", self._identity.identity):
            return False
        seconds = self._observed.spec.lease_duration_seconds or 0
        return now < self._observed_at + max(seconds, self._timings.lease_duration.total_seconds())

    def _own_spec(self) -> LeaseSpec:
        # A MicroTime has always six decimals.
        now = self._clock().astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        before = LeaseSpec() if self._observed is None else self._observed.spec
        own = replace(
            before,
            holder_identity=self._identity.identity,
            lease_duration_seconds=max(1, round(self._timings.lease_duration.total_seconds())),
            renew_time=now,
        )
        if before.holder_identity == self._identity.identity:
            return own
        transitions = (before.lease_transitions or 0) + (self._observed is not None)
        return replace(own, acquire_time=now, lease_transitions=transitions)

    async def _write(self, spec: LeaseSpec) -> Lease:
        """Create or update the lease; raises `Conflict` if it has changed since it was observed."""
        if self._observed is None:
            metadata = Metadata(self._identity.name, self._identity.namespace)
            return await self._client.create(LEASES, Lease(metadata, spec))
        return await self._client.update(LEASES, replace(self._observed, spec=spec))


ACQUIRE_TIMEOUT: Final = timedelta(seconds=30)
"""Longer than the lease of a killed broker."""


@asynccontextmanager
async def hold_lease(
    client: Client, identity: LeaseIdentity, clock: Callable[[], datetime], timeout: timedelta
) -> AsyncIterator[None]:
    """Be the only leader meanwhile; `Conflict` if a replica leads and renews its lease."""
    election = LeaderElection(client, identity, LeaseTimings(), clock, time.monotonic)
    await election.try_acquire_or_renew()  # its errors are not retried
    renewal = asyncio.create_task(election.run())
    try:
        try:
            async with asyncio.timeout(timeout.total_seconds()):
                await election.wait_for_leadership()
        except TimeoutError:
            raise Conflict(
                f"{election.leader} still leads", hint="stop all brokers first"
            ) from None
        yield
    finally:
        renewal.cancel()
        await asyncio.gather(renewal, return_exceptions=True)
        await election.release()
