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
    GRANTED,
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


def test_edited_slice_is_restored_and_never_gives_more(site):
    borrowed = site.borrow()
    borrowed.wait_ready()
    patch(site, REQUESTER, borrowed.reservation, {"spec": {"resources": {"cpu": "4"}}})

    def is_restored():
        assert not borrowed.has_more_than_reserved()
        asked = borrowed.own("resourceslices").get("spec", {}).get("resources")
        answer = condition(borrowed.remote("resourceslices"), "Resources")
        return asked == GRANTED and answer == "Accepted"

    wait_until(is_restored, LONGEST, explain=borrowed.explain)
    borrowed.wait_ready()
    borrowed.release()
    borrowed.wait_released()


@pytest.mark.parametrize("cluster", [REQUESTER, PROVIDER])
def test_deleted_slice_comes_back(site, cluster):
    borrowed = site.borrow()
    borrowed.wait_ready()
    find = borrowed.own if cluster == REQUESTER else borrowed.remote
    before = find("resourceslices")["metadata"]
    namespace = f"--namespace={before['namespace']}"
    site.kubectl(cluster, "delete", SLICES, borrowed.reservation, namespace, "--wait=false")

    def is_another():
        found = find("resourceslices")
        return found and found["metadata"]["uid"] != before["uid"]

    wait_until(is_another, LONGEST, explain=borrowed.explain)
    borrowed.wait_ready()
    borrowed.release()
    borrowed.wait_released()


def test_denied_slice_is_granted_again(site):
    """Somebody in the provider's cluster writes the condition by hand."""
    borrowed = site.borrow()
    borrowed.wait_ready()
    found = borrowed.remote("resourceslices")["status"]["conditions"]
    denied = [one | {"status": "Denied"} if one["type"] == "Resources" else one for one in found]
    change = {"status": {"conditions": denied}}
    patch(site, PROVIDER, borrowed.reservation, change, "--subresource=status")
    wait_until(
        lambda: condition(borrowed.own("resourceslices"), "Resources") == "Accepted",
        LONGEST,
        explain=borrowed.explain,
    )
    borrowed.wait_ready()
    borrowed.release()
    borrowed.wait_released()


def test_reservation_released_by_an_administrator_takes_its_node_and_pods_along(site):
    borrowed = site.borrow()
    borrowed.wait_ready()
    with borrowed.pod():
        site.admin("release", borrowed.reservation)
        borrowed.wait_phase("Released")
        wait_until(lambda: not borrowed.node, LONGEST, explain=borrowed.explain)
        wait_until(lambda: not borrowed.remote_pods(), LONGEST, explain=borrowed.explain)
    borrowed.release()
    borrowed.wait_released()


def test_drained_provider_without_another_ends_the_reservation_with_the_reason(site):
    borrowed = site.borrow()
    borrowed.wait_ready()
    site.admin("drain", PROVIDER, "--yes", "--reason=maintenance")
    borrowed.wait_phase("Released")
    assert "drained" in borrowed.request["status"]["message"]
    wait_until(lambda: not borrowed.node, LONGEST, explain=borrowed.explain)
    site.admin("uncordon", PROVIDER)
    borrowed.release()
    borrowed.wait_released()


@pytest.mark.parametrize("seconds", [60, -60], ids=["provider ahead", "provider behind"])
def test_clocks_may_be_a_minute_off(site, seconds):
    site.restart_with_skew(seconds, AGENT, PROVIDER)
    site.restart_with_skew(-seconds, AGENT, REQUESTER)
    borrowed = site.borrow()
    borrowed.wait_ready()
    borrowed.release()
    borrowed.wait_released()
    for cluster in (REQUESTER, PROVIDER):
        site.restart_with_skew(0, AGENT, cluster)


def test_ten_reservations_at_once_with_one_provider(site):
    found = [site.borrow(cpu="100m", memory="64Mi") for _ in range(10)]
    for borrowed in found:
        borrowed.wait_ready()
    for borrowed in found:
        borrowed.release()
    for borrowed in found:
        borrowed.wait_released()
