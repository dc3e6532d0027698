"""Which of several brokers leads, agreed by a Lease of Kubernetes as its own controllers do.

A lease is a promise about time: whoever holds it renews it, and whoever sees it unchanged for its whole
duration takes it. No two clocks are compared: every broker counts from when it saw the last change, by a
clock that only it has. The leader stops before the others may take over, because it counts from before it
asked, and at once when it sees the lease in other hands or gone: somebody may have deleted it. Where that
fails all the same (a process that slept in the middle of a write) the store refuses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta
from typing import NamedTuple

import structlog
from msgspec.structs import replace

from kubelend.core.errors import Conflict, KubelendError, Unavailable
from kubelend.kube import resources
from kubelend.kube.client import Client
from kubelend.wire.leases import Lease, LeaseSpec, micro
from kubelend.wire.objects import Metadata

LEASES = resources.of(Lease)

log = structlog.get_logger("kubelend.election")


class Times(NamedTuple):
    """Each has to be longer than the next."""

    duration: timedelta = timedelta(seconds=15)
    """How long the others leave a leader alone that they do not hear of."""
    deadline: timedelta = timedelta(seconds=10)
    """How long a leader goes on that cannot renew its lease."""
    retry: timedelta = timedelta(seconds=2)
    """How often it is renewed, and how often the others look."""


class Candidate(NamedTuple):
    """One broker that would lead, and the seat that it wants."""

    identity: str
    """Different for every process; shown to people who want to know whom to ask."""
    namespace: str
    name: str = "kubelend-broker"


class Election:
    """Use `run` as a root task. Fulfils the broker's port `Leadership`."""

    def __init__(
        self,
        client: Client,
        candidate: Candidate,
        times: Times,
        clock: Callable[[], datetime],
        monotonic: Callable[[], float],
    ) -> None:
        self.leader = ""
        self.term = 0
        self._client = client
        self._candidate = candidate
        self._times = times
        self._clock = clock
        self._monotonic = monotonic
        self._leads_until = float("-inf")
        self._seen: Lease | None = None
        self._seen_at = 0.0
        self._won = asyncio.Event()
        self._one_at_a_time = asyncio.Lock()

    @property
    def leads(self) -> bool:
        return self._monotonic() < self._leads_until

    async def won(self) -> None:
        while not self.leads:
            self._won.clear()
            await self._won.wait()

    async def look(self) -> None:
        """What cannot be asked now is asked again soon, by `run`."""
        with suppress(KubelendError):
            await self._attempt_in_time()

    async def run(self) -> None:
        """Take the lease whenever it is free, and keep it. Never returns."""
        problem = ""
        while True:
            try:
                await self._attempt_in_time()
                problem = ""
            except KubelendError as error:
                if str(error) != problem:
                    log.warning("the lease cannot be looked at or written", problem=str(error))
                problem = str(error)
            await asyncio.sleep(self._times.retry.total_seconds())

    async def attempt(self) -> None:
        """Renew the lease, take it, or see who has it: once."""
        async with self._one_at_a_time:
            asked_at = self._monotonic()
            self._see(await self._found())
            if not self._is_taken_by_another(asked_at) and await self._take(self._mine()):
                self._lead_from(asked_at)

    async def _attempt_in_time(self) -> None:
        """One call that hangs must not cost the seat: within the deadline there is time for another."""
        patience = (self._times.deadline - self._times.retry) / 2
        try:
            async with asyncio.timeout(patience.total_seconds()):
                await self.attempt()
        except TimeoutError:
            raise Unavailable(
                "the API server did not answer in time", hint="is it overloaded, or cut off?"
            ) from None

    async def resign(self) -> None:
        """Give the lease back, so that nobody has to wait for its end."""
        if not self.leads or self._seen is None:
            return
        self._leads_until = float("-inf")
        free = replace(self._seen.spec, holder_identity="", lease_duration_seconds=1)
        await self._write(free)

    async def _found(self) -> Lease | None:
        return await self._client.find(LEASES, self._candidate.name, self._candidate.namespace)

    async def _take(self, mine: LeaseSpec) -> bool:
        """False if another was quicker. What was sent may have arrived, and only the answer been lost."""
        try:
            self._see(await self._write(mine))
        except Conflict:
            self._see(await self._found())
        return self._seen is not None and self._seen.spec == mine

    def _lead_from(self, moment: float) -> None:
        if not self.leads:
            self.term += 1
        self._leads_until = moment + self._times.deadline.total_seconds()
        self._won.set()

    def _see(self, found: Lease | None) -> None:
        """Who does not hold it leads no more, whatever was agreed before: by now another may lead."""
        before = None if self._seen is None else self._seen.metadata.resource_version
        if found is None or found.metadata.resource_version != before:
            self._seen_at = self._monotonic()
        self._seen = found
        self.leader = "" if found is None else found.spec.holder_identity or ""
        if self.leader != self._candidate.identity:
            self._leads_until = float("-inf")

    def _is_taken_by_another(self, now: float) -> bool:
        if self._seen is None or self.leader in ("", self._candidate.identity):
            return False
        seconds = self._seen.spec.lease_duration_seconds or 0
        return now < self._seen_at + max(seconds, self._times.duration.total_seconds())

    def _mine(self) -> LeaseSpec:
        now = micro(self._clock())
        before = LeaseSpec() if self._seen is None else self._seen.spec
        mine = replace(
            before,
            holder_identity=self._candidate.identity,
            lease_duration_seconds=max(1, round(self._times.duration.total_seconds())),
            renew_time=now,
        )
        if before.holder_identity == self._candidate.identity:
            return mine
        transitions = (before.lease_transitions or 0) + (self._seen is not None)
        return replace(mine, acquire_time=now, lease_transitions=transitions)

    async def _write(self, spec: LeaseSpec) -> Lease:
        """On what was last seen: `Conflict` if it has changed since."""
        if self._seen is None:
            metadata = Metadata(self._candidate.name, self._candidate.namespace)
            return await self._client.create(LEASES, Lease(metadata, spec))
        return await self._client.replace(LEASES, replace(self._seen, spec=spec))
