"""Objects that others write too: no change is undone, and the cache knows which to reconcile."""

import asyncio

import pytest
from msgspec.structs import replace

import make
from kubelend.agent import controller
from kubelend.agent.ports import Deleted, Listed
from kubelend.agent.requester import RequestCache
from kubelend.core.errors import Conflict, Unavailable
from kubelend.sources.memory_objects import MemoryObjects
from kubelend.wire.objects import (
    Metadata,
    ResourceRequest,
    ResourceRequestSpec,
    ResourceRequestStatus,
)
from virtual_time import in_virtual_time, passed, stopped

LATER = make.T0 + make.MINUTE


def resource_request(uid="", generation=0, version="", renew=False, labels={}, **status):  # noqa: B006
    metadata = Metadata(
        "w", uid=uid, generation=generation, resource_version=version, labels=labels
    )
    spec = ResourceRequestSpec("1", "1Gi", renew=renew)
    return ResourceRequest(metadata, spec, ResourceRequestStatus(**status))


class ContendedObjects(MemoryObjects):
    """Another client changes an object right before each of the first writes."""

    def __init__(self, times=0):
        super().__init__(lambda: make.T0)
        self.times = times

    async def apply(self, wanted):
        if self.times and wanted.metadata.resource_version:
            self.times -= 1
            await super().apply(resource_request(labels={"left": str(self.times)}))
        return await super().apply(wanted)

    async def set_status(self, wanted):
        if self.times and wanted.metadata.resource_version:
            self.times -= 1
            found = await self.find(type(wanted), wanted.key)
            assert found is not None
            other = replace(found.status, message=f"{found.status.message}+")
            await super().set_status(replace(found, status=other))
        return await super().set_status(wanted)


def pending(found):
    return replace(found.status, phase="Pending")


WRITES = {
    "finalizer": lambda objects, made: controller.add_finalizer(objects, made, "ours"),
    "spec": lambda objects, made: controller.apply_object(objects, resource_request(renew=True)),
    "status": lambda objects, made: controller.update_status(objects, made, pending, lambda: LATER),
}


# -- writes


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
async def test_write_is_retried_on_conflict_and_not_forever(write):
    objects = ContendedObjects(controller.CONFLICT_ATTEMPTS - 1)
    assert await write(objects, await objects.apply(resource_request())) is not None
    assert objects.times == 0
    objects = ContendedObjects(controller.CONFLICT_ATTEMPTS)
    made = await objects.apply(resource_request())
    with pytest.raises(Conflict):
        await write(objects, made)


class CountingObjects(ContendedObjects):
    """Counts reads."""

    reads = 0

    async def find(self, kind, key):
        self.reads += 1
        return await super().find(kind, key)


async def test_current_object_is_written_without_reading_it_again():
    objects = CountingObjects()
    made = await objects.apply(resource_request())
    marked = await controller.add_finalizer(objects, made, "ours")
    assert marked is not None
    written = await controller.update_status(objects, marked, pending, lambda: LATER)
    assert written is not None
    assert (written.status.phase, written.metadata.finalizers) == ("Pending", ("ours",))
    assert objects.reads == 0


async def test_old_object_from_which_nothing_changes_is_compared_with_the_current_one():
    objects = CountingObjects()
    old = await objects.apply(resource_request(phase="Pending"))
    old = replace(old, status=replace(old.status, phase="Pending"))
    await objects.set_status(replace(old, status=replace(old.status, phase="Reserved")))
    written = await controller.update_status(objects, old, pending, lambda: LATER)
    assert written is not None
    assert written.status.phase == "Pending"
    assert await objects.find(ResourceRequest, old.key) == written


async def test_finalizers_are_added_and_removed_beside_the_changes_of_others():
    objects = ContendedObjects(2)
    made = await objects.apply(resource_request())
    changed = await controller.add_finalizer(objects, made, "other")
    assert changed is not None
    assert changed.metadata.labels == {"left": "0"}, "changed by another client meanwhile"
    for _ in range(2):
        changed = await controller.add_finalizer(objects, made, "ours")
        assert changed is not None
        assert changed.metadata.finalizers == ("other", "ours")
    for _ in range(2):
        changed = await controller.remove_finalizer(objects, made, "ours")
        assert changed is not None
        assert changed.metadata.finalizers == ("other",)


async def test_apply_creates_the_object_or_changes_its_spec_only():
    objects = ContendedObjects()
    made = await controller.apply_object(objects, resource_request())
    assert await objects.list(ResourceRequest) == [made]
    await objects.apply(replace(made, metadata=replace(made.metadata, finalizers=("other",))))
    changed = await controller.apply_object(objects, resource_request(renew=True))
    assert changed.spec.renew
    assert changed.metadata.uid == made.metadata.uid
    assert changed.metadata.finalizers == ("other",)


async def test_status_is_derived_from_the_current_object():
    objects = ContendedObjects(2)
    made = await objects.apply(resource_request())
    await objects.apply(resource_request(renew=True))
    written = await controller.update_status(objects, made, pending, lambda: LATER)
    assert written is not None
    assert written.status == ResourceRequestStatus("Pending", message="++", last_update_time=LATER)
    assert written.spec.renew
    assert await objects.find(ResourceRequest, made.key) == written


@pytest.mark.parametrize("write", [WRITES["finalizer"], WRITES["status"]], ids=["meta", "status"])
async def test_deleted_or_recreated_object_is_not_written(write):
    objects = ContendedObjects()
    made = await objects.apply(resource_request())
    await objects.delete(ResourceRequest, made.key)
    assert await write(objects, made) is None
    again = await objects.apply(resource_request())
    assert await write(objects, made) is None
    assert await objects.list(ResourceRequest) == [again]


# -- the watch


@in_virtual_time
async def test_watch_is_reopened_with_backoff_which_starts_again_after_an_event():
    class Interrupted(MemoryObjects):
        async def watch(self, kind):
            opened.append(asyncio.get_running_loop().time())
            if 4 <= len(opened) <= 5:
                yield Listed([])
            raise Unavailable("no API server")

    opened: list[float] = []
    reports: list[str] = []
    watching = controller.watch_objects(
        Interrupted(lambda: make.T0), ResourceRequest, lambda _: None, reports.append, lambda: 0.0
    )
    task = asyncio.create_task(watching)
    await passed(6)
    await stopped(task)
    assert opened == [0, 0.5, 1.5, 3.5, 4, 4.5, 5.5]
    error = "cannot watch resourcerequests: no API server"
    assert reports[:5] == [error, error, error, "", error]


# -- the cache

KEY = "default/w"
OLD, NEW = resource_request(uid="1"), resource_request(uid="2")
BOUND = resource_request(uid="1", reservation_name="r")
DELETING = replace(OLD, metadata=replace(OLD.metadata, deletion_timestamp=make.T0))
STATUS_WRITE = resource_request(uid="1", version="2", phase="Pending")


def cache_after(*events):
    enqueued: list[str] = []
    cache = RequestCache(enqueued.append)
    for event in events:
        cache.handle_event(event)
    return cache, enqueued


@pytest.mark.parametrize(
    "events, count",
    [
        ([OLD], 1),
        ([Listed([OLD])], 1),
        ([OLD, STATUS_WRITE], 1),
        ([OLD, Listed([STATUS_WRITE])], 1),
        ([OLD, resource_request(uid="1", generation=2)], 2),
        ([OLD, DELETING], 2),
    ],
    ids=["added", "listed", "own status", "own status listed", "new spec", "being deleted"],
)
def test_events_that_enqueue(events, count):
    assert cache_after(*events)[1] == [KEY] * count


@pytest.mark.parametrize(
    "event",
    [Deleted(OLD), Listed([]), NEW, Listed([NEW])],
    ids=["deleted", "missing in a list", "recreated", "recreated in a list"],
)
def test_deleted_object_is_reconciled_until_it_is_forgotten(event):
    cache, enqueued = cache_after(OLD, event)
    assert cache.tombstones(KEY) == [OLD]
    assert enqueued[-1] == KEY
    cache.forget(OLD)
    assert cache.tombstones(KEY) == []


def test_deletions_of_several_objects_of_a_key_are_kept_apart():
    cache, enqueued = cache_after(NEW, Deleted(OLD))
    cache.handle_event(resource_request(uid="2", version="9"))
    assert enqueued == [KEY, KEY]
    assert cache.find(KEY) is not None, "another one was deleted"
    cache.handle_event(Deleted(NEW))
    assert cache.tombstones(KEY) == [OLD, NEW]
    cache.forget(OLD)
    assert cache.tombstones(KEY) == [NEW]


def test_owner_of_a_reservation_is_the_request_whose_status_names_it():
    cache, _ = cache_after(BOUND)
    assert (cache.owner("r"), cache.owner("other")) == (KEY, "")
    cache.handle_event(resource_request(uid="1", reservation_name="s"))
    assert (cache.owner("r"), cache.owner("s")) == ("", KEY)
    cache.unbind("s")
    assert cache.owner("s") == ""
    cache.handle_event(BOUND)
    cache.handle_event(resource_request(uid="1"))
    assert cache.owner("r") == ""


@pytest.mark.parametrize("is_released", [True, False])
def test_deleted_request_owns_nothing(is_released):
    cache, _ = cache_after(BOUND)
    cache.bind("not in a status yet", KEY)
    cache.bind("of another", "default/other")
    if is_released:
        cache.mark_released(BOUND)
    cache.handle_event(Deleted(BOUND))
    cache.forget(BOUND)
    owners = [cache.owner(name) for name in ("r", "not in a status yet", "of another")]
    assert owners == ["", "", "default/other"]
    cache, _ = cache_after(BOUND, Deleted(BOUND), resource_request(uid="2", reservation_name="s"))
    cache.forget(BOUND)
    assert cache.owner("s") == KEY, "a recreated one keeps what it owns"
