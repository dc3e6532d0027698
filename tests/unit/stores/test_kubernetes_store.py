"""The Kubernetes store without an API server: URL, head, projection of records to objects."""

from datetime import timedelta
from random import Random
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

import make
from kubelend.core.audit_log import AuditLine, ChainHead
from kubelend.core.errors import InvalidSettings
from kubelend.core.lifecycle import Phase
from kubelend.core.models import ClusterId
from kubelend.kube.config import KubeConfig
from kubelend.stores import batch, factory
from kubelend.stores.batch import CorruptRecord
from kubelend.stores.factory import KubernetesStoreUrl
from kubelend.stores.kubernetes import head, objects, projection
from kubelend.stores.kubernetes.head import (
    AuditPosition,
    ChainedLine,
    CommitChanges,
    HeadState,
    PackedChanges,
    PendingWrite,
    RecordWrite,
)
from kubelend.stores.kubernetes.objects import StoredObject, StoredStatus
from kubelend.wire.objects import Metadata

# -- URL

ACCESS = KubeConfig(server="https://127.0.0.1:1", namespace="of-the-context")


@pytest.mark.parametrize(
    "rest, url",
    [
        ("", KubernetesStoreUrl()),
        ("///etc/kube/config", KubernetesStoreUrl("/etc/kube/config")),
        ("local/config", KubernetesStoreUrl("local/config")),
        ("?namespace=brokers", KubernetesStoreUrl(namespace="brokers")),
        ("///k?context=hub&namespace=n", KubernetesStoreUrl("/k", "hub", "n")),
        ("?context=arn:aws:eks/x", KubernetesStoreUrl(context="arn:aws:eks/x")),
        ("//host/path", "three slashes"),
        ("?name=x", "use context and namespace"),
        ("?namespace=", "not a namespace name"),
        ("?namespace=A_b", "not a namespace name"),
    ],
)
def test_every_part_of_the_url_is_optional_and_must_be_valid(rest, url):
    if isinstance(url, str):
        with pytest.raises(InvalidSettings, match=url):
            factory.parse_kubernetes_url(rest)
    else:
        assert factory.parse_kubernetes_url(rest) == url


@pytest.mark.parametrize(
    "url, default, pod, namespace",
    [
        (KubernetesStoreUrl(namespace="named"), "default", "pod", "named"),
        (KubernetesStoreUrl(), "default", "pod", "default"),
        (KubernetesStoreUrl(), "", "pod", "pod"),
        (KubernetesStoreUrl(), "", "", "of-the-context"),
    ],
)
def test_most_explicit_namespace_is_used(monkeypatch, url, default, pod, namespace):
    monkeypatch.setenv("POD_NAMESPACE", pod)
    assert url.namespace_for(ACCESS, default) == namespace


def test_missing_kubeconfig_is_reported_before_anything_is_opened(tmp_path):
    for use in (factory.check_store_url, factory.open_store, factory.open_readonly):
        with pytest.raises(InvalidSettings, match="missing"):
            use(f"kubernetes://{tmp_path}/none")


# -- head


def write(number, size=10):
    text = b'{"a": "' + b"x" * size + b'"}'
    return RecordWrite("cluster", f"c{number}", msgspec.Raw(text))


def chained(number, size=10):
    return ChainedLine.of(
        AuditLine(number, b'{"n":  ' + b"1" * size + b"}", bytes([number % 256] * 32))
    )


STATE = HeadState(
    epoch=3,
    sequence=7,
    revision=2**53 + 1,
    end=AuditPosition.of(ChainHead(2, b"\1" * 32)),
    lines=(chained(1), chained(2)),
    changes=(PackedChanges.of(CommitChanges(7, (write(1), RecordWrite("token", "t")))),),
)


def test_state_is_read_as_it_was_written():
    found = head.head_object(STATE, "ns", "5")
    read = head.state_from_object(found)
    assert read == STATE
    [commit] = read.pending
    assert commit.writes[0].text == write(1).text  # byte by byte
    assert read.lines[0].line == chained(1).line
    assert (found.metadata.name, found.metadata.namespace) == ("head", "ns")
    assert (found.metadata.resource_version, found.contents) == ("5", "head")
    assert found.record.revision == 7


@pytest.mark.parametrize(
    "edit", [{"data": "{}"}, {"checksum": "1"}, {"data": "no JSON", "checksum": "1"}]
)
def test_edited_head_is_corrupt(edit):
    found = head.head_object(STATE, "ns")
    edited = replace(found, record=replace(found.record, **edit))
    with pytest.raises(CorruptRecord, match="ns/head"):
        head.state_from_object(edited)


def test_small_commit_is_in_the_head_alone():
    assert head.split_oversized(STATE, "ns", "5") == (STATE, [])


def noise(number, size):
    """What cannot be compressed."""
    text = b'"%s"' % Random(number).randbytes(size // 2).hex().encode()
    return RecordWrite("cluster", f"c{number}", msgspec.Raw(text))


def test_oversized_commit_is_split_into_objects_that_the_head_names():
    changes = CommitChanges(8, tuple(noise(number, 200_000) for number in range(20)))
    earlier, packed = STATE.changes[0], PackedChanges.of(changes)
    state, parts = head.split_oversized(replace(STATE, changes=(earlier, packed)), "ns", "5")
    names = tuple(f"pending-5-{number}" for number in range(len(parts)))
    assert (len(parts) > 1, state.parts) == (True, names)
    written = head.state_from_object(head.head_object(state, "ns"))
    assert written.changes == (earlier, PackedChanges("", names))
    by_name = {part.metadata.name: part for part in parts}
    assert head.with_parts(written.changes[1], by_name).unpack() == changes
    for part in parts:
        assert len(msgspec.json.encode(part)) < 1_000_000


def test_size_includes_json_escapes():
    lines = (ChainedLine(1, msgspec.Raw(b'"' + b'\\"' * 300_000 + b'"'), "d"),)
    _, parts = head.split_oversized(replace(STATE, lines=lines), "ns", "5")
    assert parts


def pending(*commits):
    return head.pending_writes(
        CommitChanges(number, writes) for number, writes in enumerate(commits)
    )


def test_record_that_changed_twice_is_written_once():
    later = replace(write(1, 20), existed_before=True)
    assert pending((write(1), write(2)), (later,)) == [
        PendingWrite(0, write(2)),
        PendingWrite(1, write(1, 20)),
    ]
    gone = RecordWrite("cluster", "c1")
    assert pending((write(1),), (gone,)) == [PendingWrite(1, gone)]
    assert pending((gone,), (write(1),)) == [PendingWrite(1, write(1))]


def test_archived_record_keeps_the_text_that_is_not_written_yet():
    archived = RecordWrite("cluster", "c1", finished_at=make.T0)
    assert pending((write(1),), (archived,)) == [
        PendingWrite(1, replace(write(1), finished_at=make.T0))
    ]
    assert pending((archived,)) == [PendingWrite(0, archived)]


def test_lines_stay_in_the_head_up_to_a_size():
    few = tuple(chained(number) for number in range(1, 6))
    assert head.split_log_tail(HeadState(), few) == (few, ())
    many = tuple(chained(number, 1000) for number in range(1, 60))
    assert head.split_log_tail(HeadState(lines=few), many) == ((), few + many)


# -- projection

CLUSTER = make.cluster(
    "berlin",
    "cpu=4,memory=8Gi,gpu=1",
    allocated="cpu=1500m",
    labels={"tier": "gold"},
    valid_for=timedelta(seconds=90),
    cordon="maintenance",
)
RESERVATION = make.reservation(
    "rsv-1",
    make.request(
        "cpu=500m,memory=1Gi", "paris", wait=make.MINUTE, max_price="0.5", excluded=("x",)
    ),
    phase=Phase.RESERVED,
    target=ClusterId("berlin"),
    reserved_at=make.T0,
)


def test_dns_names_are_object_names_and_others_are_hashed_without_collisions():
    assert objects.record_object_name("cluster", "berlin") == "berlin-adv"
    assert objects.record_object_name("reservation", "rsv-paris-1") == "rsv-paris-1"
    assert objects.record_object_name("token", "abc") == "token-abc"
    assert objects.record_object_name("limits", "a.b") == "limits-a.b"
    ids = ["", "A", "a_b", "a/b", "-a", "a-", "a..b", "é", "a" * 241, "\ud800", "a\n"]
    ids.append(objects.record_object_name("reservation", "A"))
    names = {objects.record_object_name("reservation", found) for found in ids}
    assert len(names) == len(ids)
    assert all(name.startswith("hashed-") and len(name) < 60 for name in names)


def test_specs_show_offer_and_request():
    offered: Any = projection.cluster_spec(CLUSTER)
    assert offered["clusterID"] == "berlin"
    assert offered["resources"]["capacity"] == {"cpu": "4", "memory": "8Gi", "gpu": "1"}
    assert (offered["labels"], offered["validFor"]) == ({"tier": "gold"}, "1m30s")
    asked = projection.reservation_spec(RESERVATION)
    assert asked["requestedResources"] == {"cpu": "500m", "memory": "1Gi"}
    assert (asked["requesterID"], asked["targetClusterID"]) == ("paris", "berlin")
    assert asked["constraints"] == {"exclude": ["x"], "maxPricePerHour": "0.5"}
    assert asked["wait"] == "1m0s"


def test_status_clears_absent_fields_and_has_no_conditions():
    status = projection.reservation_status(RESERVATION)
    assert (status["phase"], status["reservedAt"]) == ("Reserved", "2026-01-01T12:00:00Z")
    assert status["finishedAt"] is None
    assert "conditions" not in status
    cluster = projection.cluster_status(CLUSTER)
    assert (cluster["active"], cluster["cordonReason"]) == (False, "maintenance")
    assert not cluster.keys() & {"conditions", "score", "reservations"}


def test_minimal_form_has_the_required_fields_only():
    spec: Any
    spec, status, _ = projection.minimal(projection.project(CLUSTER))
    assert spec.keys() == {"clusterID", "resources"}
    assert spec["resources"].keys() == {"capacity", "allocated", "available"}
    assert status == {"phase": "Active"}
    asked = projection.minimal(projection.project(RESERVATION)).spec
    assert asked.keys() == {"requestedResources", "requesterID", "targetClusterID"}


def stored(found, name="rsv-1", text=None, **edited):
    _, _, encoded = batch.encode_record(found)
    content = encoded if text is None else text
    whole = projection.stored_record("reservation", found.id, content, 3)
    return StoredObject(Metadata(name), {}, StoredStatus(replace(whole, **edited)))


LESS = batch.encode_record(RESERVATION)[2].decode().replace('"cpu":500', '"cpu":100')


@pytest.mark.parametrize(
    "found, why",
    [
        (stored(RESERVATION, "rsv-2"), "record of another object"),
        (stored(RESERVATION, text=b"{}"), "cannot be decoded"),
        (stored(make.reservation("rsv-2")), "another"),
        (StoredObject(Metadata("rsv-1")), "no record"),
        *(
            (stored(RESERVATION, **edited), "does not match its checksum")
            for edited in ({"revision": 4}, {"checksum": ""}, {"checksum": "é"}, {"data": LESS})
        ),
    ],
)
def test_record_that_the_broker_did_not_write_is_corrupt(found, why):
    assert projection.verified_record("reservation", stored(RESERVATION)) == RESERVATION
    with pytest.raises(CorruptRecord, match=why):
        projection.verified_record("reservation", found)


def test_fields_of_the_controllers_are_not_compared():
    spec: Any = projection.cluster_spec(CLUSTER)
    edited = {**spec, "resources": {**spec["resources"], "reserved": {"cpu": "1"}}}
    assert projection.comparable_spec(edited) == projection.comparable_spec(spec)
