"""The definitions on a real API server: what it takes, what it refuses in which words, and what it shows."""

import json
from pathlib import Path

import msgspec
import pytest
import yaml

import kube_objects
import object_samples
from kubelend.core.errors import InvalidInput, UnexpectedResponse
from kubelend.envtest import servers
from kubelend.kube import resources
from kubelend.wire import broker_objects, crds

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "objects"
RESERVATION = "reservation.yaml"
ADVERTISEMENT = "cluster-advertisement-priced.yaml"
REQUEST = "resource-request.yaml"


@pytest.fixture
def create(kube, namespace):
    """Creates an example with something else at a place of it."""

    def create(example, place="", value=None):
        document = yaml.safe_load((EXAMPLES / example).read_text("utf-8"))
        return kube_objects.send(
            kube, "POST", path_of(document, namespace), changed(document, place, value)
        )

    return create


def path_of(document, namespace, name=""):
    [kind] = [one for one in crds.ALL_KINDS if one.kind == document["kind"]]
    return resources.resource_for(kind).path(namespace, name)


def changed(document, place, value):
    if place:
        *path, last = place.split("/")
        part = document["spec"]
        for step in path:
            part = part[step]
        part[last] = value
    return document


def lines(table):
    """What `kubectl` shows, without the spaces between the columns."""
    return [line.split() for line in table.splitlines()]


def test_definitions_are_accepted_as_they_are(kube):
    found = json.loads(kube.kubectl("get", "crds", "--output=json"))["items"]
    ours = {one["metadata"]["name"]: one for one in found if "fluidos" in one["spec"]["group"]}
    assert len(ours) == len(crds.ALL_KINDS)
    for definition in ours.values():
        conditions = {one["type"]: one["status"] for one in definition["status"]["conditions"]}
        assert conditions["Established"] == conditions["NamesAccepted"] == "True"
        assert "NonStructuralSchema" not in conditions


def test_applying_the_files_again_changes_nothing(kube, rules):
    apply = ("apply", f"--filename={ROOT / 'deploy' / 'crds'}")
    kube.kubectl(*apply)
    said = kube.kubectl(*apply).splitlines()
    assert len(said) == len(crds.ALL_KINDS)
    assert all(line.endswith(" unchanged") for line in said), said


@pytest.mark.timeout(120)
def test_definitions_without_rules_refuse_what_their_patterns_can(lab, tmp_path):
    [cluster] = lab.start("without-rules")
    servers.create_crds(cluster, crds.crd_documents(cel=False).values())
    cluster.kubectl("apply", f"--filename={EXAMPLES}")
    none = yaml.safe_load((EXAMPLES / RESERVATION).read_text("utf-8"))
    none["spec"]["requestedResources"]["cpu"] = "0"
    refused = saved({RESERVATION: none}, tmp_path / "refused")
    with pytest.raises(
        UnexpectedResponse, match=r"spec.requestedResources.cpu in body should match"
    ):
        cluster.kubectl("apply", f"--filename={refused}")
    cluster.kill()


def saved(documents, directory):
    directory.mkdir()
    for name, document in documents.items():
        (directory / name).write_text(yaml.safe_dump(document), "utf-8")
    return directory


def test_all_examples_apply_as_they_are(kube, namespace):
    said = kube.kubectl("apply", f"--namespace={namespace}", f"--filename={EXAMPLES}")
    assert len(said.splitlines()) == len(list(EXAMPLES.glob("*.yaml")))
    kube.kubectl("apply", f"--namespace={namespace}", f"--filename={EXAMPLES}")
    listed = kube.kubectl("get", "kubelend", f"--namespace={namespace}", "--output=json")
    items = json.loads(listed)["items"]  # one word lists all kinds
    assert len(items) == len(list(EXAMPLES.glob("*.yaml")))
    assert {one["metadata"]["generation"] for one in items} == {1}


def test_status_that_a_user_applies_is_ignored(create):
    assert "status" in yaml.safe_load((EXAMPLES / RESERVATION).read_text("utf-8"))
    assert "status" not in create(RESERVATION)


CPU, EXTENDED = "requestedResources/cpu", "requestedResources/extended"
NOT_CPU = "cpu must be a quantity above zero, for example 500m"
NOT_MEMORY = "memory must be a quantity above zero, for example 256Mi"
IN_OWN_FIELDS = "cpu, memory, gpu and storage must be set in their own fields"
NOT_DURATION = "must be a duration above zero, for example 1h30m"
MANY = {f"label-{number}": "" for number in range(65)}
LONG = {"a" * 318: ""}

BAD = {
    "negative cpu": (RESERVATION, CPU, "-1", NOT_CPU),
    "no memory": (RESERVATION, "requestedResources/memory", 0, NOT_MEMORY),
    "garbage": (RESERVATION, CPU, "many", NOT_CPU),
    "garbage of a gpu": (RESERVATION, "requestedResources/gpu", "two", "gpu in body should match"),
    "negative number": (RESERVATION, "requestedResources/gpu", -1, "greater than or equal to 0"),
    "named twice": (RESERVATION, EXTENDED, {"cpu": "1"}, IN_OWN_FIELDS),
    "no time": (RESERVATION, "duration", "0s", NOT_DURATION),
    "no duration": (RESERVATION, "duration", "soon", "must be a duration above zero"),
    "below zero": (RESERVATION, "wait", "-1s", "spec.wait in body should match"),
    "huge priority": (RESERVATION, "priority", 2**31, "less than or equal to 2147483647"),
    "unknown policy": (RESERVATION, "policy", "nice", 'supported values: "", "headroom"'),
    "unknown score": (RESERVATION, "weights", {"beauty": 1}, "must be among headroom, packing"),
    "weights of nothing": (
        RESERVATION,
        "weights",
        {"price": 0},
        "at least one weight must be above",
    ),
    "unknown field": (RESERVATION, "durations", "1h", 'unknown field "spec.durations"'),
    "too many labels": (ADVERTISEMENT, "labels", MANY, "must have at most 64 items"),
    "long label": (ADVERTISEMENT, "labels", LONG, "names must have at most 317 characters"),
    "negative capacity": (
        ADVERTISEMENT,
        "resources/capacity/cpu",
        "-4",
        "cpu must not be negative",
    ),
    "nothing of memory": (ADVERTISEMENT, "resources/capacity", {"cpu": "4"}, "memory: Required"),
    "price in words": (ADVERTISEMENT, "cost/cpuCost", "cheap", "cpuCost in body should match"),
    "time in words": (ADVERTISEMENT, "timestamp", "today", "must be of type date-time"),
    "requested nothing": (
        REQUEST,
        "requestedCPU",
        "0",
        "requestedCPU must be a quantity above zero",
    ),
}


@pytest.mark.parametrize("example, place, value, words", BAD.values(), ids=BAD)
@pytest.mark.usefixtures("rules")
def test_invalid_fields_are_rejected_with_a_message(create, example, place, value, words):
    with pytest.raises(InvalidInput) as refused:
        create(example, place, value)
    assert words in str(refused.value)


CHANGES = {
    "the requester": (RESERVATION, "requesterID", "b", "requesterID cannot be changed"),
    "what is reserved": (RESERVATION, CPU, "3", "requestedResources cannot be changed"),
    "whose it is": (ADVERTISEMENT, "clusterID", "b", "clusterID cannot be changed"),
    **{
        name: (RESERVATION, name, value, f"{name} cannot be changed: delete the object and create")
        for name, value in (
            ("duration", "7h"),
            ("priority", 3),
            ("wait", "5m"),
            ("policy", "cost"),
            ("weights", {"price": 1}),
            ("constraints", {"region": "eu"}),
            ("failover", False),
        )
    },
}


@pytest.mark.parametrize("example, place, value, words", CHANGES.values(), ids=CHANGES)
@pytest.mark.usefixtures("rules")
def test_immutable_fields_cannot_be_changed(kube, create, example, place, value, words):
    made = create(example)
    path = path_of(made, made["metadata"]["namespace"], made["metadata"]["name"])
    with pytest.raises(InvalidInput) as refused:
        kube_objects.send(kube, "PUT", path, changed(made, place, value))
    assert words in str(refused.value)


def patched(client, namespace, **spec):
    kind = resources.resource_for(broker_objects.Reservation)
    return client.patch(kind, "my-workload", namespace, {"spec": spec})


async def test_requester_can_be_filled_in_once_and_not_taken_away(
    create, kube_client, namespace, rules
):
    create(RESERVATION, "requesterID", "")
    assert (await patched(kube_client, namespace, requesterID="a")).spec.requester_id == "a"
    with pytest.raises(InvalidInput, match="requesterID cannot be changed"):
        await patched(kube_client, namespace, requesterID=None)


async def test_broker_may_move_a_reservation_to_another_target(create, kube_client, namespace):
    create(RESERVATION)
    for target in ("b", "c", None):
        moved = await patched(kube_client, namespace, targetClusterID=target)
        assert moved.spec.target_cluster_id == (target or "")


async def test_same_value_written_otherwise_is_no_change(create, kube_client, namespace, rules):
    """As clients in Go write it."""
    create(RESERVATION, "duration", "1h")
    same = await patched(kube_client, namespace, duration="1h0m0s", wait="", failover=True)
    assert same.spec.duration == "1h0m0s"
    with pytest.raises(InvalidInput, match="duration cannot be changed"):
        await patched(kube_client, namespace, duration="")


@pytest.mark.parametrize("field", ["duration", "wait", "constraints", "targetClusterID"])
def test_null_is_the_same_as_no_value(create, field):
    assert field not in create(RESERVATION, field)["spec"]


async def test_unknown_phase_is_refused(create, kube_client, namespace):
    create(RESERVATION)
    kind = resources.resource_for(broker_objects.Reservation)
    change = {"status": {"phase": "Lost"}}
    with pytest.raises(InvalidInput, match='supported values: "Pending", "Reserved"'):
        await kube_client.patch(kind, "my-workload", namespace, change, subresource="status")


async def make_whole(client, namespace, sample):
    """Make it in two steps, as the server wants it: the object, then its status."""
    kind = resources.resource_for(type(sample))
    metadata = msgspec.structs.replace(sample.metadata, namespace=namespace)
    made = await client.create(kind, msgspec.structs.replace(sample, metadata=metadata))
    if not hasattr(sample, "status"):
        return made
    status = {"status": msgspec.to_builtins(sample.status)}
    name, namespace = made.metadata.name, made.metadata.namespace
    return await client.patch(kind, name, namespace, status, subresource="status")


SHOWN = {
    "adv": (
        "NAME CLUSTERID ALLOCATABLE-CPU AVAILABLE-CPU ALLOCATABLE-MEM AVAILABLE-MEM PUBLISHED AGE",
        "cluster-advertisement a 500m -1 1Gi 1Gi true",
    ),
    "rreq": ("NAME CPU MEMORY TARGET PHASE AGE", "small 500m 256Mi b Reserved"),
    "rins": ("NAME RESERVATION TARGET CPU MEMORY", "rsv-a-1 rsv-a-1 b 500m 256Mi"),
    "pins": ("NAME RESERVATION REQUESTER CPU MEMORY", "rsv-a-1-provider rsv-a-1 a 500m 256Mi"),
    "cadv": (
        "NAME CLUSTERID AVAILABLE-CPU AVAILABLE-MEMORY SCORE ACTIVE AGE",
        "a-adv a -1 1Gi 66.67 true",
    ),
    "rsv": ("NAME TARGET-CLUSTER CPU MEMORY PHASE AGE", "rsv-a-1 b 500m 1Gi Active"),
    "plr": ("NAME REQUESTER FITTING SUMMARY AGE", "lend-1 a 1 fits"),
    "csess": ("NAME CLUSTERID AGENT AGE", "session a one"),
    "ledg": ("NAME CONTENTS REVISION AGE", f"head head {2**62}"),
}


@pytest.mark.parametrize(
    "short, sample", list(zip(SHOWN, object_samples.ALL, strict=True)), ids=list(SHOWN)
)
async def test_no_field_is_lost_and_columns_show_them(kube, kube_client, namespace, short, sample):
    await make_whole(kube_client, namespace, sample)
    resource, name = resources.resource_for(type(sample)), sample.metadata.name
    found = await kube_client.find(resource, name, namespace)
    for part in {"spec", "status", "contents", "record"} & set(sample.__struct_fields__):
        assert getattr(found, part) == getattr(sample, part)
    headers, row = lines(kube.kubectl("get", short, f"--namespace={namespace}"))
    expected_headers, expected_row = (text.split() for text in SHOWN[short])
    assert headers == expected_headers
    assert row[: len(expected_row)] == expected_row
    assert len(row) == len(headers)
    # Without its finalizer, so that the namespace can be deleted.
    await kube_client.patch(resource, name, namespace, {"metadata": {"finalizers": None}})


def test_numbers_are_shown_as_texts(kube, namespace, create):
    create("cluster-advertisement-gpu.yaml")
    wide = ("get", "cadv", "gpu-farm-adv", f"--namespace={namespace}", "--output=wide")
    headers, row = lines(kube.kubectl(*wide))
    assert {"REGION", "AVAILABLE-GPU", "MESSAGE"} <= set(headers)
    assert row[:4] == ["gpu-farm-adv", "gpu-farm", "52", "210Gi"]
    assert "eu-south-1" in row


def test_explain_shows_the_descriptions(kube):
    said = kube.kubectl("explain", "reservation.spec.targetClusterID")
    assert "If set by the user, only this provider is considered" in " ".join(said.split())
    said = kube.kubectl("explain", "cadv.spec.resources")
    assert "Defaults to capacity." in " ".join(said.split())
