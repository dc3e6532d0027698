"""Files that are wrong, half-written, or written by two at a time."""

import asyncio
import os
import subprocess
import sys
import textwrap
from contextlib import aclosing
from datetime import timedelta

import pytest
from msgspec.structs import replace

import make
from kubelend.agent.ports import Deleted, Listed
from kubelend.core.errors import Conflict, InvalidInput, InvalidSettings, Unavailable
from kubelend.kits import files
from kubelend.sources import file_objects
from kubelend.sources.file_objects import FileObjects, ObjectDirectory
from kubelend.wire.objects import (
    Metadata,
    ResourceRequest,
    ResourceRequestSpec,
    ResourceRequestStatus,
)
from waiting import PATIENCE

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


# -- files that are not right


@pytest.mark.parametrize(
    "name, text, problem",
    [
        pytest.param("a", "", "not an object", id="empty"),
        pytest.param("a", "a: b: c", "not valid YAML: line 1, column 5", id="no YAML"),
        pytest.param("a", "\xff", "not an object", id="a text"),
        pytest.param("a", b"\xff\xfe\xff", "not valid YAML", id="no text"),
        pytest.param("a", "a: &x [1]\nb: *x", "alias", id="alias"),
        pytest.param("a", "[" * 200_000, "nested", id="too deep"),
        pytest.param("a", "a" * (2**20 + 1), "bytes", id="too large"),
        pytest.param("a", "a: " + "1" * 5000, "not valid YAML", id="too large a number"),
        pytest.param("sample", BY_HAND.replace("v1alpha1", "v1"), "apiVersion", id="version"),
        pytest.param("sample", BY_HAND.replace("kind: R", "kind: X"), "kind", id="kind"),
        pytest.param(
            "sample",
            BY_HAND.replace('"2"', "2"),
            "spec.requestedCPU: must be a string",
            id="number",
        ),
        pytest.param(
            "sample",
            BY_HAND.replace("requestedMemory", "memory"),
            "spec.requestedMemory: is required",
            id="missing",
        ),
        pytest.param(
            "sample", BY_HAND + "  durration: 1h\n", "spec.durration: unknown field", id="unknown"
        ),
        pytest.param(
            "sample",
            BY_HAND + "  constraints: {regions: x}\n",
            "spec.constraints.regions: unknown field",
            id="unknown inside",
        ),
        pytest.param("other", BY_HAND, "rename the file to default.sample.yaml", id="name"),
        pytest.param(
            "sample", BY_HAND.replace("sample", "../x"), "not a valid object name", id="path"
        ),
    ],
)
async def test_file_that_is_wrong_is_reported_and_left_alone(
    objects, tmp_path, file, name, text, problem
):
    kept = await objects.apply(replace(resource_request(), metadata=Metadata("kept")))
    wrong = file.with_name(f"default.{name}.yaml")
    content = text if isinstance(text, bytes) else text.encode()
    wrong.write_bytes(content)
    assert await objects.list(ResourceRequest) == [kept]
    assert f"resourcerequests/{wrong.name}: " in objects.problem
    assert problem in objects.problem
    assert wrong.read_bytes() == content
    wrong.unlink()
    assert await objects.list(ResourceRequest) == [kept]
    assert objects.problem == ""


async def test_name_that_is_almost_right_is_reported(objects, file):
    file.with_name("default.sample.yml").write_text(BY_HAND)
    file.with_name("notes.txt").write_text("hello")
    file.with_name("default.dir.yaml").mkdir()
    os.mkfifo(file.with_name("default.pipe.yaml"))
    assert await objects.list(ResourceRequest) == []
    assert "default.sample.yml: ignored" in objects.problem
    assert "default.dir.yaml: not a regular file" in objects.problem
    assert "default.pipe.yaml: not a regular file" in objects.problem
    assert "notes" not in objects.problem


async def test_of_many_problems_some_are_named_and_the_others_counted(objects, file):
    for number in range(10):
        file.with_name(f"default.{number}.yaml").write_text("wrong: [")
    await objects.list(ResourceRequest)
    assert objects.problem.count("resourcerequests/default.") == file_objects.MAX_ERRORS_LISTED
    assert objects.problem.endswith("; and 7 more")


async def test_problem_is_told_without_a_look_at_the_disk(objects, file):
    file.write_text("wrong: [")
    await objects.list(ResourceRequest)
    told = objects.problem
    assert "default.sample.yaml" in told
    file.unlink()
    assert objects.problem == told
    await objects.list(ResourceRequest)
    assert objects.problem == ""


def test_problems_that_were_asked_for_are_not_changed_by_the_next_look(tmp_path, file):
    """Another thread may be reading them."""
    folder = ObjectDirectory(tmp_path, make.T0, timedelta())
    seen = [folder.problems]
    for text in ("wrong: [", "", BY_HAND):
        file.write_text(text)
        folder.scan(ResourceRequest)
        seen.append(folder.problems)
    assert [len(problems) for problems in seen] == [0, 1, 1, 0]
    assert len({tuple(problems.values()) for problems in seen[1:3]}) == 2


async def test_each_problem_is_logged_once(objects, file, capsys):
    file.write_text("wrong: [")
    for _ in range(3):
        await objects.list(ResourceRequest)
    file.write_text("wrong: [")
    await objects.list(ResourceRequest)
    assert capsys.readouterr().out.count("Ignoring invalid object file") == 1
    file.write_text(BY_HAND.replace('"2"', "2"))
    await objects.list(ResourceRequest)
    assert capsys.readouterr().out.count("requestedCPU") == 1


async def test_object_stays_as_it_was_while_its_file_is_wrong(objects, file):
    made = await objects.apply(resource_request())
    right = file.read_text()
    file.write_text("spec: [")
    assert await find(objects) == made
    for change in (
        objects.apply(resource_request()),
        objects.set_status(made),
        objects.delete(ResourceRequest, made.key),
    ):
        with pytest.raises(Unavailable, match=r"default\.sample\.yaml: not valid YAML"):
            await change
    assert file.read_text() == "spec: ["
    file.write_text(right)
    assert await find(objects) == made
    assert objects.problem == ""


async def test_unknown_fields_of_a_newer_store_are_no_mistake(objects, open_objects, file):
    made = await objects.apply(resource_request())
    edit(file, "spec:", "spec:\n  fromTheFuture: 1")
    assert await open_objects(settle=timedelta()).list(ResourceRequest) == [made]


async def test_name_too_long_for_a_file_is_refused(objects):
    with pytest.raises(InvalidInput, match="too long"):
        await objects.apply(replace(resource_request(), metadata=Metadata("a" * 250)))


async def test_directory_that_cannot_be_made_is_a_wrong_setting(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidSettings, match="cannot be created"):
        FileObjects(tmp_path / "file" / "objects", lambda: make.T0)


# -- half-written files


async def test_file_is_not_read_before_it_rests(open_objects, file):
    objects = open_objects(settle=timedelta(hours=1))
    assert await objects.list(ResourceRequest) == []
    file.write_text(BY_HAND)
    assert await objects.list(ResourceRequest) == []
    assert await find(objects) is None
    assert objects.problem == ""
    assert file.read_text() == BY_HAND


async def test_first_look_waits_for_files_to_rest(open_objects, file):
    file.write_text(BY_HAND)
    objects = open_objects(settle=timedelta(milliseconds=100))
    assert len(await objects.list(ResourceRequest)) == 1


async def test_change_waits_for_an_edited_file_to_rest(open_objects, file):
    objects = open_objects(settle=timedelta(milliseconds=100))
    await objects.apply(resource_request())
    edit(file, "requestedCPU: '1'", "requestedCPU: '4'")
    stated = await objects.set_status(
        replace(resource_request(), status=ResourceRequestStatus(phase="Pending"))
    )
    assert stated.spec.requested_cpu == "4"


async def test_file_that_never_rests_keeps_no_other_waiting(open_objects, file, monkeypatch):
    monkeypatch.setattr(file_objects, "BUSY_TIMEOUT", 3600.0)
    objects = open_objects(settle=timedelta(hours=1))
    await objects.list(ResourceRequest)
    made = await objects.apply(resource_request())
    edit(file, "requestedCPU: '1'", "requestedCPU: '4'")
    stuck = [
        asyncio.ensure_future(change)
        for change in (
            objects.apply(resource_request()),
            objects.set_status(replace(made, status=ResourceRequestStatus(phase="Pending"))),
            objects.delete(ResourceRequest, made.key),
        )
    ]
    for number in range(20):
        await objects.apply(replace(resource_request(), metadata=Metadata(f"other-{number}")))
    assert not any(one.done() for one in stuck)
    with files.lock_directory_waiting(file.parent.parent):
        pass
    for one in stuck:
        one.cancel()
    await asyncio.gather(*stuck, return_exceptions=True)


async def test_change_of_a_file_that_never_rests_is_to_be_tried_again(
    open_objects, file, monkeypatch
):
    monkeypatch.setattr(file_objects, "BUSY_TIMEOUT", 0.02)
    objects = open_objects(settle=timedelta(hours=1))
    await objects.list(ResourceRequest)
    await objects.apply(resource_request())
    edit(file, "requestedCPU: '1'", "requestedCPU: '4'")
    with pytest.raises(Unavailable, match=r"default\.sample\.yaml is being written") as refused:
        await objects.apply(resource_request())
    assert refused.value.retryable
    assert "requestedCPU: '4'" in file.read_text()


async def test_first_look_at_a_file_that_never_rests_keeps_no_other_waiting(
    open_objects, file, monkeypatch
):
    monkeypatch.setattr(file_objects, "FIRST_SCAN_TIMEOUT", 3600.0)
    file.write_text(BY_HAND)
    objects = open_objects(settle=timedelta(hours=1))
    first = asyncio.ensure_future(objects.list(ResourceRequest))
    await asyncio.sleep(0)
    await objects.apply(replace(resource_request(), metadata=Metadata("other")))
    assert not first.done()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)


@pytest.mark.timeout(30)
async def test_readers_never_see_half_a_file(objects, file):
    """Another process reads as fast as it can while the object is written."""
    await objects.apply(resource_request())
    program = textwrap.dedent("""
        import pathlib, sys, yaml
        file, reads = pathlib.Path(sys.argv[1]), 0
        print("reading", flush=True)
        while True:
            found = yaml.load(file.read_bytes(), yaml.CSafeLoader)
            assert found["status"].get("message", "").count("x") in (0, 20000)
            reads += 1
            if "stop" in found["status"].get("reason", ""):
                sys.exit(0 if reads > 5 else 1)
    """)
    await objects.set_status(
        replace(resource_request(), status=ResourceRequestStatus(phase="Pending"))
    )
    reader = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, file, stdout=subprocess.PIPE
    )
    try:
        assert reader.stdout is not None
        assert await reader.stdout.readline() == b"reading\n"
        for number in range(100):
            status = ResourceRequestStatus(message="x" * 20000, phase=str(number))
            await objects.set_status(replace(resource_request(), status=status))
        await objects.set_status(
            replace(resource_request(), status=ResourceRequestStatus(reason="stop"))
        )
        async with asyncio.timeout(PATIENCE):
            assert await reader.wait() == 0
    finally:
        if reader.returncode is None:
            reader.kill()
            await reader.wait()


# -- more than one


async def test_two_stores_of_one_directory_lose_no_change(open_objects):
    one, other = open_objects(settle=timedelta()), open_objects(settle=timedelta())
    await one.apply(resource_request())

    async def change_specs():
        for number in range(2, 22):
            await one.apply(
                replace(resource_request(), spec=ResourceRequestSpec(str(number), "1Gi"))
            )

    async def change_statuses():
        for number in range(20):
            status = ResourceRequestStatus(message=str(number))
            await other.set_status(replace(resource_request(), status=status))

    await asyncio.gather(change_specs(), change_statuses())
    found = await find(one)
    assert (found.spec.requested_cpu, found.status.message) == ("21", "19")
    assert found.metadata.generation == 21
    assert found.metadata.resource_version.startswith("41-")


async def test_change_by_another_store_is_taken_as_it_is(open_objects):
    one, other = open_objects(settle=timedelta()), open_objects(settle=timedelta())
    made = await one.apply(resource_request())
    assert await find(other) == made
    changed = await one.apply(replace(resource_request(), spec=ResourceRequestSpec("8", "1Gi")))
    assert await find(other) == changed
    await one.delete(ResourceRequest, made.key)
    again = await one.apply(resource_request())
    with pytest.raises(Conflict):
        await other.apply(made)
    assert await find(other) == again


async def test_object_that_another_store_made_anew_is_told_as_gone_and_new(open_objects):
    one, other = open_objects(settle=timedelta()), open_objects(settle=timedelta())
    made = await one.apply(resource_request())
    async with aclosing(other.watch(ResourceRequest)) as watch:
        assert await next_event(watch) == Listed([made])
        await one.delete(ResourceRequest, made.key)
        again = await one.apply(resource_request())
        gone = await next_event(watch)
        assert isinstance(gone, Deleted)
        assert isinstance(gone.last_state, ResourceRequest)
        assert gone.last_state.metadata.uid == made.metadata.uid
        assert await next_event(watch) == again


async def test_cancelled_change_is_still_told_to_watches(objects):
    async with aclosing(objects.watch(ResourceRequest)) as watch:
        await next_event(watch)
        change = asyncio.ensure_future(objects.apply(resource_request()))
        await asyncio.sleep(0)
        change.cancel()
        assert (await next_event(watch)).key == "default/sample"
        assert change.cancelled()
