"""Keeps the placeholders of all holds as `agent.placeholders` plans them, and reports what is held.

A root task of the agent, level-triggered by any change of nodes, pods or holds: one key for the whole
cluster, because all holds share the capacity of its nodes. Own writes are assumed until the watch shows them,
so that no plan is made from what was true before them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Final, NamedTuple

import structlog
from msgspec.structs import replace

from kubelend.agent import conditions, controller, placeholders
from kubelend.agent import holds as agent_holds
from kubelend.agent.health import ComponentHealth
from kubelend.agent.placeholders import (
    CreatePlaceholder,
    DeletePlaceholder,
    HandOver,
    HeldState,
    HoldView,
    PlaceholderAction,
    ReleasePod,
    UngatePlaceholder,
)
from kubelend.agent.ports import Clock, HoldPods, LocalObjects, NewPlaceholder
from kubelend.core.errors import KubelendError, NotFound
from kubelend.core.inventory import Inventory
from kubelend.core.pod_requests import Pod, PodScheduling
from kubelend.kits import tasks
from kubelend.kits.workqueue import ReconcileQueue
from kubelend.wire.objects import ProviderInstruction, ProviderInstructionStatus

COMPONENT: Final = "placeholders"
PLAN_INTERVAL: Final = timedelta(milliseconds=50)
"""At least this long between two plans. The first change is planned at once: reclaiming is urgent."""
FAILURE_PAUSE: Final = timedelta(seconds=1)
GATE_TIMEOUT: Final = timedelta(seconds=30)
"""How long an offloaded pod waits for capacity that is being taken back or added."""
CREATE_INTERVAL: Final = timedelta(seconds=10)
"""After a placeholder was lost, before another one is tried on the same node."""
ASSUMED_FOR: Final = timedelta(seconds=10)
"""How long a created pod that the watch has not shown is assumed to exist."""
INSTRUCTION_DELAY: Final = timedelta(milliseconds=500)
"""Until a ProviderInstruction is looked for again that is not written yet."""
LEASE_INTERVAL: Final = timedelta(seconds=10)

DOES_NOT_FIT: Final = "DoesNotFitHold"
NOTHING_HELD: Final = "NothingHeld"

_KEY: Final = "cluster"

log = structlog.get_logger("kubelend.agent")


class PlaceholderReconciler:
    """Use `run` as a root task, after the holds are restored; call `notify_changed` at every change."""

    def __init__(
        self,
        namespace: str,
        inventory: Inventory,
        objects: LocalObjects,
        pods: HoldPods,
        health: ComponentHealth,
        clock: Clock,
    ) -> None:
        self._namespace = namespace
        self._inventory = inventory
        self._objects = objects
        self._pods = pods
        self._health = health
        self._clock = clock
        self._queue = ReconcileQueue(
            "Placeholder", self._reconcile, log, on_failure=self._on_failure
        )
        self._writes = _OwnWrites()
        self._gated_since: dict[str, float] = {}
        self._handed_over: set[str] = set()
        self._reported: dict[str, HeldState] = {}
        self._next_plan = 0.0
        """In the event loop's time."""

    def notify_changed(self) -> None:
        """Plan soon; after a failure not before a pause, however much changes."""
        left = self._next_plan - self._now()
        self._queue.add_after(_KEY, timedelta(seconds=left))

    async def run(self) -> None:
        """Keep placeholders and the lease. Runs until cancelled."""
        self._queue.add(_KEY)
        await tasks.run_all({"reconcile": self._queue.run(), "lease": self._renew_lease()})

    async def _renew_lease(self) -> None:
        """Also deletes finished placeholders, which the watch of unfinished pods does not show."""
        while True:
            try:
                await self._pods.renew_lease()
                await self._pods.delete_finished()
            except KubelendError as error:
                self._health.report(COMPONENT, f"cannot renew the lease: {error}", is_partial=True)
            await asyncio.sleep(LEASE_INTERVAL.total_seconds())

    async def _on_failure(self, _: str, error: KubelendError) -> None:
        self._next_plan = self._now() + FAILURE_PAUSE.total_seconds()
        self._health.report(COMPONENT, f"cannot keep placeholders: {error}", is_partial=True)

    # -- reconcile

    async def _reconcile(self, _: str) -> None:
        if not self._inventory.is_synced:
            self._queue.add_after(_KEY, INSTRUCTION_DELAY)
            return
        for action in self._plan():
            await self._execute(action)
        await self._report_held(self._view())
        self._health.report(COMPONENT, "")

    def _plan(self) -> list[PlaceholderAction]:
        """Planning takes a tenth of the time at most, also in a cluster with thousands of nodes."""
        began = self._now()
        actions = placeholders.plan(self._view())
        pause = max(PLAN_INTERVAL.total_seconds(), 10 * (self._now() - began))
        self._next_plan = self._now() + pause
        return actions

    def _view(self) -> HoldView:
        now = self._now()
        capacity = self._inventory.free_by_node()
        pods = self._writes.apply_to(dict(self._inventory.scheduled), capacity, now)
        avoided = self._writes.recently_lost(pods, now)
        view = HoldView(
            holds=dict(self._inventory.holds),
            pods=list(pods.values()),
            capacity=capacity,
            avoided=avoided,
            overdue=self._overdue(pods, now),
            handed_over=self._handed_over,
        )
        self._handed_over &= pods.keys()
        if avoided:
            self._queue.add_after(_KEY, CREATE_INTERVAL)
        return view

    def _overdue(self, pods: dict[str, Pod], now: float) -> set[str]:
        gated = {uid for uid, pod in pods.items() if not pod.placeholder_for and _is_gated(pod)}
        self._gated_since = {uid: self._gated_since.get(uid, now) for uid in gated}
        timeout = GATE_TIMEOUT.total_seconds()
        if gated:
            self._queue.add_after(_KEY, GATE_TIMEOUT)
        return {uid for uid, since in self._gated_since.items() if now - since >= timeout}

    async def _execute(self, action: PlaceholderAction) -> None:
        match action:
            case CreatePlaceholder(reservation, node, amounts, is_gated):
                owner = await self._owner(reservation)
                if owner is not None:
                    await self._create(NewPlaceholder(owner, node, amounts, is_gated))
            case DeletePlaceholder(pod):
                await self._delete(pod)
            case UngatePlaceholder(pod):
                self._writes.assume(await self._pods.ungate(pod), self._now())
            case HandOver():
                await self._hand_over(action)
            case ReleasePod(pod, reservation):
                await self._release(pod, reservation)

    # -- actions

    async def _create(self, wanted: NewPlaceholder) -> Pod | None:
        """A gated placeholder also gets its node nominated."""
        made = await self._pods.create(wanted)
        self._writes.assume_created(made, wanted, self._now())
        if not wanted.is_gated:
            return made
        nominated = await self._pods.nominate(made, wanted.node)
        self._writes.assume(nominated, self._now())
        return nominated

    async def _delete(self, pod: Pod) -> None:
        await self._pods.delete(pod)
        self._writes.assume_deleted(pod, self._now())

    async def _hand_over(self, action: HandOver) -> None:
        """In exactly this order: with any other one a waiting pod can take the capacity (ADR 0027)."""
        remainder = await self._create_remainder(action)
        if action.pod is not None:
            nominated = await self._pods.nominate(action.pod, action.node)
            if nominated is None:
                return  # gone: the next plan deletes the rest
            self._handed_over.add(action.pod.id)
            self._writes.assume(nominated, self._now())
        for pod in action.placeholders:
            await self._delete(pod)
        for gated in filter(None, (action.pod, remainder)):
            if _is_gated(gated):
                self._writes.assume(await self._pods.ungate(gated), self._now())
        if action.pod is not None:
            self._log("Held resources handed over", action.reservation, action.pod, action.node)

    async def _create_remainder(self, action: HandOver) -> Pod | None:
        if not action.remainder:
            return None
        owner = await self._owner(action.reservation)
        if owner is None:
            raise NotFound(f"{action.reservation}: its ProviderInstruction is not there yet")
        return await self._create(
            NewPlaceholder(owner, action.node, action.remainder, is_gated=True)
        )

    async def _release(self, pod: Pod, reservation: str) -> None:
        """The condition first: an ungated pod is not released again."""
        state = _scheduling(pod)
        reason = DOES_NOT_FIT if reservation else NOTHING_HELD
        fits = (
            "does not fit into the held capacity of one node"
            if reservation
            else "has no held capacity"
        )
        message = f"Pod {state.namespace}/{state.name} ({pod.requests.describe()}) {fits}"
        await self._pods.set_condition(pod, reason, message)
        self._writes.assume(await self._pods.ungate(pod), self._now())
        owner = await self._owner(reservation) if reservation else None
        if owner is not None:
            await self._pods.record_event(owner, reason, message, is_warning=True)
        self._log("Pod scheduled without held resources", reservation, pod, "", reason=reason)

    def _log(self, text: str, reservation: str, pod: Pod, node: str, **keys: str) -> None:
        state = _scheduling(pod)
        found = {"reservation": reservation, "node": node, **keys}
        log.info(
            text,
            namespace=state.namespace,
            name=state.name,
            **{key: value for key, value in found.items() if value},
        )

    async def _owner(self, reservation: str) -> ProviderInstruction | None:
        """The object of a hold, unless it is not written yet or finished."""
        key = f"{self._namespace}/{agent_holds.provider_instruction_name(reservation)}"
        found = await self._objects.find(ProviderInstruction, key)
        is_held = found is not None and found.status.phase == agent_holds.HELD
        if not is_held:
            self._queue.add_after(_KEY, INSTRUCTION_DELAY)
        return found if is_held else None

    # -- the condition Held

    async def _report_held(self, view: HoldView) -> None:
        self._reported = {name: held for name, held in self._reported.items() if name in view.holds}
        for reservation in view.holds:
            state = placeholders.held_state(view, reservation)
            before = self._reported.get(reservation)
            if state != before and (owner := await self._owner(reservation)):
                await self._write_condition(owner, state)
                self._reported[reservation] = state
                reason = agent_holds.HELD_CONDITION, state.reason
                is_new = not conditions.has_reason(owner.status.conditions, *reason)
                if is_new and state.reason != placeholders.HOLDING:
                    await self._announce(owner, state)

    async def _write_condition(self, owner: ProviderInstruction, state: HeldState) -> None:
        condition = agent_holds.held_condition(*state)

        def change(found: ProviderInstruction) -> ProviderInstructionStatus:
            return agent_holds.with_held_condition(found, condition, self._clock())

        await controller.update_status(self._objects, owner, change, self._clock)

    async def _announce(self, owner: ProviderInstruction, state: HeldState) -> None:
        is_held = state.reason == placeholders.HELD
        write: Callable[..., object] = log.info if is_held else log.warning
        reservation = agent_holds.reservation_of_instruction(owner)
        write("Held resources changed", reservation=reservation, reason=state.reason)
        await self._pods.record_event(owner, state.reason, state.message, is_warning=not is_held)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


class _Assumed(NamedTuple):
    pod: Pod
    at: float
    is_new: bool
    """Whether the watch has not shown it yet."""


class _OwnWrites:
    """Pods as the agent has written them, until the watch shows the same or more."""

    def __init__(self) -> None:
        self._assumed: dict[str, _Assumed] = {}
        self._deleted: dict[str, float] = {}
        """When each pod was deleted, until the watch shows it."""
        self._created: dict[tuple[str, str], tuple[str, float]] = {}
        """The last placeholder of a reservation on a node, and when it was created."""

    def assume(self, pod: Pod | None, now: float) -> None:
        if pod is not None:
            known = self._assumed.get(pod.id)
            self._assumed[pod.id] = _Assumed(pod, now, known is not None and known.is_new)

    def assume_created(self, pod: Pod, wanted: NewPlaceholder, now: float) -> None:
        self._assumed[pod.id] = _Assumed(pod, now, is_new=True)
        if not wanted.is_gated:
            self._created[pod.placeholder_for, wanted.node] = pod.id, now

    def assume_deleted(self, pod: Pod, now: float) -> None:
        self._deleted[pod.id] = now
        self._assumed.pop(pod.id, None)
        self._created = {at: made for at, made in self._created.items() if made[0] != pod.id}

    def recently_lost(self, pods: dict[str, Pod], now: float) -> set[tuple[str, str]]:
        """Where a placeholder that was created only just is gone, and not by the agent."""
        since = now - CREATE_INTERVAL.total_seconds()
        self._created = {at: made for at, made in self._created.items() if made[1] > since}
        return {at for at, (uid, _) in self._created.items() if uid not in pods}

    def apply_to(
        self, pods: dict[str, Pod], capacity: placeholders.FreeCapacity, now: float
    ) -> dict[str, Pod]:
        since = now - ASSUMED_FOR.total_seconds()
        self._deleted = {uid: at for uid, at in self._deleted.items() if uid in pods or at > since}
        for uid in self._deleted.keys() & pods.keys():
            gone = pods.pop(uid)
            if gone.node in capacity:
                capacity[gone.node] += gone.requests
        for uid, assumed in list(self._assumed.items()):
            overlaid = self._overlay(pods.get(uid), assumed, since)
            if overlaid is not None:
                pods[uid] = overlaid
        return pods

    def _overlay(self, known: Pod | None, assumed: _Assumed, since: float) -> Pod | None:
        """The pod as it is assumed to be; None, and no longer assumed, if the watch knows better."""
        uid = assumed.pod.id
        if known is None and assumed.is_new and assumed.at > since:
            return assumed.pod
        if known is None or _progress(known) >= _progress(assumed.pod):
            del self._assumed[uid]
            return None
        self._assumed[uid] = assumed._replace(is_new=False)
        written = _scheduling(assumed.pod)
        state = _scheduling(known)._replace(
            is_gated=written.is_gated, nominated_node=written.nominated_node
        )
        return replace(known, scheduling=state)


def _progress(pod: Pod) -> int:
    """How far a pod has come: gated, nominated, ungated, bound. It never goes back."""
    state = _scheduling(pod)
    if pod.node:
        return 3
    return (1 if state.nominated_node else 0) if state.is_gated else 2


def _scheduling(pod: Pod) -> PodScheduling:
    return pod.scheduling or PodScheduling("", "")


def _is_gated(pod: Pod) -> bool:
    return _scheduling(pod).is_gated
