"""A pod is projected to the few fields that count; its origin follows from Liqo's labels."""

import json
import subprocess
import sys

import msgspec
import pytest

from kubelend.core import pod_requests
from kubelend.core.pod_requests import KubernetesPod, OffloadedFrom, Pod
from kubelend.core.resources import NOTHING, Resources

LIQO = {
    "liqo.io/managed-by": "shadowpod",
    "offloading.liqo.io/origin": "rome",
    "offloading.liqo.io/nodename": "res-1",
    "app": "web",
}


def projected(cpu="1", node="n1", labels=None, phase="Running"):
    """The projection of a Pod that comes as JSON, as an API server sends it."""
    found = {
        "metadata": {"uid": "u1", "name": "web", "labels": labels or {}},
        "spec": {"nodeName": node, "containers": [{"resources": {"requests": {"cpu": cpu}}}]},
        "status": {"phase": phase, "podIP": "10.0.0.1"},
    }
    return pod_requests.project_pod(msgspec.json.decode(json.dumps(found), type=KubernetesPod))


def test_little_of_a_pod_is_kept():
    assert projected(labels=LIQO) == Pod(
        "u1", "n1", Resources(cpu=1000), offloaded_from=OffloadedFrom("rome", "res-1")
    )


@pytest.mark.parametrize(
    "phase, is_finished",
    [
        ("Pending", False),
        ("Running", False),
        ("Unknown", False),
        ("", False),
        ("Succeeded", True),
        ("Failed", True),
    ],
)
def test_pod_is_finished_in_two_phases(phase, is_finished):
    assert projected(phase=phase).is_finished is is_finished


def test_finished_pod_asks_for_nothing_and_cannot_be_wrong():
    assert projected(cpu="lots", phase="Failed").requests == NOTHING


@pytest.mark.parametrize(
    "labels, guest",
    [
        (LIQO, OffloadedFrom("rome", "res-1")),
        ({**LIQO, "liqo.io/managed-by": "else"}, None),
        ({name: LIQO[name] for name in LIQO if name != "liqo.io/managed-by"}, None),
        ({name: LIQO[name] for name in LIQO if "origin" not in name}, None),
        ({name: LIQO[name] for name in LIQO if "nodename" not in name}, OffloadedFrom("rome", "")),
        ({"liqo.io/shadowPod": "true"}, None),
    ],
    ids=["guest", "managed_otherwise", "unmanaged", "no_origin", "no_virtual_node", "own_abroad"],
)
def test_guest_is_known_by_its_labels(labels, guest):
    assert projected(labels=labels).offloaded_from == guest


def test_smallest_pod_is_read_and_one_that_is_being_deleted_still_counts():
    found = msgspec.json.decode(
        b'{"metadata":{"uid":"u","name":"n","deletionTimestamp":"2026-01-01T00:00:00Z"}}',
        type=KubernetesPod,
    )
    assert pod_requests.project_pod(found) == Pod("u")


def test_equal_pods_share_what_they_have_in_common():
    one, other = (projected(cpu="7", node="".join(["n", "7"]), labels=LIQO) for _ in range(2))
    assert one.requests is other.requests
    assert one.node is other.node
    assert one.offloaded_from is other.offloaded_from


def test_measuring_needs_no_numpy():
    modules = "kubelend.core.pod_requests, kubelend.core.inventory"
    check = f"import sys, {modules}; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
