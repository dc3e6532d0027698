"""Objects as files: manifests that people write, and files that the agent writes.

The promises of every store of objects are in tests/contract/test_local_objects.py.
"""

import asyncio
import os
import shutil
from contextlib import aclosing
from datetime import timedelta
from pathlib import Path

import pytest
import yaml
from msgspec.structs import replace
from structlog.testing import capture_logs

import make
from kubelend.agent.ports import Deleted, Listed
from kubelend.core.errors import InvalidInput, InvalidSettings, StoreFailed
from kubelend.sources import file_objects
from kubelend.sources.file_objects import FileObjects
from kubelend.wire.objects import (
    Metadata,
    ResourceRequest,
    ResourceRequestSpec,
    ResourceRequestStatus,
)
from waiting import PATIENCE, until

QUICK = timedelta(milliseconds=5)
KEY = "default/sample"

MANIFEST = """
# two cores for an afternoon
apiVersion: rear.fluidos.eu/v1alpha1
kind: ResourceRequest
metadata:
  name: sample
spec:
  requestedCPU: "2"
  requestedMemory: 1Gi
"""


@pytest.fixture
def open_objects(tmp_path):
    opened: list[FileObjects] = []

    def open_objects():
        for one in opened:
            one.close()
        opened.append(FileObjects(tmp_path, lambda: make.T0, poll=QUICK, settle=QUICK))
        return opened[-1]

    yield open_objects
    for one in opened:
        one.close()


@pytest.fixture
def objects(open_objects):
    return open_objects()


@pytest.fixture
def manifest(objects, tmp_path):
    return tmp_path / "requests" / "default.sample.yaml"


@pytest.fixture
def file(tmp_path):
    return tmp_path / "resourcerequests" / "default.sample.yaml"


def resource_request(name="sample", **metadata):
    return ResourceRequest(Metadata(name, **metadata), ResourceRequestSpec("1", "1Gi"))


async def settled(objects):
    """All ResourceRequests, when each manifest has been found the same twice."""
    objects.scan()
    assert objects.scan()
    return await objects.list(ResourceRequest)


async def created(objects, manifest, text=MANIFEST):
    manifest.write_text(text)
    (found,) = await settled(objects)
    return found


async def next_event(watch):
    async with asyncio.timeout(PATIENCE):
        return await anext(watch)


# -- files that the agent writes


async def test_file_has_the_form_of_a_kubernetes_object_until_it_is_deleted(objects, file):
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
    assert file_objects.read_object(file.parents[1], ResourceRequest, KEY) == stated
    assert [found.name for found in file.parent.iterdir()] == [file.name]
    before = file.stat()
    await objects.apply(resource_request(labels={"team": "a"}))
    await objects.set_status(stated)
    assert file.stat() == before, "an equal object is not written"
    await objects.delete(ResourceRequest, KEY)
    assert not file.exists()
    assert file_objects.read_object(file.parents[1], ResourceRequest, KEY) is None


async def test_failed_write_changes_nothing_and_can_be_retried(objects, file, tmp_path):
    made = await objects.apply(resource_request())
    aside = file.parent.rename(tmp_path / "aside")
    changed = replace(resource_request(), spec=replace(resource_request().spec, renew=True))
    with pytest.raises(StoreFailed, match="resourcerequests") as failed:
        await objects.apply(changed)
    assert failed.value.retryable
    assert await objects.find(ResourceRequest, KEY) == made
    aside.rename(file.parent)
    assert (await objects.apply(changed)).metadata.generation == 2


async def test_name_too_long_for_a_file_is_rejected(objects):
    with pytest.raises(InvalidInput, match="too long"):
        await objects.apply(resource_request("a" * 250))


# -- opening


def test_directory_that_cannot_be_created_is_an_invalid_setting(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidSettings, match="cannot be created"):
        FileObjects(tmp_path / "file" / "objects", lambda: make.T0)


def test_one_process_at_a_time_uses_a_directory(objects, open_objects, tmp_path):
    with pytest.raises(InvalidSettings, match="is locked by another process"):
        FileObjects(tmp_path, lambda: make.T0)
    open_objects()


@pytest.mark.parametrize(
    "text, problem",
    [
        ("spec: [", "default.sample.yaml: not valid YAML"),
        (MANIFEST, "default.sample.yaml: not written by an agent; move manifests to .*requests"),
    ],
    ids=["damaged", "manifest"],
)
def test_file_that_the_agent_has_not_written_is_an_error_at_the_start(
    tmp_path, file, text, problem
):
    file.parent.mkdir()
    file.write_text(text)
    with pytest.raises(InvalidSettings, match=problem):
        FileObjects(tmp_path, lambda: make.T0)


async def test_unknown_fields_of_a_newer_version_and_temporary_files_are_ignored(
    objects, open_objects, file
):
    made = await objects.apply(resource_request())
    shutil.copy(file, file.with_name(f".{file.name}.new"))
    file.write_text(file.read_text().replace("spec:", "spec:\n  fromTheFuture: 1"))
    assert await open_objects().list(ResourceRequest) == [made]


# -- manifests that people write


async def test_manifest_creates_an_object_and_stays_as_it_is(objects, manifest, file):
    found = await created(objects, manifest, MANIFEST + "status: {phase: Active}\n")
    assert found.spec == ResourceRequestSpec("2", "1Gi")
    assert found.metadata.uid
    assert (found.metadata.generation, found.metadata.creation_timestamp) == (1, make.T0)
    assert found.status == ResourceRequestStatus()
    assert manifest.read_text().startswith(MANIFEST)
    assert file_objects.read_object(file.parents[1], ResourceRequest, KEY) == found


async def test_watch_receives_what_happens_to_manifests(objects, manifest):
    async with aclosing(objects.watch(ResourceRequest)) as watch:
        assert await next_event(watch) == Listed([])
        manifest.write_text(MANIFEST)
        assert (await next_event(watch)).spec.requested_cpu == "2"
        manifest.write_text(MANIFEST + "  renew: true\n")
        assert (await next_event(watch)).spec.renew
        manifest.unlink()
        assert isinstance(await next_event(watch), Deleted)


@pytest.mark.parametrize("is_running", [True, False], ids=["running", "restarted"])
@pytest.mark.parametrize(
    "old, new, generation",
    [('"2"', '"2"\n  renew: true', 2), ("name: sample", "name: sample\n  labels: {team: b}", 1)],
    ids=["spec", "labels"],
)
async def test_edited_manifest_updates_the_object(
    objects, open_objects, manifest, is_running, old, new, generation
):
    made = await created(objects, manifest)
    marked = replace(made, metadata=replace(made.metadata, finalizers=("x",)))
    stated = await objects.set_status(
        replace(await objects.apply(marked), status=ResourceRequestStatus(phase="Reserved"))
    )
    edited = await created(
        objects if is_running else open_objects(), manifest, MANIFEST.replace(old, new)
    )
    assert (edited.spec, edited.metadata.labels) != (stated.spec, stated.metadata.labels)
    assert edited.metadata.generation == generation
    assert edited.metadata.resource_version != stated.metadata.resource_version
    assert (edited.metadata.uid, edited.status) == (made.metadata.uid, stated.status)
    assert edited.metadata.finalizers == ("x",)


@pytest.mark.parametrize("is_running", [True, False], ids=["running", "restarted"])
async def test_removed_manifest_deletes_the_object_when_its_finalizers_are_gone(
    objects, open_objects, manifest, file, is_running
):
    made = await created(objects, manifest)
    await objects.apply(replace(made, metadata=replace(made.metadata, finalizers=("x",))))
    manifest.unlink()
    objects = objects if is_running else open_objects()
    (going,) = await settled(objects)
    assert going.metadata.deletion_timestamp == make.T0
    assert going.metadata.uid == made.metadata.uid
    manifest.write_text(MANIFEST.replace('"2"', '"3"'))
    assert await settled(objects) == [going]
    await objects.apply(replace(going, metadata=replace(going.metadata, finalizers=())))
    assert not file.exists()
    (again,) = await settled(objects)
    assert again.metadata.uid != made.metadata.uid


async def test_manifest_is_not_read_while_it_changes(objects, manifest):
    manifest.write_text("apiVersion: ")
    assert not objects.scan()
    manifest.write_text(MANIFEST)
    assert not objects.scan()
    assert await objects.list(ResourceRequest) == []
    assert objects.problem == ""
    assert objects.scan()
    assert len(await objects.list(ResourceRequest)) == 1


async def test_manifest_that_an_editor_replaces_is_not_deleted(objects, manifest):
    made = await created(objects, manifest)
    aside = manifest.rename(manifest.with_name("default.sample.yaml~"))
    assert not objects.scan()
    aside.rename(manifest)
    assert await settled(objects) == [made]


async def test_missing_directory_deletes_nothing_and_is_waited_for(objects, manifest, tmp_path):
    made = await created(objects, manifest)
    async with aclosing(objects.watch(ResourceRequest)) as watch:
        assert await next_event(watch) == Listed([made])
        event = asyncio.ensure_future(anext(watch))
        aside = manifest.parent.rename(tmp_path / "aside")
        with capture_logs() as logs:
            await until(lambda: "requests cannot be listed" in objects.problem)
            await asyncio.sleep(5 * QUICK.total_seconds())
        assert [line["event"] for line in logs] == ["Scan of object files failed, will retry"]
        aside.rename(manifest.parent)
        await until(lambda: objects.problem == "")
        assert not event.done()
        manifest.unlink()
        async with asyncio.timeout(PATIENCE):
            assert isinstance(await event, Deleted)


async def test_object_that_could_not_be_written_is_written_by_a_later_scan(
    objects, manifest, file, tmp_path
):
    aside = file.parent.rename(tmp_path / "aside")
    manifest.write_text(MANIFEST)
    objects.scan()
    with pytest.raises(StoreFailed):
        objects.scan()
    aside.rename(file.parent)
    assert len(await settled(objects)) == 1
    file.parent.rename(aside)
    manifest.unlink()
    objects.scan()
    # Without finalizers its file is removed, and is already gone.
    aside.rename(file.parent)
    assert await settled(objects) == []


async def test_times_in_annotations_stay_texts(objects, manifest):
    text = MANIFEST.replace("name: sample", "name: sample\n  annotations: {since: 2026-01-01}")
    assert (await created(objects, manifest, text)).metadata.annotations == {"since": "2026-01-01"}


# -- invalid manifests


INVALID = {
    "empty": ("", "not an object"),
    "no YAML": ("a: b: c", "not valid YAML: line 1, column 5"),
    "a text": ("\xff", "not an object"),
    "no text": (b"\xff\xfe\xff", "not valid YAML"),
    "alias": ("a: &x [1]\nb: *x", "alias"),
    "too deep": ("[" * 200_000, "nested"),
    "too large": ("a" * (2**20 + 1), "bytes"),
    "too large a number": ("a: " + "1" * 5000, "not valid YAML"),
    "version": (MANIFEST.replace("v1alpha1", "v1"), "apiVersion"),
    "kind": (MANIFEST.replace("kind: R", "kind: X"), "kind"),
    "number": (MANIFEST.replace('"2"', "2.5"), "spec.requestedCPU: must be a string"),
    "missing": (MANIFEST.replace("requestedM", "m"), "spec.requestedMemory: is required"),
    "unknown": (MANIFEST + "  durration: 1h\n", "spec.durration: unknown field"),
    "unknown inside": (MANIFEST + "  constraints: {x: y}\n", "spec.constraints.x: unknown field"),
    "name": (MANIFEST.replace("sample", "a"), "rename the file to default.a.yaml"),
    "path": (MANIFEST.replace("sample", "../x"), "not a valid object name"),
}


@pytest.mark.parametrize("text, problem", INVALID.values(), ids=INVALID)
async def test_invalid_manifest_is_reported_and_ignored(objects, manifest, text, problem):
    valid = manifest.with_name("default.valid.yaml")
    kept = await created(objects, valid, MANIFEST.replace("sample", "valid"))
    manifest.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert await settled(objects) == [kept]
    assert "requests/default.sample.yaml: " in objects.problem
    assert problem in objects.problem
    manifest.unlink()
    assert await settled(objects) == [kept]
    assert objects.problem == ""


@pytest.mark.parametrize("is_running", [True, False], ids=["running", "restarted"])
async def test_object_keeps_its_state_while_its_manifest_is_invalid(
    objects, open_objects, manifest, is_running
):
    made = await created(objects, manifest)
    manifest.write_text("spec: [")
    objects = objects if is_running else open_objects()
    assert await settled(objects) == [made]
    assert "default.sample.yaml: not valid YAML" in objects.problem
    manifest.write_text(MANIFEST)
    assert await settled(objects) == [made]
    assert objects.problem == ""


async def test_file_that_is_almost_a_manifest_is_reported(objects, manifest):
    manifest.with_name("default.sample.yml").write_text(MANIFEST)
    manifest.with_name("notes.txt").write_text("hello")
    manifest.with_name("default.dir.yaml").mkdir()
    os.mkfifo(manifest.with_name("default.pipe.yaml"))
    manifest.with_name("default.dangling.yaml").symlink_to(Path("nowhere"))
    assert await settled(objects) == []
    assert "default.sample.yml: ignored" in objects.problem
    assert "default.dir.yaml: not a regular file" in objects.problem
    assert "default.pipe.yaml: not a regular file" in objects.problem
    assert "notes" not in objects.problem
    assert "dangling" not in objects.problem


async def test_of_many_problems_some_are_listed_and_the_others_counted(objects, manifest):
    for number in range(10):
        manifest.with_name(f"default.{number}.yaml").write_text("wrong: [")
    await settled(objects)
    assert objects.problem.count("requests/default.") == 3
    assert objects.problem.endswith("; and 7 more")
