"""Edits of objects that others edit too: nobody's change is undone, and nobody tries for ever."""

import pytest
from msgspec.structs import replace

import make
from kubelend.agent import controller
from kubelend.core.errors import Conflict
from kubelend.sources.memory_objects import MemoryObjects
from kubelend.wire.objects import (
    Metadata,
    ResourceRequest,
    ResourceRequestSpec,
    ResourceRequestStatus,
)

LATER = make.T0 + make.MINUTE


def resource_request(cpu="1"):
    return ResourceRequest(Metadata("small"), ResourceRequestSpec(cpu, "1Gi"))


def marked(found):
    return replace(found, metadata=replace(found.metadata, finalizers=("example.org/one",)))


class Crowded(MemoryObjects):
    """Somebody else changes an object right before each of the first writes of ours."""

    def __init__(self, times):
        super().__init__(lambda: make.T0)
        self.times = times

    async def apply(self, wanted):
        if self.times and wanted.metadata.resource_version:
            self.times -= 1
            await super().apply(resource_request(cpu=f"{10 + self.times}"))
        return await super().apply(wanted)

    async def set_status(self, wanted):
        if self.times and wanted.metadata.resource_version:
            self.times -= 1
            found = await self.find(type(wanted), wanted.key)
            assert found is not None
            said = replace(found.status, message=f"{found.status.message}+")
            await super().set_status(replace(found, status=said))
        return await super().set_status(wanted)


def pending(found):
    return replace(found.status, phase="Pending")


async def test_edit_keeps_what_others_did_meanwhile():
    objects = Crowded(2)
    made = await objects.apply(resource_request())
    changed = await controller.update_object(objects, made, marked)
    assert changed is not None
    assert changed.metadata.finalizers == ("example.org/one",)
    assert changed.spec.requested_cpu == "10"


async def test_put_changes_the_spec_and_nothing_else():
    objects = Crowded(1)
    made = await objects.apply(resource_request())
    await objects.apply(
        marked(replace(made, metadata=replace(made.metadata, uid="", resource_version="")))
    )
    changed = await controller.apply_object(objects, resource_request(cpu="2"))
    assert changed.spec.requested_cpu == "2"
    assert changed.metadata.uid == made.metadata.uid


async def test_put_makes_what_is_not_there():
    objects = MemoryObjects(lambda: make.T0)
    made = await controller.apply_object(objects, resource_request())
    assert await objects.list(ResourceRequest) == [made]


@pytest.mark.parametrize(
    "act",
    [
        lambda objects, made: controller.update_object(objects, made, marked),
        lambda objects, made: controller.apply_object(objects, resource_request("2")),
        lambda objects, made: controller.update_status(objects, made, pending, lambda: LATER),
    ],
    ids=["edit", "put", "state"],
)
async def test_somebody_who_is_always_faster_is_a_conflict(act):
    objects = Crowded(controller.CONFLICT_ATTEMPTS)
    made = await objects.apply(resource_request())
    with pytest.raises(Conflict):
        await act(objects, made)


async def test_a_status_is_made_of_what_others_have_written_meanwhile():
    objects = Crowded(2)
    made = await objects.apply(resource_request())
    stated = await controller.update_status(objects, made, pending, lambda: LATER)
    assert stated is not None
    assert stated.status == ResourceRequestStatus("Pending", message="++", last_update_time=LATER)
    assert await objects.find(ResourceRequest, made.key) == stated


async def test_a_status_is_written_though_somebody_changed_the_spec():
    objects = MemoryObjects(lambda: make.T0)
    made = await objects.apply(resource_request())
    await objects.apply(resource_request(cpu="2"))
    stated = await controller.update_status(objects, made, pending, lambda: LATER)
    assert stated is not None
    assert (stated.spec.requested_cpu, stated.status.phase) == ("2", "Pending")


async def test_a_status_that_says_nothing_new_is_not_written():
    objects = MemoryObjects(lambda: make.T0)
    made = await objects.apply(resource_request())
    stated = await controller.update_status(objects, made, pending, lambda: make.T0)
    assert await controller.update_status(objects, made, pending, lambda: LATER) == stated


async def test_finalizers_come_once_and_go_beside_those_of_others():
    objects = MemoryObjects(lambda: make.T0)
    made = await objects.apply(marked(resource_request()))
    for _ in range(2):
        changed = await controller.add_finalizer(objects, made, "ours")
        assert changed is not None
        assert changed.metadata.finalizers == ("example.org/one", "ours")
    for _ in range(2):
        changed = await controller.remove_finalizer(objects, made, "ours")
        assert changed is not None
        assert changed.metadata.finalizers == ("example.org/one",)


async def test_gone_or_other_object_is_not_edited():
    objects = MemoryObjects(lambda: make.T0)
    made = await objects.apply(resource_request())
    await objects.delete(ResourceRequest, made.key)
    assert await controller.update_object(objects, made, marked) is None
    assert await controller.update_status(objects, made, pending, lambda: LATER) is None
    again = await objects.apply(resource_request())
    assert await controller.update_object(objects, made, marked) is None
    assert await controller.update_status(objects, made, pending, lambda: LATER) is None
    assert await objects.list(ResourceRequest) == [again]
