"""Edits and deletions of the store's objects by others, faults at its start, and brokers on it."""

import json
from contextlib import closing

import msgspec
import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

import make
from kube_broker import quiet
from kube_stores import stored_state
from kubelend.cli import main
from kubelend.core.errors import StoreFailed
from kubelend.core.events import Archived
from kubelend.core.ledger import Ledger
from kubelend.core.lifecycle import Phase, Reason
from kubelend.core.models import ClusterId, ReservationId
from kubelend.kube import config, resources
from kubelend.stores.kubernetes import objects
from kubelend.stores.kubernetes.objects import (
    LEDGER_RECORDS,
    STORED_ADVERTISEMENTS,
    STORED_RESERVATIONS,
)
from kubelend.stores.kubernetes.store import KubernetesStore
from kubelend.wire import broker_objects
from kubelend.wire.broker_objects import RESERVATION_FINALIZER
from kubelend.wire.objects import Metadata

WHOLE = resources.resource_for(broker_objects.Reservation)
OFFERS = resources.resource_for(broker_objects.ClusterAdvertisement)
HELD = make.reservation("rsv-1", phase=Phase.RESERVED, target=ClusterId("a"), reserved_at=make.T0)
ACTIVE = replace(HELD, phase=Phase.ACTIVE, activated_at=make.T0)
OVER = replace(HELD, phase=Phase.RELEASED, reason=Reason.EXPIRED, finished_at=make.T0)


@pytest.fixture
def store(place):
    with closing(place.open()) as store:
        store.commit([make.cluster("a", labels={"tier": "gold"}), HELD], 1)
        yield store


def test_objects_show_the_records(place, store):
    reservation, offer = place.find(WHOLE, "rsv-1"), place.find(OFFERS, "a-adv")
    assert reservation.metadata.finalizers == (RESERVATION_FINALIZER,)
    assert reservation.metadata.labels == {"broker.fluidos.eu/managed-by": "broker"}
    assert (reservation.spec.target_cluster_id, reservation.spec.requester_id) == (
        "a",
        HELD.requester,
    )
    assert (reservation.status.phase, reservation.status.reserved_at) == ("Reserved", make.T0)
    assert (offer.spec.cluster_id, offer.spec.labels) == ("a", {"tier": "gold"})
    assert (offer.status.phase, offer.status.active) == ("Active", True)


def test_edits_are_overwritten_by_the_next_write_of_the_record(place, store):
    spec = {"targetClusterID": "elsewhere"}  # the CRD refuses edits of what was requested
    place.edit(WHOLE, "rsv-1", {"metadata": {"finalizers": None}, "spec": spec})
    place.edit(WHOLE, "rsv-1", {"status": {"phase": "Failed", "message": "hm"}}, "status")
    place.edit(OFFERS, "a-adv", {"spec": {"labels": {"tier": "lead", "x": "y"}}})
    before = make.cluster("a", labels={"tier": "gold"}, cordon="why")
    store.commit([ACTIVE, before], 2)
    reservation, offer = place.find(WHOLE, "rsv-1"), place.find(OFFERS, "a-adv")
    assert reservation.metadata.finalizers == (RESERVATION_FINALIZER,)
    assert reservation.spec.target_cluster_id == "a"
    assert (reservation.status.phase, reservation.status.message) == ("Active", ACTIVE.message)
    assert offer.spec.labels == {"tier": "gold"}
    assert offer.status.cordon_reason == "why"


def test_fields_of_others_stay(place, store):
    condition = {"type": "RequesterActive", "status": "True"}
    place.edit(WHOLE, "rsv-1", {"status": {"conditions": [condition]}}, "status")
    mine = {"finalizers": [RESERVATION_FINALIZER, "example.com/mine"], "labels": {"team": "x"}}
    place.edit(WHOLE, "rsv-1", {"metadata": mine})
    place.edit(
        OFFERS, "a-adv", {"spec": {"resources": {"reserved": {"cpu": "1", "memory": "1Gi"}}}}
    )
    store.commit([ACTIVE, make.cluster("a", "cpu=8,memory=1Gi")], 2)
    reservation, offer = place.find(WHOLE, "rsv-1"), place.find(OFFERS, "a-adv")
    assert [found.type for found in reservation.status.conditions] == ["RequesterActive"]
    assert reservation.metadata.finalizers == (RESERVATION_FINALIZER, "example.com/mine")
    assert reservation.metadata.labels["team"] == "x"
    assert offer.spec.resources.reserved.cpu == "1"
    assert offer.spec.resources.capacity.cpu == "8"


def apply_mine(place):
    """A user's object of this name."""
    body = {
        "apiVersion": "broker.fluidos.eu/v1alpha1",
        "kind": "Reservation",
        "metadata": {"name": "mine", "namespace": place.namespace},
        "spec": {"requestedResources": {"cpu": "0.5", "memory": "268435456"}, "priority": 3},
    }
    path = WHOLE.path(place.namespace)
    place.run(lambda client: client.raw("POST", path, body))


def commit_mine(place, store):
    key = objects.request_key_for_uid(place.find(WHOLE, "mine").metadata.uid)
    store.commit([replace(HELD, id="mine", request=replace(HELD.request, key=key))], 2)


def test_users_object_keeps_its_spec(place, store):
    apply_mine(place)
    assert [found.id for found in store.load().reservations] == ["rsv-1"]
    commit_mine(place, store)
    found = place.find(WHOLE, "mine")
    assert (found.spec.requested_resources.cpu, found.spec.priority) == ("0.5", 3)
    assert found.spec.target_cluster_id == "a"
    assert found.metadata.finalizers == (RESERVATION_FINALIZER,)
    assert {one.id for one in store.load().reservations} == {"rsv-1", "mine"}


def test_object_is_evaluated_as_it_is_now_and_not_as_the_earlier_request_of_its_name(place, store):
    """Its owner has deleted it since and made another: what is remembered of the first decides nothing."""
    apply_mine(place)
    store.load()
    place.delete(WHOLE, "mine")
    apply_mine(place)
    commit_mine(place, store)
    assert place.find(WHOLE, "mine").status.phase == "Reserved"


def test_deleted_object_is_created_again_by_the_next_write(place, store):
    place.delete(STORED_RESERVATIONS, "rsv-1", force=True)
    store.commit([ACTIVE], 2)
    assert place.find(WHOLE, "rsv-1").status.phase == "Active"


def test_deleted_objects_are_no_records_after_a_restart(place, store):
    """A reservation is given back; without its provider's advertisement it still holds what it held."""
    second = make.reservation("rsv-2", phase=Phase.RESERVED, target=ClusterId("a"))
    store.commit([second], 2)
    store.commit([make.cluster("b")], 3)
    place.delete(STORED_RESERVATIONS, "rsv-1", force=True)
    place.delete(STORED_ADVERTISEMENTS, "a-adv", force=True)
    with closing(place.open()) as again:
        loaded = again.load()
    assert [found.id for found in loaded.clusters] == ["b"]
    assert loaded.reservations == [second]
    ledger = Ledger.restore(loaded)
    assert ledger.reservations[second.id].target == "a"


def test_reservation_that_its_user_deletes_stays_until_it_is_finished(place, store):
    place.delete(STORED_RESERVATIONS, "rsv-1")
    store.commit([ACTIVE], 2)
    assert place.find(WHOLE, "rsv-1").metadata.deletion_timestamp is not None
    store.commit([OVER], 3)
    assert place.find(WHOLE, "rsv-1") is None
    with closing(place.open()) as again:
        assert again.load().reservations == []
    assert place.find(WHOLE, "rsv-1") is None


def test_reservation_without_its_object_can_be_archived(place, store):
    store.commit([OVER], 2)
    place.delete(STORED_RESERVATIONS, "rsv-1", force=True)
    store.commit([Archived(OVER.id)], 3)
    assert stored_state(place.open(), ["rsv-1"])[2] == {"rsv-1": None}


def test_expired_archived_reservations_are_deleted(place, store):
    store.commit([OVER, Archived(OVER.id)], 2)
    assert place.find(WHOLE, "rsv-1").metadata.finalizers == ()
    late = replace(OVER, id="rsv-2", finished_at=make.T0 + 31 * 24 * make.HOUR)
    store.commit([late, Archived(late.id)], 3)
    assert place.find(WHOLE, "rsv-1") is None
    assert place.find(WHOLE, "rsv-2").metadata.labels["broker.fluidos.eu/archived"] == "true"


def test_archive_is_swept_by_records_and_not_by_labels(place, store):
    store.commit([replace(OVER, id="rsv-2"), Archived(ReservationId("rsv-2"))], 2)
    hour = {objects.ARCHIVED_LABEL: "true", objects.FINISHED_LABEL: f"{make.T0:%Y-%m-%dT%H}"}
    place.edit(WHOLE, "rsv-1", {"metadata": {"labels": hour}})
    late = replace(OVER, id="rsv-3", finished_at=make.T0 + 31 * 24 * make.HOUR)
    store.commit([late, Archived(late.id)], 3)
    assert place.find(WHOLE, "rsv-2") is None
    assert place.find(WHOLE, "rsv-1").status.phase == "Reserved"


def test_corrupt_record_is_overwritten_while_a_broker_runs(place, store):
    place.edit(WHOLE, "rsv-1", {"status": {"record": {"revision": 9, "data": "{}"}}}, "status")
    store.commit([ACTIVE], 2)
    assert place.find(WHOLE, "rsv-1").status.phase == "Active"
    with closing(place.open()) as again:
        assert again.load().reservations == [ACTIVE]


DAMAGE = [
    pytest.param(WHOLE, "rsv-1", {"status": {"record": None}}, "status", id="no record"),
    pytest.param(WHOLE, "rsv-1", {"status": {"record": {"revision": 9}}}, "status", id="revision"),
    pytest.param(OFFERS, "a-adv", {"status": {"record": {"data": "no"}}}, "status", id="a cluster"),
    pytest.param(LEDGER_RECORDS, "head", {"record": {"data": "{}"}}, "", id="the head"),
]


@pytest.mark.parametrize("resource, name, change, subresource", DAMAGE)
def test_corruption_is_reported_with_the_name_of_the_object(
    place, store, resource, name, change, subresource
):
    place.edit(resource, name, change, subresource)
    with (
        pytest.raises(StoreFailed, match=f"is damaged.*{name}.*backup"),
        closing(place.open()) as again,
    ):
        again.load()


def test_reservation_whose_status_was_wiped_blocks_the_start(place, store):
    """As by a restore without statuses: what it holds is unknown. A deleted one is given back."""
    store.commit([replace(HELD, id="rsv-2"), replace(HELD, id="rsv-3")], 2)
    store.commit([make.cluster("b")], 3)
    place.delete(WHOLE, "rsv-2", force=True)
    with closing(place.open_readonly()) as reader:
        assert {found.id for found in reader.load().reservations} == {"rsv-1", "rsv-3"}
    status = msgspec.to_builtins(place.find(STORED_RESERVATIONS, "rsv-3"))["status"]
    fields = dict.fromkeys([*status, "reservedAt", "lastUpdateTime", "targetClusterID"])
    place.edit(WHOLE, "rsv-3", {"status": fields}, "status")
    with closing(place.open()) as again, pytest.raises(StoreFailed, match=r"rsv-3: .*cleared"):
        again.load()


@pytest.mark.parametrize(
    "wipe",
    [
        pytest.param({"record": None}, id="its record"),
        pytest.param(
            dict.fromkeys(("record", "phase", "active", "lastUpdateTime")), id="all of it"
        ),
    ],
)
def test_advertisement_without_its_status_does_not_block_the_start(place, store, wipe):
    """As by a restore without statuses. The cluster advertises again, and every reservation stays."""
    store.commit([make.cluster("b")], 2)
    place.edit(OFFERS, "a-adv", {"status": wipe}, "status")
    with closing(place.open_readonly()) as reader:
        assert [found.id for found in reader.load().clusters] == ["b"]
    with closing(place.open()) as again, capture_logs() as logged:
        loaded = again.load()
        assert [found.id for found in loaded.clusters] == ["b"]
        assert loaded.reservations == [HELD]
        assert [(one["log_level"], one["name"]) for one in logged] == [("warning", "a-adv")]
        again.commit([make.cluster("a")], 3)
        assert {found.id for found in again.load().clusters} == {"a", "b"}
    assert place.find(OFFERS, "a-adv").status.record is not None


@pytest.mark.parametrize(
    "amounts, warnings",
    [
        pytest.param({}, 0, id="never filled"),
        pytest.param({"reserved": {"cpu": "0", "memory": "0"}}, 1, id="restored without a status"),
    ],
)
def test_advertisement_that_lost_its_status_is_logged(place, store, amounts, warnings):
    """One that a broker made before it was stopped has lost nothing."""
    labels = {objects.MANAGED_BY: objects.MANAGED_BY_BROKER}
    spec = place.find(STORED_ADVERTISEMENTS, "a-adv").spec
    spec = {**spec, "clusterID": "b", "resources": {**spec["resources"], **amounts}}
    blank = objects.StoredObject(Metadata("b-adv", place.namespace, labels=labels), spec)
    place.run(lambda client: client.create(STORED_ADVERTISEMENTS, blank))
    with closing(place.open()) as again, capture_logs() as logged:
        assert [found.id for found in again.load().clusters] == ["a"]
    assert [one["log_level"] for one in logged] == ["warning"] * warnings
    assert place.find(STORED_ADVERTISEMENTS, "b-adv") is None


def test_advertisement_of_the_last_commit_is_restored_from_the_head(place, store):
    place.edit(OFFERS, "a-adv", {"status": {"record": None}}, "status")
    with closing(place.open()) as again, capture_logs() as logged:
        assert [found.id for found in again.load().clusters] == ["a"]
        assert logged == []
    assert place.find(OFFERS, "a-adv").status.record is not None


def test_record_under_another_name_is_corrupt(place, store):
    store.commit([make.cluster("b")], 2)
    kept = place.find(OFFERS, "a-adv").status.record
    fields = {"revision": kept.revision, "checksum": kept.checksum, "data": kept.data}
    place.edit(OFFERS, "b-adv", {"status": {"record": fields}}, "status")
    store.commit([make.cluster("c")], 3)
    reported = pytest.raises(StoreFailed, match="b-adv: it has the record of another object, 'a'")
    with closing(place.open_readonly()) as reader, reported:
        reader.load()


def test_store_without_its_head_is_not_created_again(place, store):
    place.delete(LEDGER_RECORDS, "head")
    with pytest.raises(StoreFailed, match="head was deleted"):
        store.commit([ACTIVE], 2)
    with pytest.raises(StoreFailed, match=r"LedgerRecord head is missing.*backup"):
        place.open()


def test_missing_namespace_is_reported(place):
    for opener in (KubernetesStore.open, KubernetesStore.open_readonly):
        with pytest.raises(StoreFailed, match="namespace"):
            opener(place.access, "nowhere")
    with pytest.raises(StoreFailed, match="kubectl create namespace nowhere"):
        KubernetesStore.open(place.access, "nowhere")


def test_missing_crds_are_reported(lab):
    [cluster] = lab.start("without-crds")
    try:
        found = config.config_from_kubeconfig(cluster.admin_kubeconfig)
        for opener in (KubernetesStore.open, KubernetesStore.open_readonly):
            with pytest.raises(StoreFailed, match="kubectl apply -f deploy/crds"):
                opener(found, "default")
    finally:
        cluster.kill()


def test_missing_permissions_are_reported(kube, place):
    stranger = config.config_from_kubeconfig(kube.kubeconfig_for("stranger"))
    with pytest.raises(StoreFailed, match=r"cannot .* Role"):
        KubernetesStore.open(stranger, place.namespace)


def test_unreachable_server_is_reported(place):
    nowhere = replace(place.access, server="https://127.0.0.1:1", origin=None)
    with pytest.raises(StoreFailed, match=r"of https://127\.0\.0\.1:1"):
        KubernetesStore.open(nowhere, place.namespace)


# -- repair by the leader


@pytest.mark.kube
@pytest.mark.broker("objects")
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "kind, name, change",
    [
        pytest.param(broker_objects.Reservation, "mine", {"checksum": "7"}, id="checksum"),
        pytest.param(OFFERS.type, "lender-adv", {"revision": 10**6}, id="revision"),
    ],
)
async def test_corrupt_record_is_repaired_once(broker, kind, name, change):
    await broker.advertise("lender")
    await broker.reserve("mine")
    await broker.reserved("mine")
    await quiet(broker)
    before, writes = (await broker.find(kind, name)).status.record, await broker.writes()
    await broker.edit(kind, name, {"status": {"record": change}}, "status")
    edited = {**msgspec.structs.asdict(before), **change}
    await broker.shows(
        kind, name, lambda one: msgspec.structs.asdict(one.status.record).items() != edited.items()
    )
    await quiet(broker)
    repaired = await broker.find(kind, name)
    record: objects.RecordKind = "cluster" if kind is OFFERS.type else "reservation"
    assert objects.has_valid_checksum(record, name, repaired.status.record)
    assert repaired.status.record.data == before.data
    # The edit, the commit, and the object at the second attempt, because it was edited.
    assert await broker.writes() == writes + 4


# -- audit


def fill(place, runner):
    with closing(place.open()) as store:
        store.commit(runner.changes, runner.ledger.revision)


@pytest.fixture
def audit(place, capsys):
    def audit(*flags, command="check"):
        code = main.run(["audit", command, "--store", place.url, *flags])
        return code, capsys.readouterr().out

    return audit


def test_audit_reports_a_force_deleted_reservation_without_a_violation(place, audit):
    runner = make.runner(a="cpu=4,memory=8Gi")
    runner.reserve("cpu=1,memory=1Gi")
    fill(place, runner)
    runner.changes.clear()
    runner.reserve("cpu=1,memory=1Gi")
    fill(place, runner)  # what the last commit wrote is in the head as well
    code, out = audit("--json")
    assert (code, json.loads(out)["gone"]) == (0, [])
    assert json.loads(audit("--json", command="verify")[1])["breaks"] == 0
    place.delete(STORED_RESERVATIONS, "rsv-1", force=True)
    code, out = audit("--json")
    report = json.loads(out)
    assert (code, report["violations"], report["gone"]) == (0, 0, ["rsv-1"])
    assert "\nDeleted together with their objects, no violation: rsv-1\n" in audit()[1]


def test_audit_finds_a_record_that_contradicts_the_audit_log(place, audit):
    runner = make.runner(a="cpu=4,memory=8Gi")
    held = runner.reserve("cpu=1,memory=1Gi")
    fill(place, runner)
    runner.activate(held)
    with closing(place.open()) as store:
        store.load()
        store.commit([runner[held]], runner.ledger.revision)  # without its line
    code, out = audit("--json")
    expected = "it is Reserved on a in the audit log, but is Active on a in the store"
    assert (code, json.loads(out)["details"]) == (8, [f"{held}: {expected}"])
