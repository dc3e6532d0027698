"""A borrowed node and its peering are removed step by step, from the objects alone."""

from datetime import UTC, datetime, timedelta

import pytest
from msgspec.structs import replace

from kubelend.peerings import liqo_objects, liqo_removal
from kubelend.peerings.liqo_objects import BoundPod, LiqoResource, OwnedMetadata, OwnerReference
from kubelend.peerings.liqo_removal import (
    Delete,
    Evict,
    ObservedNode,
    ObservedPeering,
    ObservedRequester,
    Patch,
    RemovalLimits,
)

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
LIMITS = RemovalLimits(drain_timeout=timedelta(minutes=2), force_after=timedelta(minutes=5))
OURS = {"app.kubernetes.io/managed-by": "kubelend-agent"}
NAMESPACE = "liqo-tenant-b"


def thing(name, *, labels=OURS, spec=None, status=None, deleted=False, owner="", **annotations):
    metadata = OwnedMetadata(
        name,
        NAMESPACE,
        uid=name,
        labels=labels,
        annotations=annotations,
        deletion_timestamp=NOW if deleted else None,
        owner_references=(OwnerReference(owner),) if owner else (),
    )
    return BoundPod(metadata, spec or {}, status or {})


def foreign(status="Established", minutes=0, **annotations):
    since = f"{NOW - timedelta(minutes=minutes):%Y-%m-%dT%H:%M:%SZ}"
    condition = {"type": "APIServerStatus", "status": status, "lastTransitionTime": since}
    found = thing("b", labels={}, status={"role": "Provider", "conditions": [condition]})
    metadata = replace(found.metadata, annotations=annotations.pop("marked", {}))
    return LiqoResource(metadata, found.spec, found.status)


DEAD = foreign("Error", minutes=5)
DECLARED = foreign(
    "Error",
    minutes=5,
    marked={liqo_removal.UNREACHABLE_ANNOTATION: "true", liqo_removal.FORCED_ANNOTATION: "true"},
)


def draining(seconds, **more):
    found = thing("rsv-1", **more)
    since = {liqo_removal.DRAIN_ANNOTATION: (NOW - timedelta(seconds=seconds)).isoformat()}
    metadata = replace(found.metadata, annotations=since)
    return LiqoResource(metadata)


def plan(slice=None, node=None, pods=(), foreign=foreign()):  # noqa: B008
    return liqo_removal.plan_node_removal(
        ObservedNode("berlin", slice, node, pods, foreign), LIMITS, NOW
    )


def kinds(step):
    return [
        f"{type(one).__name__} {one.pod.metadata.name if isinstance(one, Evict) else one.kind.kind}"
        for one in step.actions
    ]


CORDONED = thing("rsv-1", labels={}, spec={"unschedulable": True})
NODE = thing("rsv-1", labels={})


def silent(**known):
    conditions = [{"type": "Ready", "status": "Unknown"}]
    status = {"conditions": conditions}
    return thing("rsv-1", labels={}, spec={"unschedulable": True}, status=status, **known)


POD, LEAVING = thing("web"), thing("old", deleted=True)
DAEMON = thing("proxy", owner="DaemonSet")

# -- the node


@pytest.mark.parametrize(
    "seen, actions, reason",
    [
        ((thing("rsv-1"), NODE, [POD]), "Patch ResourceSlice, Patch Node, Evict web", "Draining"),
        ((draining(60), CORDONED, [POD, LEAVING]), "Evict web", "Draining"),
        ((draining(119), CORDONED, [LEAVING]), "", "Draining"),
        ((draining(120), CORDONED, [POD]), "Delete Pod, Delete ResourceSlice", "Disconnecting"),
        ((thing("rsv-1"), NODE, []), "Patch Node, Delete ResourceSlice", "Disconnecting"),
        ((thing("rsv-1"), NODE, [DAEMON]), "Patch Node, Delete ResourceSlice", "Disconnecting"),
        ((thing("rsv-1"), None, []), "Delete ResourceSlice", "Disconnecting"),
        ((thing("rsv-1", deleted=True), CORDONED, []), "", "Disconnecting"),
        ((None, CORDONED, [POD, LEAVING]), "Delete Pod", "Disconnecting"),
        ((None, None, []), "", "Disconnecting"),
        ((thing("rsv-1", deleted=True), silent(), []), "", "Disconnecting"),
        ((None, silent(), [LEAVING]), "Delete Node", "Disconnecting"),
        ((None, silent(deleted=True), []), "", "Disconnecting"),
    ],
    ids=[
        *("start", "evict", "last-pod-ends", "deadline", "no-pods", "daemon-pods", "no-node"),
        *(
            "slice-ends",
            "pod-is-late",
            "nothing-left",
            "slice-before-node",
            "orphan",
            "orphan-ends",
        ),
    ],
)
def test_node_is_cordoned_and_drained_before_its_slice_is_deleted(seen, actions, reason):
    step = plan(*seen)
    assert ", ".join(kinds(step)) == actions
    assert step.reason == reason
    assert bool(step.waits_for) == (seen[:2] != (None, None))


def test_pods_at_the_deadline_are_deleted_with_notice():
    [pod, _] = plan(draining(120), CORDONED, [POD]).actions
    assert pod == Delete(liqo_objects.PODS, POD, grace_seconds=30)


def test_drain_with_an_invalid_start_starts_again():
    for text in ("yesterday", "2026-01-01T11:00:00"):
        found = draining(0)
        marked = replace(found.metadata, annotations={liqo_removal.DRAIN_ANNOTATION: text})
        step = plan(LiqoResource(marked), CORDONED, [POD])
        assert kinds(step) == ["Patch ResourceSlice", "Evict web"]


# -- an unreachable provider


def test_unreachable_provider_is_waited_for_without_evicting_anybody():
    """Only it could end the pods. Liqo would wait for them, and for nothing else meanwhile."""
    step = plan(thing("rsv-1"), NODE, [POD], foreign("Error", minutes=4))
    assert (kinds(step), step.reason) == (["Patch Node"], "ProviderUnreachable")
    assert "removal by force at 2026-01-01T12:01:00Z" in step.waits_for


@pytest.mark.parametrize("status", ["Established", "Pending", ""])
def test_only_an_error_of_its_api_server_makes_a_provider_unreachable(status):
    assert plan(thing("rsv-1"), NODE, [POD], foreign(status, minutes=60)).reason == "Draining"


@pytest.mark.parametrize(
    "seen, actions",
    [
        ((thing("rsv-1"), NODE, [POD], DEAD), "Patch Node, Patch ForeignCluster"),
        ((thing("rsv-1"), CORDONED, [POD], DECLARED), "Delete Pod, Delete ResourceSlice"),
        ((thing("rsv-1", deleted=True), CORDONED, [], DECLARED), "Patch ResourceSlice"),
        ((None, CORDONED, [LEAVING], DECLARED), "Delete Pod"),
        ((None, CORDONED, [], DECLARED), ""),
        ((None, silent(), [], DECLARED), "Delete Node"),
    ],
    ids=["declare", "delete", "retry", "pod-hangs", "node-ends", "orphan"],
)
def test_dead_provider_is_declared_before_anything_is_removed_without_it(seen, actions):
    step = plan(*seen)
    assert ", ".join(kinds(step)) == actions
    assert step.reason == "ForceUnpeering"
    pods = [one for one in step.actions if isinstance(one, Delete) and one.found in (POD, LEAVING)]
    assert all(one.grace_seconds == 0 for one in pods)


def test_declaration_is_withdrawn_when_the_provider_is_used_again_but_not_that_of_others():
    [withdrawal] = liqo_removal.plan_withdrawal(DECLARED)
    assert isinstance(withdrawal, Patch)
    assert set(withdrawal.change["metadata"]["annotations"].values()) == {None}
    by_others = foreign(marked={liqo_removal.UNREACHABLE_ANNOTATION: "true"})
    for found in (None, foreign(), by_others):
        assert liqo_removal.plan_withdrawal(found) == ()


# -- the peering

IDENTITY, TENANT_NAMESPACE = thing("controlplane-b"), thing(NAMESPACE)
COPIES, LEAVING_COPIES = thing("b", labels={}), thing("b", labels={}, deleted=True)


def peering(
    identity=None, namespace=None, foreign=None, tenant=None, copies=None, *, is_used=False
):
    maps = [copies] if copies else []
    seen = ObservedPeering("berlin", identity, namespace, foreign, is_used, tenant, maps)
    return liqo_removal.plan_peering_removal(seen, LIMITS, NOW)


def test_peering_is_removed_in_an_order_that_survives_a_restart_at_any_step():
    """The namespace is the record of whose peering it is, so it has to be the last."""
    left = {"identity": IDENTITY, "foreign": foreign(), "namespace": TENANT_NAMESPACE}
    left["copies"] = COPIES
    removed = []
    while (step := peering(**left)).waits_for:
        for action in step.actions:
            assert isinstance(action, Delete)
            [name] = [name for name, found in left.items() if found is action.found]
            removed.append(name)
            left[name] = None
    assert removed == ["copies", "identity", "foreign", "namespace"]


@pytest.mark.parametrize(
    "copies, foreign, actions, reason",
    [
        (COPIES, foreign(), "Delete NamespaceMap", "Disconnecting"),
        (LEAVING_COPIES, foreign(), "", "Disconnecting"),
        (LEAVING_COPIES, foreign("Error", minutes=4), "", "ProviderUnreachable"),
        (LEAVING_COPIES, DEAD, "Patch ForeignCluster", "ForceUnpeering"),
        (COPIES, DECLARED, "Delete NamespaceMap", "ForceUnpeering"),
        (LEAVING_COPIES, DECLARED, "Patch NamespaceMap", "ForceUnpeering"),
    ],
    ids=["left-by-Liqo", "being-deleted", "unreachable", "declare", "delete", "retry"],
)
def test_identity_stays_until_liqo_has_removed_its_copies_of_namespaces(
    copies, foreign, actions, reason
):
    step = peering(IDENTITY, TENANT_NAMESPACE, foreign, copies=copies)
    assert (", ".join(kinds(step)), step.reason) == (actions, reason)
    assert "berlin" in step.waits_for


@pytest.mark.parametrize(
    "seen",
    [
        {"identity": IDENTITY, "copies": COPIES, "is_used": True},
        {"identity": thing("controlplane-b", labels={})},
        {"namespace": thing(NAMESPACE, labels={}), "foreign": foreign()},
        {"namespace": TENANT_NAMESPACE, "foreign": foreign(), "tenant": thing("b")},
        {"namespace": TENANT_NAMESPACE, "is_used": True},
        {},
    ],
    ids=["used", "of-others", "namespace-of-others", "lending", "slice-of-others", "nothing"],
)
def test_what_is_used_or_belongs_to_others_stays(seen):
    assert peering(**seen) == liqo_removal.NOTHING_LEFT


def test_foreign_cluster_of_another_role_stays():
    consumer = thing("b", labels={}, status={"role": "Consumer"})
    [action] = peering(namespace=TENANT_NAMESPACE, foreign=consumer).actions
    assert action == Delete(liqo_objects.NAMESPACES, TENANT_NAMESPACE)


def test_namespace_waits_for_a_tenant_that_is_being_deleted():
    step = peering(namespace=TENANT_NAMESPACE, tenant=thing("b", deleted=True))
    assert (step.actions, step.waits_for) == ((), "the Tenant of berlin to be deleted")


# -- names


def test_slice_gets_a_number_while_the_previous_one_has_its_name():
    assert liqo_objects.slice_name("rsv-1", set()) == "rsv-1"
    assert liqo_objects.slice_name("rsv-1", {"rsv-1"}) == "rsv-1.2"
    assert liqo_objects.slice_name("rsv-1", {"rsv-1", "rsv-1.2"}) == "rsv-1.3"
    longest = "r" * 63
    assert liqo_objects.slice_name(longest, {longest}) == longest
    for name in ("rsv-1", "rsv-1.2"):
        assert liqo_objects.reservation_of(thing(name)) == "rsv-1"


# -- the requester, in its provider

LEAVING_NAMESPACE = thing(NAMESPACE, deleted=True)


def requester(namespace=TENANT_NAMESPACE, tenant=None, role=None, *, has_identity=False):
    known = None if role is None else thing("a", labels={}, status={"role": role})
    seen = ObservedRequester("paris", namespace, tenant, known, has_identity)
    step = liqo_removal.plan_requester_removal(seen)
    return ", ".join(kinds(step)), bool(step.waits_for)


@pytest.mark.parametrize(
    "seen, actions, is_left",
    [
        ({"tenant": thing("a"), "role": "Consumer"}, "Delete Tenant", True),
        ({"tenant": thing("a", deleted=True), "role": "Consumer"}, "", True),
        ({"role": "Consumer"}, "Delete ForeignCluster", True),
        ({"role": "Unknown"}, "Delete ForeignCluster", True),
        # It belongs to another peering.
        ({"role": "Provider"}, "Delete Namespace", True),
        # A handshake that has not come as far as a Tenant.
        ({}, "Delete Namespace", True),
        ({"namespace": LEAVING_NAMESPACE, "role": "Unknown"}, "Delete ForeignCluster", True),
        ({"namespace": LEAVING_NAMESPACE}, "", True),
        # This cluster borrows from the same one, or others have created these objects.
        ({"has_identity": True, "role": "Provider"}, "Patch Namespace", False),
        ({"namespace": thing(NAMESPACE, labels={})}, "Patch Namespace", False),
        ({"tenant": thing("a", labels={})}, "Patch Namespace", False),
    ],
)
def test_requester_is_removed_in_an_order_that_survives_a_restart(seen, actions, is_left):
    assert requester(**seen) == (actions, is_left)
