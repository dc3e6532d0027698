"""The provider: holds the resources of reservations placed on this cluster, or refuses them, and
withdraws holds.

A root task of the agent, level-triggered by reservation ID: each reconcile compares the latest state of
the reservation with its ProviderInstruction and does what is missing. Only the broker ends a hold:
neither a wrong clock nor an unreachable broker frees resources.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Final

import msgspec
import structlog
from msgspec.structs import replace

from kubelend.agent import controller, events
from kubelend.agent import holds as agent_holds
from kubelend.agent.health import ComponentHealth
from kubelend.agent.holds import HoldTable
from kubelend.agent.instructions import time_text
from kubelend.agent.placeholders import PARTIALLY_HELD
from kubelend.agent.ports import BrokerCommunicator, Clock, Deleted, Listed, LocalObjects
from kubelend.agent.reservation_cache import LIVE_PHASES, UNFINISHED_PHASES, ReservationCache
from kubelend.core.errors import Conflict, InvalidInput, KubelendError, NotFound
from kubelend.core.lifecycle import Phase
from kubelend.kits import tasks
from kubelend.kits.workqueue import ReconcileQueue
from kubelend.wire import bodies
from kubelend.wire.events import EmitEvent, discard_event
from kubelend.wire.objects import Condition, ProviderInstruction, ProviderInstructionStatus

COMPONENT: Final = "provider"
MEASUREMENT_RETRY_INTERVAL: Final = timedelta(milliseconds=100)
"""How long to wait for the first measurement before a reservation is decided."""
INITIAL_LIST_GRACE: Final = timedelta(seconds=2)
"""After the start the broker's list covers all reservations; only those it lacks are fetched one by one."""
EXPIRED_RECHECK_INTERVAL: Final = timedelta(minutes=1)
"""How often a reservation is fetched that has expired by the local clock but not on the broker."""
EXPIRY_GRACE: Final = timedelta(seconds=1)
"""How long to wait for the broker to report an expiry before fetching the reservation."""
RESTORE_RETRY_INTERVAL: Final = timedelta(seconds=2)
"""Pause between attempts to read the cluster's objects at start-up."""
OVERCOMMITMENT_DELAY: Final = timedelta(seconds=5)
"""For which more is used and lent than there is before it is reported: pods may be on their way out."""
MAX_REASON_LENGTH: Final = 1024
"""In characters; limited by the REST API."""

log = structlog.get_logger("kubelend.agent")


class ProviderConfig(msgspec.Struct, frozen=True):
    """The provider's identity, and where it writes ProviderInstructions."""

    cluster_id: str
    namespace: str = "default"
    finished_ttl: timedelta = timedelta(minutes=10)
    """How long the object of a finished hold is retained for people to read."""
    has_placeholders: bool = False
    """Whether placeholders keep the resources free; they report the condition Held."""
    refuses_unheld: bool = False
    """Whether a reservation is refused of which placeholders cannot hold all."""


class ProviderReconciler:
    """Use `run` as a root task. Await `restore` before the first advertisement."""

    def __init__(  # noqa: PLR0913 - explicit dependencies
        self,
        config: ProviderConfig,
        objects: LocalObjects,
        communicator: BrokerCommunicator,
        reservations: ReservationCache,
        holds: HoldTable,
        health: ComponentHealth,
        clock: Clock,
        *,
        emit: EmitEvent = discard_event,
    ) -> None:
        self._config = config
        self._objects = objects
        self._health = health
        self._communicator = communicator
        self._reservations = reservations
        self._holds = holds
        self._clock = clock
        self._emit_events = controller.emit_all(emit, events.hold_events)
        self._watched: dict[str, ProviderInstruction] = {}
        """The last watched or written state of each reservation's object."""
        self._queue = ReconcileQueue("ProviderInstruction", self._reconcile, log)
        self._restored = False
        self._fetch_from = 0.0
        """In the event loop's time."""
        self._was_overcommitted = False
        reservations.subscribe(self._on_reservation_change)
        reservations.on_reconnect(self._queue.retry_now)

    async def restore(self) -> None:
        """Restore the holds from the ProviderInstructions. Retries until they can be read."""
        while not self._restored:
            try:
                self._restore_holds(await self._objects.list(ProviderInstruction))
                self._restored = True
            except KubelendError as error:
                self._set_health(f"cannot read ProviderInstructions: {error}")
                await asyncio.sleep(RESTORE_RETRY_INTERVAL.total_seconds())
        self._set_health("")

    async def run(self) -> None:
        """Reconcile holds. Runs until cancelled."""
        await self.restore()
        loop = asyncio.get_running_loop()
        self._fetch_from = loop.time() + INITIAL_LIST_GRACE.total_seconds()
        watching = controller.watch_objects(
            self._objects,
            ProviderInstruction,
            self._on_object_event,
            self._set_health,
        )
        await tasks.run_all({"watch": watching, "reconcile": self._queue.run()})

    def _restore_holds(self, stored: Iterable[ProviderInstruction]) -> None:
        for each in stored:
            is_held = each.status.enforced or each.status.phase == agent_holds.HELD
            if is_held and (reservation := self._reservation_of(each)):
                # An invalid spec is rewritten from the broker's state.
                with contextlib.suppress(InvalidInput):
                    self._holds.put(reservation, agent_holds.hold_from_instruction(each))

    # -- triggers

    def notify_measured(self) -> None:
        """Nodes or pods have changed, and with them perhaps whether the cluster is overcommitted."""
        is_overcommitted = bool(self._holds.excess) and not self._config.has_placeholders
        if is_overcommitted != self._was_overcommitted:
            self._was_overcommitted = is_overcommitted
            for reservation in self._holds:
                self._queue.add_after(reservation, OVERCOMMITMENT_DELAY)

    def _on_reservation_change(self, reservation: str) -> None:
        found = self._reservations.find(reservation)
        if reservation in self._holds or (found is not None and self._concerns_cluster(found)):
            self._queue.add(reservation)

    def _on_object_event(self, change: ProviderInstruction | Deleted | Listed) -> None:
        match change:
            case Listed(objects):
                self._watched.clear()
                names = [self._note(found) for found in objects]
                # It lacks the objects that were deleted while the watch was down.
                names += self._holds
            case Deleted(last_state):
                names = [self._reservation_of(last_state)]
                self._watched.pop(names[0], None)
            case found:
                names = [self._note(found)]
        for reservation in filter(None, names):
            self._queue.add(reservation)

    def _note(self, found: object) -> str:
        """Returns its reservation; empty if it is not an object of this agent."""
        reservation = self._reservation_of(found)
        if reservation and isinstance(found, ProviderInstruction):
            self._watched[reservation] = found
        return reservation

    def _reservation_of(self, found: object) -> str:
        """The reservation of an object in the agent's namespace whose name the agent gives; else empty."""
        if not isinstance(found, ProviderInstruction):
            return ""
        is_own = found.metadata.namespace == self._config.namespace
        return agent_holds.reservation_of_instruction(found) if is_own else ""

    def _set_health(self, problem: str) -> None:
        self._health.report(COMPONENT, problem)

    # -- reconcile

    async def _reconcile(self, reservation: str) -> None:
        # What the watch has shown is enough: a write of an old version is rejected, and then read again.
        stored = self._watched.get(reservation)
        stored = stored or await self._objects.find(ProviderInstruction, self._key(reservation))
        found = self._reservations.find(reservation)
        if found is None and self._may_be_held(reservation, stored):
            early = self._fetch_from - asyncio.get_running_loop().time()
            if early > 0:
                self._queue.add_after(reservation, timedelta(seconds=early))
                return
            found = await self._reservations.fetch(self._communicator, reservation)
        elif found is not None and self._is_expired_locally(found):
            found = await self._reservations.fetch(self._communicator, reservation)
        if found is not None and self._is_provider(found):
            await self._sync_hold(found, stored)
        else:
            await self._withdraw(reservation, found, stored)

    async def _sync_hold(
        self, found: bodies.Reservation, instruction: ProviderInstruction | None
    ) -> None:
        if not self._is_undecided(found):
            self._holds.put(found.id, agent_holds.hold_from_reservation(found))
            await self._hold_and_acknowledge(found, instruction)
        elif not self._holds.can_decide:
            self._queue.add_after(found.id, MEASUREMENT_RETRY_INTERVAL)
        elif refusal := self._holds.try_hold(found, self._clock()):
            await self._refuse(found, instruction, refusal[:MAX_REASON_LENGTH])
        else:
            await self._hold_and_acknowledge(found, instruction)

    async def _hold_and_acknowledge(
        self, found: bodies.Reservation, instruction: ProviderInstruction | None
    ) -> None:
        """The object is written first: after a crash every acknowledged hold is known here."""
        instruction = await self._apply(found, instruction)
        held = agent_holds.hold_report(
            self._counted() or agent_holds.find_held_condition(instruction)
        )
        if self._should_refuse_unheld(found, held):
            await self._refuse(
                found, instruction, f"cannot be held: {held.message}" if held else ""
            )
            return
        is_reported = found.status.acknowledged_at is not None and held in (None, found.status.held)
        if not is_reported and not await self._acknowledge(found, held):
            return
        status = agent_holds.held_status(is_enforced=self._holds.is_enforced)
        await self._update_status(instruction, status)
        if found.status.expires_at is not None:
            left = found.status.expires_at - self._clock()
            self._queue.add_after(
                found.id, left + EXPIRY_GRACE if left > timedelta() else EXPIRED_RECHECK_INTERVAL
            )

    async def _refuse(
        self, found: bodies.Reservation, instruction: ProviderInstruction | None, refusal: str
    ) -> None:
        try:
            self._reservations.put(await self._communicator.refuse(found.id, refusal))
        except (Conflict, NotFound):
            await self._refetch(found)
            return
        log.info(
            "Reservation refused",
            **_log_keys(agent_holds.provider_instruction(found, "")),
            reason=refusal,
        )
        await self._finish(await self._apply(found, instruction), agent_holds.REFUSED, refusal)

    async def _withdraw(
        self,
        reservation: str,
        found: bodies.Reservation | None,
        instruction: ProviderInstruction | None,
    ) -> None:
        self._holds.drop(reservation)
        if instruction is not None and not agent_holds.is_instruction_finished(instruction):
            reason = agent_holds.withdrawal_reason(found, self._config.cluster_id)
            log.info("Reservation withdrawn", **_log_keys(instruction), reason=reason)
            await self._finish(instruction, agent_holds.WITHDRAWN, reason)
        elif instruction is not None:
            await self._delete_finished(reservation, instruction.status.finished_at)
        elif found is not None and found.status.phase not in UNFINISHED_PHASES:
            await self._delete_finished(reservation, found.status.finished_at)
        if found is not None and self._is_unrelated(found):
            # Later updates still arrive; each is dropped again after its reconcile.
            self._reservations.remove(reservation)

    # -- steps

    async def _acknowledge(self, found: bodies.Reservation, held: bodies.HoldReport | None) -> bool:
        try:
            self._reservations.put(await self._communicator.acknowledge(found.id, held))
        except (Conflict, NotFound):
            await self._refetch(found)
            return False
        keys = _log_keys(agent_holds.provider_instruction(found, ""))
        if found.status.acknowledged_at is None:
            log.info("Reservation held", **keys)
        if held is not None and held.reason == agent_holds.OVERCOMMITTED:
            log.warning("Cluster overcommitted", **keys, reason=held.message)
        return True

    def _counted(self) -> Condition | None:
        """The condition Held without placeholders; None with them."""
        if self._config.has_placeholders:
            return None
        return agent_holds.counted_condition(self._holds.excess)

    def _should_refuse_unheld(
        self, found: bodies.Reservation, held: bodies.HoldReport | None
    ) -> bool:
        """Only before it was reported as held to its requester, or is used."""
        is_unheld = held is not None and held.reason == PARTIALLY_HELD
        is_new = found.status.held is None and found.status.phase == Phase.RESERVED
        return self._config.refuses_unheld and is_unheld and is_new

    async def _refetch(self, found: bodies.Reservation) -> None:
        """The broker rejected the call, so the known state is outdated: a newer one triggers a reconcile."""
        if await self._reservations.fetch(self._communicator, found.id) == found:
            raise Conflict(
                f"{found.id}: the broker accepts neither an acknowledgement nor a refusal"
            )

    async def _finish(self, instruction: ProviderInstruction, phase: str, reason: str) -> None:
        """The status change triggers another reconcile, which deletes the object when its time has come."""
        status = agent_holds.finished_status(phase, reason, self._clock())
        await self._update_status(instruction, status)

    async def _apply(
        self, reservation: bodies.Reservation, stored: ProviderInstruction | None
    ) -> ProviderInstruction:
        """Apply the reservation to its object's spec."""
        wanted = agent_holds.provider_instruction(reservation, self._config.namespace)
        if stored is not None and stored.spec == wanted.spec:
            return stored
        if stored is None:  # as was just read
            return await self._objects.apply(wanted)
        return await controller.apply_object(self._objects, wanted)

    async def _update_status(
        self, stored: ProviderInstruction, status: ProviderInstructionStatus
    ) -> None:
        def on_written(before: ProviderInstruction, after: ProviderInstruction) -> None:
            self._note(after)
            self._emit_events(before, after)

        def change(found: ProviderInstruction) -> ProviderInstructionStatus:
            conditions = agent_holds.conditions_of(found, status, self._clock(), self._counted())
            return replace(status, conditions=conditions)

        await controller.update_status(
            self._objects, stored, change, self._clock, on_written, is_current=True
        )

    async def _delete_finished(self, reservation: str, ended: datetime | None) -> None:
        """Delete the object and the cached reservation once the retention is over."""
        now = self._clock()
        left = timedelta() if ended is None else ended + self._config.finished_ttl - now
        if left > timedelta():
            self._queue.add_after(reservation, left)
        else:
            await self._objects.delete(ProviderInstruction, self._key(reservation))
            self._reservations.remove(reservation)

    def _key(self, reservation: str) -> str:
        return f"{self._config.namespace}/{agent_holds.provider_instruction_name(reservation)}"

    # -- conditions

    def _concerns_cluster(self, found: bodies.Reservation) -> bool:
        return self._config.cluster_id in (found.target_cluster_id, *found.previous_cluster_ids)

    def _is_provider(self, found: bodies.Reservation) -> bool:
        return (
            found.status.phase in LIVE_PHASES and found.target_cluster_id == self._config.cluster_id
        )

    def _is_unrelated(self, found: bodies.Reservation) -> bool:
        """Whether this cluster is neither the provider nor the requester."""
        return self._config.cluster_id not in (found.target_cluster_id, found.requester_id)

    def _may_be_held(self, reservation: str, instruction: ProviderInstruction | None) -> bool:
        """Whether a requester may rely on a hold of which the broker has not reported the state yet."""
        return reservation in self._holds or (
            instruction is not None and not agent_holds.is_instruction_finished(instruction)
        )

    def _is_expired_locally(self, found: bodies.Reservation) -> bool:
        """Whether it has expired by the local clock, which may be wrong."""
        expires_at = found.status.expires_at
        return self._is_provider(found) and expires_at is not None and expires_at <= self._clock()

    def _is_undecided(self, found: bodies.Reservation) -> bool:
        """Acknowledged and active reservations cannot be refused: they are held whatever is free.

        The same applies to recorded holds: a failed acknowledgement may have reached the broker.
        """
        return (
            found.status.phase == Phase.RESERVED
            and found.status.acknowledged_at is None
            and found.id not in self._holds
        )


def _log_keys(instruction: ProviderInstruction) -> dict[str, str]:
    spec = instruction.spec
    return {
        "reservation": agent_holds.reservation_of_instruction(instruction),
        "requester": spec.requester_cluster_id,
        "cpu": str(spec.requested_cpu),
        "memory": str(spec.requested_memory),
        "expires_at": time_text(spec.expires_at),
    }
