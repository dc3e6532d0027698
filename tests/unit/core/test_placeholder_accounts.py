"""Placeholders in the accounts of a cluster: the hold is counted, and they are not."""

import json

import msgspec
import pytest

from kubelend.core import pod_requests
from kubelend.core.inventory import Hold, Inventory
from kubelend.core.pod_requests import (
    BY_RESERVATION,
    KubernetesPod,
    Node,
    OffloadedFrom,
    Pod,
    PodScheduling,
)
from kubelend.core.resources import NOTHING, Resources

R = "rsv-rome-1"


def cpu(n):
    return Resources(cpu=1000 * n)


def placeholder(n, node="n1"):
    return Pod("p", node, cpu(n), placeholder_for=R, scheduling=PodScheduling("lending", "p"))


@pytest.fixture
def inventory():
    made = Inventory()
    made.reset([Node("n1", cpu(8), cpu(8)), Node("n2", cpu(4), cpu(4), is_tainted=True)], [])
    made.put_hold(R, Hold("rome", cpu(3)))
    return made


def test_what_is_offered_does_not_depend_on_placeholders(inventory):
    before = inventory.totals()
    inventory.put_pod(placeholder(3))
    after = inventory.totals()
    assert (after.allocated, after.free) == (before.allocated, before.free) == (NOTHING, cpu(5))
    assert after.largest == cpu(5)


def test_a_pending_placeholder_is_no_demand(inventory):
    inventory.put_pod(placeholder(3, node=""))
    assert inventory.totals().pending == NOTHING


def test_the_larger_of_reserved_and_used_counts_with_placeholders_too(inventory):
    origin = OffloadedFrom("rome", R)
    inventory.put_pod(placeholder(1))
    inventory.put_pod(Pod("w", "n1", cpu(2), offloaded_from=origin))
    assert inventory.free() == cpu(5)
    inventory.put_pod(Pod("w", "n1", cpu(5), offloaded_from=origin))
    assert inventory.free() == cpu(3)


def test_pods_that_liqo_has_authenticated_count_once_whatever_its_id_of_the_requester_is(inventory):
    inventory.put_pod(Pod("w", "n1", cpu(2), offloaded_from=OffloadedFrom(BY_RESERVATION, R)))
    assert inventory.free() == cpu(5)
    inventory.put_pod(Pod("x", "n1", cpu(2), offloaded_from=OffloadedFrom("liqo-id", R)))
    assert inventory.free() == cpu(3), "of a cluster that may be another one"


def test_room_is_what_the_scheduler_has_left(inventory):
    inventory.put_pod(placeholder(3))
    inventory.put_pod(Pod("local", "n1", cpu(1)))
    assert inventory.free_by_node() == {"n1": cpu(4)}
    assert list(inventory.scheduled) == ["p"]
    inventory.delete_pod("p")
    assert inventory.free_by_node() == {"n1": cpu(7)}
    assert list(inventory.scheduled) == []


def projected(labels, priority_class="kubelend-hold", **more):
    found = {
        "metadata": {"uid": "u", "name": "p", "namespace": "lending", "labels": labels},
        "spec": {"priorityClassName": priority_class, "containers": []},
        "status": {},
    }
    for place, fields in more.items():
        found[place] |= fields
    return pod_requests.project_pod(msgspec.json.decode(json.dumps(found), type=KubernetesPod))


LABELS = {"kubelend.io/reservation": R}


def test_a_placeholder_is_known_by_its_label_and_its_class():
    assert projected(LABELS).placeholder_for == R
    assert projected(LABELS, "kubelend-hold-100").placeholder_for == R
    assert projected(LABELS, "").placeholder_for == ""
    assert projected(LABELS, "").scheduling is None
    assert projected({}).placeholder_for == ""


def test_what_the_scheduler_knows_of_it_is_read():
    field = {"key": "metadata.name", "operator": "In", "values": ["n1"]}
    required = {"nodeSelectorTerms": [{"matchFields": [field]}]}
    found = projected(
        LABELS,
        metadata={"deletionTimestamp": "2026-01-01T12:00:00Z"},
        spec={
            "schedulingGates": [{"name": "kubelend.io/held"}],
            "affinity": {
                "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}
            },
        },
        status={
            "nominatedNodeName": "n1",
            "conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}],
        },
    )
    assert found.scheduling == PodScheduling("lending", "p", True, True, True, "n1", "n1")


def test_a_pod_with_another_gate_is_not_ours_to_schedule():
    gates = [{"name": "kubelend.io/held"}, {"name": "other"}]
    assert not projected(LABELS, spec={"schedulingGates": gates}).scheduling.is_gated
