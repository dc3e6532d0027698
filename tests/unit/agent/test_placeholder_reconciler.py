"""The reconciler of placeholders: the order of its calls, and own writes that the watch shows late."""

import asyncio
import itertools

from msgspec.structs import replace

import virtual_time
from kubelend.agent import holds
from kubelend.agent.health import ComponentHealth
from kubelend.agent.placeholder_reconciler import (
    CREATE_INTERVAL,
    GATE_TIMEOUT,
    PlaceholderReconciler,
)
from kubelend.core.errors import Unavailable
from kubelend.core.inventory import Hold, Inventory
from kubelend.core.pod_requests import Node, OffloadedFrom, Pod, PodScheduling
from kubelend.core.resources import parse_requested
from kubelend.sources.memory_objects import MemoryObjects
from kubelend.wire.objects import (
    Metadata,
    ProviderInstruction,
    ProviderInstructionSpec,
    ProviderInstructionStatus,
)

R = "rsv-rome-1"


def amounts(cpu):
    return parse_requested({"cpu": str(cpu), "memory": f"{cpu}Gi"})


class FakePods:
    """The API server's pods, and a scheduler that binds what it may. The watch shows them when asked to."""

    def __init__(self, inventory):
        self.inventory = inventory
        self.pods = {}
        self.numbers = itertools.count()
        self.calls = []
        self.events = []
        self.error = None
        self.is_scheduling = True

    def put(self, pod):
        state = pod.scheduling
        is_free = self.is_scheduling and not state.is_gated and not pod.node
        node = state.nominated_node or state.required_node
        self.pods[pod.id] = replace(pod, node=node) if is_free and node else pod
        return pod

    def show(self):
        """What the watch has to tell."""
        for gone in set(self.inventory.scheduled) - set(self.pods):
            self.inventory.delete_pod(gone)
        for pod in self.pods.values():
            self.inventory.put_pod(pod)

    def note(self, *call):
        self.calls.append(call)
        if self.error is not None:
            raise self.error

    async def create(self, wanted):
        name = f"p{next(self.numbers)}"
        self.note("create", name, wanted.node, wanted.amounts.cpu, wanted.is_gated)
        state = PodScheduling("lending", name, is_gated=wanted.is_gated, required_node=wanted.node)
        reservation = wanted.owner.spec.reservation_name
        return self.put(
            Pod(name, "", wanted.amounts, placeholder_for=reservation, scheduling=state)
        )

    async def delete(self, pod):
        self.note("delete", pod.id)
        self.pods.pop(pod.id, None)

    async def nominate(self, pod, node):
        self.note("nominate", pod.id, node)
        return self.change(pod, nominated_node=node)

    async def ungate(self, pod):
        self.note("ungate", pod.id)
        return self.change(pod, is_gated=False)

    def change(self, pod, **state):
        known = self.pods.get(pod.id)
        if known is None:
            return None
        return self.put(replace(known, scheduling=known.scheduling._replace(**state)))

    async def set_condition(self, pod, reason, message):
        self.note("condition", pod.id, reason)

    async def record_event(self, about, reason, message, *, is_warning):
        self.events.append((reason, is_warning))

    async def renew_lease(self):
        pass

    async def delete_finished(self):
        pass


class Rig:
    def __init__(self):
        self.inventory = Inventory()
        self.inventory.reset([Node("n1", amounts(8), amounts(8))], [])
        self.objects = MemoryObjects(virtual_time.now)
        self.pods = FakePods(self.inventory)
        self.health = ComponentHealth()
        self.reconciler = PlaceholderReconciler(
            "lending", self.inventory, self.objects, self.pods, self.health, virtual_time.now
        )

    def running(self):
        return virtual_time.running(self.reconciler.run())

    async def hold(self, cpu):
        spec = ProviderInstructionSpec(
            str(cpu), f"{cpu}Gi", reservation_name=R, requester_cluster_id="rome"
        )
        made = await self.objects.apply(
            ProviderInstruction(Metadata(f"{R}-provider", "lending"), spec)
        )
        status = ProviderInstructionStatus(enforced=True, phase=holds.HELD)
        await self.objects.set_status(replace(made, status=status))
        self.inventory.put_hold(R, Hold("rome", amounts(cpu)))
        await self.settle()

    def borrow(self, cpu):
        state = PodScheduling("team", "web", is_gated=True)
        origin = OffloadedFrom("rome", R)
        self.pods.put(Pod("web", "", amounts(cpu), offloaded_from=origin, scheduling=state))

    async def settle(self):
        """The watch shows everything, until nothing changes any more."""
        for _ in range(5):
            self.pods.show()
            await self.plan()

    async def plan(self):
        """Once more, with what the watch has shown so far."""
        self.reconciler.notify_changed()
        await asyncio.sleep(0.1)

    async def condition(self):
        found = await self.objects.find(ProviderInstruction, f"lending/{R}-provider")
        assert found is not None
        return [(one.type, one.status, one.reason) for one in found.status.conditions]


with_rig = virtual_time.rig_decorator(Rig)()


@with_rig
async def test_room_is_handed_over_in_the_only_safe_order(rig):
    await rig.hold(4)
    rig.pods.calls.clear()
    rig.borrow(3)
    await rig.settle()
    assert rig.pods.calls == [
        ("create", "p1", "n1", 1000, True),
        ("nominate", "p1", "n1"),
        ("nominate", "web", "n1"),
        ("delete", "p0"),
        ("ungate", "web"),
        ("ungate", "p1"),
    ]
    assert {pod.node for pod in rig.pods.pods.values()} == {"n1"}


@with_rig
async def test_nothing_is_done_twice_before_the_watch_shows_it(rig):
    await rig.hold(4)
    rig.borrow(3)
    rig.pods.show()
    await rig.plan()
    done = list(rig.pods.calls)
    for _ in range(5):
        await rig.plan()
    assert rig.pods.calls == done
    await rig.settle()
    assert rig.pods.calls == done


@with_rig
async def test_an_old_state_of_the_watch_does_not_repeat_a_hand_over(rig):
    await rig.hold(4)
    rig.borrow(3)
    rig.pods.show()
    old = dict(rig.inventory.scheduled)
    await rig.plan()
    done = list(rig.pods.calls)
    for pod in old.values():
        rig.inventory.put_pod(pod)
    await rig.plan()
    assert rig.pods.calls == done


@with_rig
async def test_room_of_a_lost_placeholder_is_tried_again_after_a_while(rig):
    await rig.hold(4)
    for _ in range(3):
        rig.pods.pods.clear()
        await rig.settle()
    assert len(rig.pods.calls) == 1
    await asyncio.sleep(CREATE_INTERVAL.total_seconds())
    await rig.settle()
    assert len(rig.pods.calls) == 2


@with_rig
async def test_a_pod_waits_for_a_scheduler_only_so_long(rig):
    rig.pods.is_scheduling = False
    await rig.hold(4)
    rig.borrow(3)
    await rig.settle()
    assert [call[0] for call in rig.pods.calls] == ["create"]
    await asyncio.sleep(GATE_TIMEOUT.total_seconds())
    assert rig.pods.calls[1:] == [("condition", "web", "DoesNotFitHold"), ("ungate", "web")]
    assert ("DoesNotFitHold", True) in rig.pods.events


@with_rig
async def test_condition_and_event_follow_what_is_held(rig):
    await rig.hold(4)
    assert await rig.condition() == [("Held", "True", "Held")]
    rig.inventory.put_hold(R, Hold("rome", amounts(12)))
    await rig.settle()
    assert await rig.condition() == [("Held", "False", "PartiallyHeld")]
    assert rig.pods.events == [("Held", False), ("PartiallyHeld", True)]


@with_rig
async def test_placeholders_end_with_the_hold(rig):
    await rig.hold(4)
    rig.inventory.delete_hold(R)
    await rig.settle()
    assert rig.pods.pods == {}


@with_rig
async def test_a_failure_is_told_and_retried_after_a_pause(rig):
    rig.pods.error = Unavailable("the API server is away")
    await rig.hold(4)
    await rig.plan()
    assert len(rig.pods.calls) <= 2  # after its backoff, however much has changed since
    rig.pods.error = None
    await asyncio.sleep(2)
    await rig.settle()
    assert await rig.condition() == [("Held", "True", "Held")]
