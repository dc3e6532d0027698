"""Reservations that end in a virtual node, while parts are killed, objects changed and clocks wrong.

Each case ends as promised: Ready with exactly what is reserved, or ended with the reason; nothing is left.
One lab serves all of them. `make liqo-faults` runs the whole matrix (`liqo_fault_matrix.py`).
"""

import json

import pytest

import liqo_sites
from liqo_sites import (
    AGENT,
    API_SERVER,
    BROKER,
    LIQO,
    LONGEST,
    PROVIDER,
    REQUESTER,
    condition,
    wait_step,
)
from waiting import wait_until

pytestmark = [pytest.mark.timeout(600), pytest.mark.kube]

SLICES = "resourceslices.authentication.liqo.io"


@pytest.fixture(scope="module")
def site(kube_assets, liqo_assets, tmp_path_factory):
    with liqo_sites.started(tmp_path_factory.mktemp("faults") / "clusters", kube_assets) as site:
        yield site


@pytest.fixture(autouse=True)
def clean(site):
    """Every test leaves nothing in any cluster, and an audit without findings."""
    yield
    site.check_clean()


def patch(site, cluster, reservation, change, *flags):
    """Changes a slice as a user with kubectl does."""
    other = PROVIDER if cluster == REQUESTER else REQUESTER
    namespace = f"--namespace=liqo-tenant-{other}"
    command = ("patch", SLICES, reservation, namespace, "--type=merge", *flags)
    site.kubectl(cluster, *command, f"--patch={json.dumps(change)}")


def test_every_part_may_be_killed_while_a_reservation_is_connected_and_disconnected(site):
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
        site.restart(part, cluster)
    borrowed.wait_ready()
    borrowed.release()
    for step, part, cluster in (
        ("slice deleting", API_SERVER, REQUESTER),
        ("node gone", AGENT, REQUESTER),
        ("identity gone", AGENT, PROVIDER),
    ):
        wait_step(borrowed, step)
        site.restart(part, cluster)
    borrowed.wait_released()


def test_slices_that_users_change_are_restored_and_never_give_more(site):
    edited, deleted, taken, denied = (site.borrow(cpu="200m") for _ in range(4))
    for borrowed in (edited, deleted, taken, denied):
        borrowed.wait_ready()
    edit(site, edited)
    delete(site, deleted, REQUESTER)
    delete(site, taken, PROVIDER)
    deny(site, denied)
    wait_until(lambda: is_restored(edited), LONGEST, explain=edited.explain)
    wait_until(lambda: is_accepted(denied), LONGEST, explain=denied.explain)
    for borrowed in (edited, deleted, taken, denied):
        borrowed.wait_ready()
        borrowed.release()
    for borrowed in (edited, deleted, taken, denied):
        borrowed.wait_released()


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
    namespace = f"--namespace={before['namespace']}"
    site.kubectl(cluster, "delete", SLICES, before["name"], namespace, "--wait=false")

    def is_another():
        found = find("resourceslices")
        return found and found["metadata"]["uid"] != before["uid"]

    wait_until(is_another, LONGEST, explain=borrowed.explain)


def deny(site, borrowed):
    """Somebody in the provider's cluster writes the condition by hand."""
    found = borrowed.remote("resourceslices")["status"]["conditions"]
    denied = [one | {"status": "Denied"} if one["type"] == "Resources" else one for one in found]
    change = {"status": {"conditions": denied}}
    patch(site, PROVIDER, borrowed.reservation, change, "--subresource=status")


def test_reservations_that_administrators_end_take_nodes_and_pods_along(site):
    """One is released; for the other there is no provider left, because its own is drained."""
    released, drained = site.borrow(), site.borrow()
    for borrowed in (released, drained):
        borrowed.wait_ready()
    with released.pod():
        site.admin("release", released.reservation)
        released.wait_phase("Released")
        site.admin("drain", PROVIDER, "--yes", "--reason=maintenance")
        drained.wait_phase("Released")
        assert "drained" in drained.request["status"]["message"]
        wait_until(lambda: not released.node and not drained.node, LONGEST, explain=drained.explain)
        wait_until(lambda: not released.remote_pods(), LONGEST, explain=released.explain)
    site.admin("uncordon", PROVIDER)
    for borrowed in (released, drained):
        borrowed.release()
        borrowed.wait_released()


def test_clocks_may_be_a_minute_off(site):
    liqo_sites.check_skew(site, 60)
