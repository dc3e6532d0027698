"""What Liqo's objects mean: who is granted what, and when a reservation can be used."""

from datetime import UTC, datetime

import pytest

from kubelend.agent.ports import Peer
from kubelend.core import resources
from kubelend.peerings import liqo_objects, slice_decision
from kubelend.peerings.liqo_objects import LiqoResource, OwnedMetadata
from kubelend.peerings.slice_decision import LentReservation

NOW = datetime(2026, 1, 1, tzinfo=UTC)
RESERVED = resources.parse_requested({"cpu": "2", "memory": "4Gi", "gpu": "1"})
LENT = LentReservation("paris", RESERVED)
PEER = Peer("rsv-1", "berlin", RESERVED)
AMOUNTS = {
    "cpu": "2",
    "memory": "4Gi",
    "nvidia.com/gpu": "1",
    "ephemeral-storage": "0",
    "pods": "110",
}
AUTHENTICATED = {"type": "Authentication", "status": "Accepted"}
GRANTED = {"type": "Resources", "status": "Accepted", "message": "reservation rsv-1"}


def resource_slice(amounts=AMOUNTS, kind="kubelend", conditions=(AUTHENTICATED,), **status):
    return LiqoResource(
        OwnedMetadata("rsv-1", "liqo-tenant-paris", resource_version="7"),
        {"class": kind, "resources": amounts},
        {"conditions": list(conditions), **status},
    )


def granted(**amounts):
    """Accepted by both, with these amounts instead of what is reserved."""
    return resource_slice(conditions=(AUTHENTICATED, GRANTED), resources=AMOUNTS | amounts)


def test_slice_asks_for_every_reserved_amount_and_what_a_node_needs():
    assert liqo_objects.slice_amounts(RESERVED) == AMOUNTS
    manifest = liqo_objects.slice_manifest(PEER, "liqo-b", "signed")
    assert manifest["spec"]["class"] == "kubelend"
    assert manifest["metadata"]["namespace"] == "liqo-tenant-liqo-b"
    assert manifest["metadata"]["labels"]["kubelend.io/reservation"] == "rsv-1"
    assert manifest["metadata"]["annotations"]["kubelend.io/grant"] == "signed"


def test_reserved_amounts_are_granted_exactly():
    less = AMOUNTS | {"cpu": "1"}
    for wanted in (AMOUNTS, less):
        decision = slice_decision.decide_slice(resource_slice(wanted), "paris", LENT)
        assert decision is not None
        assert (decision.status, decision.amounts) == ("Accepted", AMOUNTS)


@pytest.mark.parametrize(
    "found, requester, lent, reason",
    [
        (resource_slice(), "paris", None, "NotReserved"),
        (resource_slice(), "rome", LENT, "OtherRequester"),
        (resource_slice(), "", LENT, "OtherRequester"),
        (resource_slice(AMOUNTS | {"cpu": "2001m"}), "paris", LENT, "MoreThanReserved"),
        (resource_slice(AMOUNTS | {"example.com/fpga": "1"}), "paris", LENT, "MoreThanReserved"),
        (resource_slice(AMOUNTS | {"cpu": "much"}), "paris", LENT, "InvalidQuantity"),
    ],
    ids=["unreserved", "of-another", "of-a-stranger", "oversized", "other-resource", "invalid"],
)
def test_anything_else_is_denied_with_the_reason(found, requester, lent, reason):
    decision = slice_decision.decide_slice(found, requester, lent)
    assert decision is not None
    assert (decision.status, decision.reason, decision.amounts) == ("Denied", reason, {})


@pytest.mark.parametrize(
    "found", [resource_slice(kind="default"), resource_slice(conditions=())], ids=["class", "early"]
)
def test_slices_of_other_classes_and_unauthenticated_ones_are_left_alone(found):
    assert slice_decision.decide_slice(found, "paris", LENT) is None


def patch_for(found):
    decision = slice_decision.decide_slice(found, "paris", LENT)
    assert decision is not None
    return slice_decision.status_patch(found, decision, NOW)


def test_grant_keeps_the_conditions_of_liqo_and_the_version_that_was_read():
    change = patch_for(resource_slice())
    assert change["metadata"] == {"resourceVersion": "7"}
    assert change["status"]["resources"] == AMOUNTS
    assert change["status"]["nodeLabels"] == {"kubelend.io/reservation": "rsv-1"}
    kinds = [each["type"] for each in change["status"]["conditions"]]
    assert kinds == ["Authentication", "Resources"]


def test_granted_slice_is_not_written_again():
    assert patch_for(granted()) == {}


def test_amounts_that_a_requester_gave_itself_are_taken_back():
    change = patch_for(granted(**{"cpu": "64", "example.com/fpga": "8"}))
    assert change["status"]["resources"] == AMOUNTS | {"example.com/fpga": None}


def node(ready="True", amounts=AMOUNTS):
    conditions = [{"type": "Ready", "status": ready, "message": "it says so"}]
    return LiqoResource(
        OwnedMetadata("rsv-1"), {}, {"conditions": conditions, "allocatable": amounts}
    )


DENIED = {"type": "Resources", "status": "Denied", "message": "no more GPUs"}


@pytest.mark.parametrize(
    "found, virtual, reason",
    [
        (None, None, "ResourceSlice rsv-1 not found yet"),
        (resource_slice(conditions=()), None, "berlin has not set condition Authentication yet"),
        (resource_slice(), None, "berlin has not set condition Resources yet"),
        (
            resource_slice(conditions=(AUTHENTICATED, DENIED)),
            None,
            "ResourceSlice rsv-1: Resources not accepted: no more GPUs",
        ),
        (granted(cpu="1500m"), node(), "500m CPU / 0 Memory less is granted than reserved"),
        (granted(), None, "virtual node rsv-1 not found yet"),
        (granted(), node("False"), "virtual node rsv-1 not ready: it says so"),
        (granted(), node(amounts=AMOUNTS | {"nvidia.com/gpu": "0"}), "1 GPU less is offered"),
        (granted(pods="220"), node(), ""),
    ],
    ids=[
        *("no-slice", "early", "undecided", "denied", "granted-less", "no-node", "node-not-ready"),
        *("node-offers-less", "ready"),
    ],
)
def test_only_a_ready_node_with_all_granted_amounts_is_ready(found, virtual, reason):
    readiness = liqo_objects.readiness(found, virtual, PEER)
    assert readiness.is_ready == (not reason)
    assert reason in readiness.reason


def foreign(role="Provider", identity="Ready", server="Established"):
    module = {"conditions": [{"type": "AuthIdentityControlPlaneStatus", "status": identity}]}
    return LiqoResource(
        OwnedMetadata("liqo-b"),
        {},
        {
            "role": role,
            "modules": {"authentication": module},
            "conditions": [{"type": "APIServerStatus", "status": server, "message": "no answer"}],
        },
    )


@pytest.mark.parametrize(
    "found, problem",
    [
        (None, "Liqo has not created a ForeignCluster yet"),
        (foreign(role="Unknown"), "Liqo does not know the cluster as a provider yet"),
        (foreign(identity="NotReady"), "AuthIdentityControlPlaneStatus: NotReady"),
        (foreign(server="Error"), "APIServerStatus: no answer"),
        (foreign(server=None), ""),
        (foreign(), ""),
        (foreign(role="ConsumerAndProvider"), ""),
    ],
)
def test_foreign_cluster_alone_is_no_peering(found, problem):
    assert liqo_objects.peering_problem(found) == problem
