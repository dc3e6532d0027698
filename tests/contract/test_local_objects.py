"""What an agent relies on, whatever stores its objects. A new kind is one more of `KINDS`."""

import asyncio
from contextlib import aclosing
from datetime import timedelta

import pytest
from msgspec.structs import replace

import kube_objects
import make
from kubelend.agent.ports import Deleted, Listed
from kubelend.core.errors import Conflict, InvalidInput
from kubelend.kits.clock import utc_now
from kubelend.sources.file_objects import FileObjects
from kubelend.sources.kubernetes_objects import KubernetesObjects
from kubelend.sources.memory_objects import MemoryObjects
from kubelend.wire.objects import (
    Metadata,
    ProviderInstruction,
    ProviderInstructionSpec,
    ProviderInstructionStatus,
    ResourceRequest,
    ResourceRequestSpec,
    ResourceRequestStatus,
)
from waiting import PATIENCE

KINDS = ("memory", "files", pytest.param("kubernetes", marks=pytest.mark.kube))
NAMESPACES = ("default", "one", "two", "a", "b")
"""Of the tests; only an API server needs them to be created."""
LATE = timedelta(seconds=30)


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
async def objects(kind, clock, request, tmp_path):
    match kind:
        case "memory":
            yield MemoryObjects(clock)
        case "files":
            files = FileObjects(tmp_path, clock, poll=timedelta(hours=1))
            yield files
            files.close()
        case "kubernetes":
            async with kube_objects.opened(request.getfixturevalue("kube")) as client:
                await kube_objects.make_namespaces(client, *NAMESPACES)
                await kube_objects.clear(client)
                yield KubernetesObjects(client, {})
                await kube_objects.clear(client)


@pytest.fixture
def is_now(kind, clock):
    """Whether it is the present time of the objects; an API server has its own clock."""
    if kind == "kubernetes":
        return lambda stamp: abs(stamp - utc_now()) < LATE
    return lambda stamp: stamp == clock.now


def resource_request(name="sample", renew=False, namespace="default", **metadata):
    return ResourceRequest(
        Metadata(name, namespace, **metadata),
        ResourceRequestSpec("1", "1Gi", duration="1h", renew=renew),
    )


INSTRUCTION = ProviderInstruction(
    Metadata("a", "one"),
    ProviderInstructionSpec("1", "1Gi", reservation_name="rsv-1", requester_cluster_id="r"),
)


def pending(found, message="no room yet"):
    return replace(found, status=ResourceRequestStatus(phase="Pending", message=message))


async def next_event(watch):
    async with asyncio.timeout(PATIENCE):
        return await anext(watch)


# -- creating and changing


async def test_created_object_has_its_metadata_and_no_status_yet(objects, is_now):
    assert await objects.find(ResourceRequest, "default/sample") is None
    assert await objects.list(ResourceRequest) == []
    wanted = resource_request(labels={"team": "a"}, annotations={"why": "tests"})
    made = await objects.apply(pending(wanted))
    assert made.status == ResourceRequestStatus()
    assert made.metadata.uid
    assert made.metadata.resource_version
    assert made.metadata.generation == 1
    assert is_now(made.metadata.creation_timestamp)
    assert made.metadata.labels == {"team": "a"}
    assert made.metadata.annotations == {"why": "tests"}
    assert made.spec == resource_request().spec
    assert await objects.find(ResourceRequest, "default/sample") == made
    assert await objects.list(ResourceRequest) == [made]


async def test_kinds_and_namespaces_are_kept_apart(objects):
    first = await objects.apply(resource_request("a", namespace="one"))
    second = await objects.apply(resource_request("a", namespace="two"))
    other = await objects.apply(INSTRUCTION)
    assert len({first.metadata.uid, second.metadata.uid, other.metadata.uid}) == 3
    assert await objects.list(ResourceRequest) == [first, second]
    assert await objects.list(ProviderInstruction) == [other]


async def test_only_a_changed_spec_counts_a_generation(objects):
    made = await objects.apply(resource_request())
    changed = await objects.apply(resource_request(renew=True))
    assert changed.spec.renew
    assert changed.metadata.generation == 2
    assert changed.metadata.uid == made.metadata.uid
    fields = {"labels": {"a": "b"}, "annotations": {"a": "b"}, "finalizers": ("x",)}
    for name, value in fields.items():
        before, metadata = changed, replace(changed.metadata, **{name: value})
        changed = await objects.apply(replace(before, metadata=metadata))
        assert changed.metadata.generation == 2
        assert changed.metadata.resource_version != before.metadata.resource_version
        assert getattr(changed.metadata, name) == value
    assert await objects.find(ResourceRequest, "default/sample") == changed


async def test_spec_and_status_are_written_apart(objects):
    made = await objects.apply(resource_request())
    stated = await objects.set_status(
        pending(replace(made, spec=resource_request(renew=True).spec))
    )
    assert (stated.spec, stated.metadata.generation) == (made.spec, 1)
    assert stated.metadata.resource_version != made.metadata.resource_version
    changed = await objects.apply(resource_request(renew=True))
    assert changed.status == pending(made).status
    assert changed.metadata.resource_version != stated.metadata.resource_version
    assert await objects.find(ResourceRequest, "default/sample") == changed


async def test_equal_object_is_not_written(objects):
    made = await objects.apply(resource_request())
    stated = await objects.set_status(pending(made))
    assert await objects.apply(resource_request()) == stated
    assert await objects.set_status(pending(stated)) == stated
    assert await objects.set_status(pending(resource_request())) == stated
    assert await objects.find(ResourceRequest, "default/sample") == stated


async def test_status_keeps_its_times(objects):
    expiring = replace(INSTRUCTION.spec, expires_at=make.T0 + make.HOUR)
    made = await objects.apply(replace(INSTRUCTION, spec=expiring))
    status = ProviderInstructionStatus(enforced=True, last_update_time=make.T0 + make.MOMENT)
    stated = await objects.set_status(replace(made, status=status))
    assert stated.status == status
    assert stated.spec.expires_at == make.T0 + make.HOUR


# -- which object is meant


async def test_what_was_deleted_is_neither_written_nor_recreated_from_an_old_version(objects):
    made = await objects.apply(resource_request())
    await objects.delete(ResourceRequest, made.key)
    with pytest.raises(Conflict):
        await objects.apply(made)
    assert await objects.set_status(pending(made)) is None
    assert await objects.list(ResourceRequest) == []
    again = await objects.apply(resource_request())
    assert again.metadata.uid != made.metadata.uid
    with pytest.raises(Conflict):
        await objects.apply(replace(made, spec=resource_request(renew=True).spec))
    assert await objects.set_status(pending(made)) is None
    assert await objects.find(ResourceRequest, made.key) == again


async def test_change_or_status_of_an_old_version_is_a_conflict(objects):
    made = await objects.apply(resource_request())
    newer = await objects.apply(replace(made, spec=resource_request(renew=True).spec))
    finalizers = replace(made.metadata, finalizers=("example.org/one",))
    with pytest.raises(Conflict, match="was modified"):
        await objects.apply(replace(made, metadata=finalizers))
    with pytest.raises(Conflict, match="was modified"):
        await objects.set_status(pending(made))
    stated = await objects.set_status(pending(newer))
    with pytest.raises(Conflict, match="was modified"):
        await objects.set_status(pending(newer, "another word"))
    assert await objects.find(ResourceRequest, made.key) == stated


async def test_status_without_a_version_is_accepted(objects):
    made = await objects.apply(resource_request())
    await objects.set_status(pending(made))
    stated = await objects.set_status(pending(resource_request(), "another word"))
    assert (stated.metadata.uid, stated.status.message) == (made.metadata.uid, "another word")


# -- deleting


async def test_deleted_object_is_gone_and_deleting_again_is_harmless(objects):
    await objects.apply(resource_request())
    await objects.delete(ResourceRequest, "default/sample")
    await objects.delete(ResourceRequest, "default/sample")
    assert await objects.find(ResourceRequest, "default/sample") is None
    assert await objects.list(ResourceRequest) == []


async def test_finalizer_keeps_a_deleted_object_until_it_is_removed(objects, is_now, clock):
    made = await objects.apply(resource_request(finalizers=("kubelend/release", "other")))
    clock.pass_time(make.MINUTE)
    await objects.delete(ResourceRequest, made.key)
    going = await objects.find(ResourceRequest, made.key)
    assert is_now(going.metadata.deletion_timestamp)
    clock.pass_time(make.MINUTE)
    await objects.delete(ResourceRequest, made.key)
    assert await objects.find(ResourceRequest, made.key) == going
    going = await objects.apply(without_finalizers(going, keep=("other",)))
    assert await objects.find(ResourceRequest, made.key) == going
    await objects.apply(without_finalizers(going))
    assert await objects.find(ResourceRequest, made.key) is None
    assert await objects.list(ResourceRequest) == []


async def test_no_finalizer_is_added_to_what_is_being_deleted(objects):
    made = await objects.apply(resource_request(finalizers=("first",)))
    await objects.delete(ResourceRequest, made.key)
    found = await objects.find(ResourceRequest, made.key)
    going = await objects.apply(without_finalizers(found, keep=("first", "late")))
    assert going.metadata.finalizers == ("first",)


def deleted(change):
    assert isinstance(change, Deleted)
    assert isinstance(change.last_state, ResourceRequest)
    return change.last_state


def without_finalizers(found, keep=()):
    return replace(found, metadata=replace(found.metadata, finalizers=keep))


# -- watching


async def test_watch_lists_all_and_then_reports_what_is_created_changed_and_deleted(objects):
    listed = [await objects.apply(resource_request(name)) for name in "ab"]
    async with aclosing(objects.watch(ResourceRequest)) as watch:
        assert await next_event(watch) == Listed(listed)
        made = await objects.apply(resource_request())
        assert await next_event(watch) == made
        changed = await objects.apply(resource_request(renew=True))
        assert await next_event(watch) == changed
        stated = await objects.set_status(pending(changed))
        assert await next_event(watch) == stated
        await objects.delete(ResourceRequest, made.key)
        gone = deleted(await next_event(watch))
        assert gone.metadata.uid == made.metadata.uid
        assert gone.status == stated.status


async def test_watch_reports_a_deletion_that_waits_for_finalizers(objects, is_now, clock):
    made = await objects.apply(resource_request(finalizers=("x",)))
    async with aclosing(objects.watch(ResourceRequest)) as watch:
        await next_event(watch)
        await objects.delete(ResourceRequest, made.key)
        going = await next_event(watch)
        assert is_now(going.metadata.deletion_timestamp)
        await objects.apply(without_finalizers(going))
        assert isinstance(await next_event(watch), Deleted)


async def test_watch_is_silent_about_what_was_not_written_and_about_other_kinds(objects):
    made = await objects.apply(resource_request())
    async with aclosing(objects.watch(ResourceRequest)) as watch:
        await next_event(watch)
        await objects.apply(resource_request())
        await objects.set_status(made)
        await objects.apply(INSTRUCTION)
        changed = await objects.apply(resource_request(renew=True))
        assert await next_event(watch) == changed


async def test_recreated_object_is_reported_as_deleted_and_created(objects):
    made = await objects.apply(resource_request())
    async with aclosing(objects.watch(ResourceRequest)) as watch:
        await next_event(watch)
        await objects.delete(ResourceRequest, made.key)
        again = await objects.apply(resource_request())
        assert deleted(await next_event(watch)).metadata.uid == made.metadata.uid
        assert await next_event(watch) == again


async def test_all_watches_receive_a_change(objects):
    async with (
        aclosing(objects.watch(ResourceRequest)) as one,
        aclosing(objects.watch(ResourceRequest)) as two,
    ):
        await next_event(one)
        await next_event(two)
        made = await objects.apply(resource_request())
        assert [await next_event(one), await next_event(two)] == [made, made]


async def test_slow_watch_ends_up_with_the_newest(objects):
    async with aclosing(objects.watch(ResourceRequest)) as watch:
        await next_event(watch)
        made = [await objects.apply(resource_request(labels={"n": str(n)})) for n in range(1, 21)]
        while (seen := await next_event(watch)) != made[-1]:
            assert seen in made


async def test_changes_made_at_once_are_all_kept(objects):
    await asyncio.gather(*(objects.apply(resource_request(f"w{number}")) for number in range(20)))
    assert len(await objects.list(ResourceRequest)) == 20
    await asyncio.gather(
        objects.apply(resource_request("w1", renew=True)),
        objects.set_status(pending(resource_request("w1"), "at once")),
    )
    found = await objects.find(ResourceRequest, "default/w1")
    assert (found.spec.renew, found.status.message) == (True, "at once")


# -- names


INVALID_KEYS = (
    *("default/..", "default/../../etc/passwd", "../x", "default/a/b", "default/", "/a", "default"),
    *("default/A", "default/a b", "default/a\n", "default/.a", "default/-a", "a.b/c"),
    *("default/" + "a" * 254, "a" * 64 + "/a"),
)


async def test_names_that_kubernetes_refuses_are_refused(objects):
    for key in INVALID_KEYS:
        namespace, _, name = key.partition("/")
        wanted = resource_request(name, namespace=namespace)
        for call, arguments in (
            (objects.apply, (wanted,)),
            (objects.set_status, (wanted,)),
            (objects.find, (ResourceRequest, key)),
            (objects.delete, (ResourceRequest, key)),
        ):
            with pytest.raises(InvalidInput):
                await call(*arguments)


async def test_names_with_dots_are_kept_apart(objects):
    keys = ["a/b.c", "a/b", "a/b.c.d", "b/c"]
    for key in keys:
        namespace, _, name = key.partition("/")
        await objects.apply(resource_request(name, namespace=namespace))
    assert {found.key for found in await objects.list(ResourceRequest)} == set(keys)
