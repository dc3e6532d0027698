"""Reservations that end in a virtual node, while parts are killed, objects changed and clocks wrong.

Each case ends as promised: Ready with exactly what is reserved, or ended with the reason; nothing is left.
`make liqo-proofs` runs the whole matrix (`liqo_fault_matrix.py`).
"""

import pytest

from kubelend.peerings import liqo_objects
from labs import AGENT, API_SERVER, BROKER, LIQO, LONGEST, PROVIDER, REQUESTER, path_of
from liqo_sites import REMOTE, condition, wait_step
from waiting import wait_until

pytestmark = [pytest.mark.timeout(600), pytest.mark.kube]

KEPT = "kept"
"""A pod that may not be evicted."""
BUDGET = {"maxUnavailable": 0, "selector": {"matchLabels": {"app": KEPT}}}


def test_node_gets_a_number_while_the_name_of_its_reservation_is_taken(site):
    """As after a move, while the previous provider's node is there."""
    site.wait_clean()
    api = site.apis[REQUESTER]
    with site.suspended(AGENT, PROVIDER):
        borrowed = site.borrow()
        wait_step(borrowed, "reserved")
        labels = {"liqo.io/type": "virtual-node", "liqo.io/remote-cluster-id": "another"}
        metadata = {"name": borrowed.reservation, "labels": labels}
        api.create("nodes", {"kind": "Node", "metadata": metadata})
    borrowed.wait_ready()
    assert borrowed.node["metadata"]["name"] == f"{borrowed.reservation}.2"
    borrowed.release()
    borrowed.wait_released()
    api.change("DELETE", path_of("nodes", name=borrowed.reservation))
    # Which Liqo has made for that node.
    api.change("DELETE", path_of("foreignclusters", name="another"))


def run_kept_pod(site, borrowed, namespace):
    """A pod that runs in the provider's cluster, and that a budget protects."""
    api = site.apis[REQUESTER]
    metadata = {"name": KEPT, "namespace": namespace}
    budget = {"kind": "PodDisruptionBudget", "metadata": metadata, "spec": BUDGET}
    api.create("poddisruptionbudgets", budget)
    borrowed.run_pod(KEPT, namespace)
    path = path_of("pods", namespace, KEPT)
    wait_until(lambda: condition(api.get(path), "Ready") == "True", LONGEST, poll=0.1)


def leases(site):
    return [one["metadata"]["name"] for one in site.apis[REQUESTER].list("leases")]


def test_node_goes_at_the_deadline_though_a_budget_forbids_evictions(site):
    [other] = site.borrow_ready()
    with site.namespace() as team:
        [borrowed] = site.borrow_ready(namespace=team, namespaces=[team])
        run_kept_pod(site, borrowed, team)
        borrowed.release()
        wait_until(
            lambda: [*site.virtual_nodes()] == [other.reservation],
            LONGEST,
            poll=0.2,
            explain=borrowed.explain,
        )
        wait_until(lambda: {"Draining", "Disconnected"} <= borrowed.events(), LONGEST, poll=0.2)
        assert site.apis[REQUESTER].list("pods", team) == []
        assert borrowed.reservation not in leases(site)
        assert other.reservation in leases(site), "Liqo names its leases otherwise now"


def patch(site, cluster, reservation, change, subresource=""):
    """Changes a slice as a user with kubectl does."""
    other = PROVIDER if cluster == REQUESTER else REQUESTER
    path = path_of("resourceslices", liqo_objects.tenant_namespace(other), reservation)
    site.apis[cluster].change("PATCH", path + subresource, change)


def test_slices_that_users_change_are_restored_and_never_give_more(site):
    edited, deleted, taken, denied, raised = site.borrow_ready(5, cpu="200m")
    edit(site, edited)
    raise_grant(site, raised)
    delete(site, deleted, REQUESTER)
    delete(site, taken, PROVIDER)
    deny(site, denied)
    wait_until(lambda: is_restored(edited), LONGEST, explain=edited.explain)
    wait_until(lambda: is_accepted(denied), LONGEST, explain=denied.explain)
    wait_until(lambda: is_granted_exactly(raised), LONGEST, explain=raised.explain)
    for borrowed in (edited, deleted, taken, denied, raised):
        borrowed.wait_ready()


def edit(site, borrowed):
    """A user of the requester's cluster asks for more."""
    patch(site, REQUESTER, borrowed.reservation, {"spec": {"resources": {"cpu": "4"}}})


def is_restored(borrowed):
    assert not borrowed.has_more_than_reserved()
    asked = borrowed.own("resourceslices").get("spec", {}).get("resources")
    return asked == borrowed.granted and is_accepted(borrowed)


def is_accepted(borrowed):
    return condition(borrowed.remote("resourceslices"), "Resources") == "Accepted"


def delete(site, borrowed, cluster):
    """A user deletes the slice, and another takes its place."""
    find = borrowed.own if cluster == REQUESTER else borrowed.remote
    before = find("resourceslices")["metadata"]
    path = path_of("resourceslices", before["namespace"], before["name"])
    site.apis[cluster].change("DELETE", path)

    def is_another():
        found = find("resourceslices")
        return found and found["metadata"]["uid"] != before["uid"]

    wait_until(is_another, LONGEST, explain=borrowed.explain)


def deny(site, borrowed):
    """Somebody in the provider's cluster writes the condition by hand."""
    found = borrowed.remote("resourceslices")["status"]["conditions"]
    denied = [one | {"status": "Denied"} if one["type"] == "Resources" else one for one in found]
    change = {"status": {"conditions": denied}}
    patch(site, PROVIDER, borrowed.reservation, change, "/status")


def raise_grant(site, borrowed):
    """Where there are no admission policies, the requester's identity in the provider's cluster may write the
    status of its slices. Here an administrator does so, whom the policy does not refuse."""
    resources = borrowed.granted | {"cpu": "64"}
    patch(site, PROVIDER, borrowed.reservation, {"status": {"resources": resources}}, "/status")


def is_granted_exactly(borrowed):
    granted = borrowed.remote("resourceslices").get("status", {}).get("resources")
    return granted == borrowed.granted and borrowed.has_exactly_what_is_reserved()


def test_reservations_that_administrators_end_take_nodes_and_pods_along(site):
    """One is released; for the other there is no provider left, because its own is drained."""
    released, drained = site.borrow_ready(2)
    with site.namespace(REMOTE) as team:
        released.run_pod("worker", team)
        site.wait_lent_pods(team, "worker")
        site.admin("release", released.reservation)
        released.wait_phase("Released")
        site.admin("drain", PROVIDER, "--yes", "--reason=maintenance")
        drained.wait_phase("Released")
        assert "drained" in drained.request["status"]["message"]
        wait_until(lambda: not released.node and not drained.node, LONGEST, explain=drained.explain)
        site.wait_lent_pods(team)
    site.admin("uncordon", PROVIDER)


def test_dead_provider_is_force_unpeered_and_cleans_up_when_it_is_back(site):
    api = site.apis[REQUESTER]
    with site.namespace() as team:
        [borrowed] = site.borrow_ready(namespace=team, namespaces=[team])
        run_kept_pod(site, borrowed, team)

        def left():
            return [one for one in site.leftovers(REQUESTER) if team not in one]

        with site.suspended(API_SERVER, PROVIDER):
            borrowed.release()
            wait_until(lambda: not left(), LONGEST, poll=0.5, explain=left)
            assert api.list("pods", team) == []
            wait_until(lambda: not api.list("namespaceoffloadings"), LONGEST, poll=0.1)
            wait_until(lambda: {"ProviderUnreachable", "ForceUnpeering"} <= borrowed.events())
    site.wait_clean()


def test_every_part_may_be_killed_and_clocks_be_a_minute_off(site):
    """While a reservation is connected and disconnected; the agents' clocks go in opposite directions."""
    site.wait_clean()
    borrowed = site.borrow()
    for step, part, cluster in (
        ("nonce", AGENT, REQUESTER),
        ("tenant", AGENT, PROVIDER),
        ("identity", BROKER, ""),
        ("slice", LIQO, REQUESTER),
        ("granted", LIQO, PROVIDER),
        ("virtual node", API_SERVER, PROVIDER),
    ):
        wait_step(borrowed, step)
        if part == AGENT:
            site.restart_with_skew(60 if cluster == PROVIDER else -60, part, cluster)
        else:
            site.restart(part, cluster)
    borrowed.wait_ready()
    borrowed.release()
    for step, part, cluster in (
        ("slice deleting", API_SERVER, REQUESTER),
        ("slice gone", AGENT, REQUESTER),
        ("node gone", AGENT, REQUESTER),
        ("identity gone", AGENT, REQUESTER),
    ):
        wait_step(borrowed, step)
        site.restart(part, cluster)
    borrowed.wait_released()
    site.restart(AGENT, PROVIDER)
    site.wait_clean()
    for cluster in (REQUESTER, PROVIDER):
        site.restart_with_skew(0, AGENT, cluster)
