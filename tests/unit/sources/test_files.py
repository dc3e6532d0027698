"""What people do to the files, and what becomes of the objects. The common promises are in tests/contract."""

import asyncio
from contextlib import aclosing
from datetime import timedelta

import pytest
import yaml
from msgspec.structs import replace

import make
from kubelend.agent.ports import Deleted, Listed
from kubelend.core.errors import Conflict, StoreFailed, Unavailable
from kubelend.kits import files
from kubelend.sources import file_objects
from kubelend.sources.file_objects import FileObjects
from kubelend.wire.objects import (
    Metadata,
    ResourceRequest,
    ResourceRequestSpec,
    ResourceRequestStatus,
)
from virtual_time import in_virtual_time, now
from waiting import PATIENCE, until

QUICK = timedelta(milliseconds=5)

BY_HAND = """
# two cores for an afternoon
apiVersion: rear.fluidos.eu/v1alpha1
kind: ResourceRequest
metadata:
  name: sample
spec:
  requestedCPU: "2"
  requestedMemory: 1Gi
"""


def resource_request(**metadata):
    return ResourceRequest(Metadata("sample", **metadata), ResourceRequestSpec("1", "1Gi"))


async def find(objects):
    return await objects.find(ResourceRequest, "default/sample")


def edit(file, old, new):
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


async def next_event(watch):
    async with asyncio.timeout(PATIENCE):
        return await anext(watch)


# -- what is in a file


async def test_file_shows_the_object_as_kubernetes_would(objects, file):
    made = await objects.apply(resource_request(labels={"team": "a"}))
    status = ResourceRequestStatus(phase="Pending", last_update_time=make.T0)
    stated = await objects.set_status(replace(made, status=status))
    assert yaml.safe_load(file.read_bytes()) == {
        "apiVersion": "rear.fluidos.eu/v1alpha1",
        "kind": "ResourceRequest",
        "metadata": {
            "name": "sample",
            "uid": made.metadata.uid,
            "generation": 1,
            "resourceVersion": stated.metadata.resource_version,
            "creationTimestamp": "2026-01-01T12:00:00Z",
            "labels": {"team": "a"},
        },
        "spec": {"requestedCPU": "1", "requestedMemory": "1Gi"},
        "status": {"phase": "Pending", "lastUpdateTime": "2026-01-01T12:00:00Z"},
    }


async def test_objects_outlive_their_keeper(objects, open_objects):
    made = await objects.apply(resource_request(finalizers=("x",)))
    stated = await objects.set_status(
        replace(made, status=ResourceRequestStatus(phase="Reserved", expires_at=make.T0))
    )
    assert await open_objects().list(ResourceRequest) == [stated]


async def test_what_is_equal_leaves_the_file_alone(objects, file):
    await objects.apply(resource_request())
    before = files.file_state(file)
    await objects.apply(resource_request())
    await objects.set_status(resource_request())
    assert files.file_state(file) == before


async def test_nothing_but_the_file_is_left_by_writing(objects, file):
    await objects.apply(resource_request())
    assert [found.name for found in file.parent.iterdir()] == ["default.sample.yaml"]


# -- files by hand


async def test_file_by_hand_becomes_an_object(objects, file):
    file.write_text(BY_HAND)
    (found,) = await objects.list(ResourceRequest)
    assert found.spec == ResourceRequestSpec("2", "1Gi")
    assert found.metadata.uid
    assert (found.metadata.generation, found.metadata.creation_timestamp) == (1, make.T0)
    assert found.status == ResourceRequestStatus()
    completed = yaml.safe_load(file.read_bytes())
    assert completed["metadata"]["uid"] == found.metadata.uid
    assert await find(objects) == found


async def test_watch_hears_of_files_that_come_change_and_go(open_objects, file):
    objects = open_objects(settle=QUICK)
    async with aclosing(objects.watch(ResourceRequest)) as watch:
        assert await next_event(watch) == Listed([])
        file.write_text(BY_HAND)
        made = await next_event(watch)
        assert made.spec.requested_cpu == "2"
        edit(file, "1Gi", "3Gi")
        assert (await next_event(watch)).spec.requested_memory == "3Gi"
        file.unlink()
        gone = await next_event(watch)
        assert isinstance(gone, Deleted)


async def test_spec_edited_by_hand_counts_a_generation(objects, file):
    made = await objects.apply(resource_request())
    edit(file, "requestedCPU: '1'", "requestedCPU: '4'")
    edited = await find(objects)
    assert edited.spec.requested_cpu == "4"
    assert edited.metadata.generation == 2
    assert edited.metadata.uid == made.metadata.uid
    assert edited.metadata.resource_version != made.metadata.resource_version


async def test_spec_edited_while_nobody_looked_counts_a_generation(objects, open_objects, file):
    made = await objects.apply(resource_request())
    edit(file, "requestedCPU: '1'", "requestedCPU: '4'")
    edited = await find(open_objects(settle=timedelta()))
    assert edited.metadata.generation == 2
    assert edited.metadata.uid == made.metadata.uid
    assert edited.metadata.resource_version != made.metadata.resource_version


async def test_labels_edited_by_hand_count_no_generation(objects, file):
    made = await objects.apply(resource_request(labels={"team": "a"}))
    edit(file, "team: a", "team: b")
    edited = await find(objects)
    assert edited.metadata.labels == {"team": "b"}
    assert edited.metadata.generation == 1
    assert edited.metadata.resource_version != made.metadata.resource_version


async def test_file_copied_over_an_object_is_an_edit_of_it(objects, file):
    made = await objects.apply(resource_request(finalizers=("x",)))
    stated = await objects.set_status(replace(made, status=ResourceRequestStatus(phase="Reserved")))
    file.write_text(BY_HAND)
    edited = await find(objects)
    assert edited.spec.requested_cpu == "2"
    assert edited.metadata.generation == 2
    assert edited.metadata.uid == made.metadata.uid
    assert edited.metadata.finalizers == ("x",)
    assert edited.status == stated.status


@pytest.mark.parametrize("is_seen_before", [True, False], ids=["seen before", "not seen before"])
async def test_copy_under_another_name_is_another_object(
    objects, open_objects, file, is_seen_before
):
    made = await objects.apply(resource_request())
    stated = await objects.set_status(replace(made, status=ResourceRequestStatus(phase="Reserved")))
    copy = file.with_name("default.another.yaml")
    copy.write_text(file.read_text().replace("name: sample", "name: another"))
    if not is_seen_before:
        objects = open_objects(settle=timedelta())
    another, original = await objects.list(ResourceRequest)
    assert original == stated
    assert another.metadata.uid != made.metadata.uid
    assert another.status == ResourceRequestStatus()


async def test_edit_is_not_lost_to_a_status_written_right_after_it(objects, file):
    made = await objects.apply(resource_request())
    edit(file, "requestedCPU: '1'", "requestedCPU: '4'")
    pending = ResourceRequestStatus(phase="Pending")
    with pytest.raises(Conflict, match="was modified"):
        await objects.set_status(replace(made, status=pending))
    stated = await objects.set_status(replace(await find(objects), status=pending))
    assert stated.spec.requested_cpu == "4"
    assert "requestedCPU: '4'" in file.read_text()


async def test_times_are_read_in_quotes_or_without(objects, file):
    file.write_text(
        BY_HAND.replace("name: sample", "name: sample\n  annotations: {since: 2026-01-01}")
    )
    assert (await find(objects)).metadata.annotations == {"since": "2026-01-01"}
    edit(file, "'2026-01-01T12:00:00Z'", "2026-01-01T12:00:00Z")
    found = await find(objects)
    assert found.metadata.creation_timestamp == make.T0


# -- files that are removed


async def test_removed_file_is_a_deleted_object(objects, file):
    made = await objects.apply(resource_request())
    file.unlink()
    assert await find(objects) is None
    assert await objects.set_status(made) is None
    assert not file.exists()


async def test_removed_file_comes_back_until_its_finalizers_are_gone(objects, file):
    made = await objects.apply(resource_request(finalizers=("x",)))
    file.unlink()
    going = await find(objects)
    assert going.metadata.deletion_timestamp == make.T0
    assert going.metadata.uid == made.metadata.uid
    assert "deletionTimestamp" in file.read_text()
    file.unlink()
    assert await find(objects) == going
    await objects.apply(replace(going, metadata=replace(going.metadata, finalizers=())))
    assert not file.exists()
    assert await find(objects) is None


async def test_other_store_does_not_put_back_what_its_finalizers_let_go(open_objects, file):
    objects, other = open_objects(settle=timedelta()), open_objects(settle=timedelta())
    made = await objects.apply(resource_request(finalizers=("x",)))
    assert await find(other) == made
    await objects.delete(ResourceRequest, made.key)
    going = await find(objects)
    await objects.apply(replace(going, metadata=replace(going.metadata, finalizers=())))
    assert await find(other) is None
    assert not file.exists()


async def test_file_that_an_editor_takes_away_for_a_moment_is_not_deleted(open_objects, file):
    objects = open_objects(settle=timedelta(seconds=PATIENCE))
    await objects.list(ResourceRequest)
    made = await objects.apply(resource_request())
    aside = file.rename(file.with_name("default.sample.yaml~"))
    assert await find(objects) == made
    assert await objects.list(ResourceRequest) == [made]
    aside.rename(file)
    assert await objects.list(ResourceRequest) == [made]


async def test_directory_that_is_gone_deletes_nothing(objects, file, tmp_path):
    made = await objects.apply(resource_request())
    aside = file.parent.rename(tmp_path / "aside")
    with pytest.raises(StoreFailed, match="resourcerequests"):
        await objects.list(ResourceRequest)
    with pytest.raises(StoreFailed, match="resourcerequests does not exist"):
        await find(objects)
    with pytest.raises(StoreFailed, match="resourcerequests does not exist"):
        await objects.apply(resource_request())
    aside.rename(file.parent)
    assert await objects.list(ResourceRequest) == [made]


async def test_watch_waits_out_a_directory_that_is_gone(objects, file, tmp_path):
    made = await objects.apply(resource_request())
    aside = file.parent.rename(tmp_path / "aside")
    async with aclosing(objects.watch(ResourceRequest)) as watch:
        first = asyncio.ensure_future(anext(watch))
        await until(lambda: "resourcerequests" in objects.problem)
        assert not first.done()
        aside.rename(file.parent)
        async with asyncio.timeout(PATIENCE):
            assert await first == Listed([made])
        assert objects.problem == ""


# -- the end


async def test_what_has_begun_is_finished_at_the_end_which_may_come_twice(objects, file):
    change = asyncio.ensure_future(objects.apply(resource_request()))
    await asyncio.sleep(0)
    await objects.close()
    await objects.close()
    assert (await change).key == "default/sample"
    assert file.exists()
    with pytest.raises(Unavailable, match="closed"):
        await find(objects)


async def test_end_does_not_wait_for_a_disk_that_hangs(open_objects, tmp_path, monkeypatch):
    monkeypatch.setattr(file_objects, "CLOSE_TIMEOUT", 0.02)
    objects = open_objects(settle=timedelta())
    with files.lock_directory_waiting(tmp_path):
        change = asyncio.ensure_future(objects.apply(resource_request()))
        await asyncio.sleep(0)
        async with asyncio.timeout(PATIENCE):
            await objects.close()
        assert not change.done()
    assert (await change).key == "default/sample"


# -- time


def test_clock_is_only_asked_where_the_events_are(tmp_path):
    """One that belongs to the event loop, as that of tests does, would fail in another thread."""

    @in_virtual_time
    async def use():
        objects = FileObjects(tmp_path, now)
        await asyncio.sleep(60)
        made = await objects.apply(resource_request())
        assert made.metadata.creation_timestamp == make.T0 + make.MINUTE
        await objects.close()

    use()
