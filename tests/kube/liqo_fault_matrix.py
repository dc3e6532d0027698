"""Every part of two clusters with Liqo, killed after every step of a reservation: `make liqo-proofs`.

An hour on two cores. `test_liqo_faults.py` has a few of these cases for every run.
"""

import itertools

import pytest

import liqo_sites
from labs import (
    AGENT,
    API_SERVER,
    BROKER,
    KUBELETS,
    LIQO,
    LONGEST,
    PROVIDER,
    REQUESTER,
    path_of,
)
from liqo_sites import CONNECTING, DISCONNECTING, OTHER, REMOTE, wait_step
from waiting import wait_until

pytestmark = [pytest.mark.timeout(900), pytest.mark.kube]

PARTS = [
    (AGENT, REQUESTER),
    (AGENT, PROVIDER),
    (BROKER, ""),
    (LIQO, REQUESTER),
    (LIQO, PROVIDER),
    (API_SERVER, REQUESTER),
    (API_SERVER, PROVIDER),
    (KUBELETS, REQUESTER),
]


def cases():
    """Each part after each step; one reservation serves a step of both directions."""
    for part, cluster in PARTS:
        connecting = list(CONNECTING)[-2:] if part == KUBELETS else list(CONNECTING)
        disconnecting = ["deleted"] if part == KUBELETS else list(DISCONNECTING)
        for up, down in zip(connecting, itertools.cycle(disconnecting), strict=False):
            name = " of ".join(filter(None, (part, cluster)))
            yield pytest.param(part, cluster, up, down, id=f"{name}, {up}, {down}")


@pytest.fixture(scope="module")
def site(kube_assets, liqo_assets, tmp_path_factory):
    directory = tmp_path_factory.mktemp("faults") / "clusters"
    with liqo_sites.started(directory, "--third-agent") as site:
        yield site


@pytest.fixture(autouse=True)
def clean(site):
    yield
    site.check_clean()


@pytest.mark.parametrize("part, cluster, connecting, disconnecting", list(cases()))
def test_part_is_killed(site, part, cluster, connecting, disconnecting):
    borrowed = site.borrow(provider=PROVIDER)
    wait_step(borrowed, connecting)
    site.restart(part, cluster)
    borrowed.wait_ready()
    borrowed.release()
    wait_step(borrowed, disconnecting)
    site.restart(part, cluster)
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


def test_two_requesters_with_one_provider(site):
    """Each has a Tenant of its own, and the end of one does not touch the other."""
    first, second = (site.borrow(one, provider=PROVIDER) for one in (REQUESTER, OTHER))
    for borrowed in (first, second):
        borrowed.wait_ready()
    first.release()
    first.wait_released()
    wait_step(first, "tenant gone")
    second.wait_ready()
    assert second.remote("tenants", OTHER)
    second.release()
    second.wait_released()


def test_fifty_reservations_with_one_provider(site):
    """Each has a node with exactly what it reserved, and the sum is what the provider lends."""
    found = [site.borrow(cpu="100m", memory="64Mi", provider=PROVIDER) for _ in range(50)]
    for borrowed in found:
        borrowed.wait_ready()
    for borrowed in found:
        borrowed.release()
    for borrowed in found:
        borrowed.wait_released()


def test_drained_provider_is_replaced_by_another(site):
    borrowed = site.borrow()
    borrowed.wait_ready()
    assert borrowed.provider == PROVIDER
    site.admin("drain", PROVIDER, "--yes", "--reason=maintenance")
    wait_until(lambda: borrowed.provider == OTHER, LONGEST, explain=borrowed.explain)
    borrowed.wait_ready()
    site.admin("uncordon", PROVIDER)
    borrowed.release()
    borrowed.wait_released()


def test_revoked_requester_loses_its_pods_without_its_help(site):
    """Its agent is rejected by the broker, so that only the provider can end it."""
    [borrowed] = site.borrow_ready()
    with site.namespace(REMOTE) as team:
        borrowed.run_pod("worker", team)
        site.wait_lent_pods(team, "worker")
        site.admin("revoke", REQUESTER, "--release", "--yes", "--reason=laptop stolen")
        site.wait_lent_pods(team)
        wait_until(lambda: not borrowed.quotas(), LONGEST, explain=borrowed.explain)
    site.rejoin(REQUESTER)
    borrowed.wait_phase("Released")
    borrowed.release()
    borrowed.wait_released()


@pytest.mark.parametrize(
    "step", ["reserved", "nonce", "signed nonce", "tenant", "identity", "slice", "granted"]
)
def test_released_before_it_was_ready(site, step):
    """What the handshake has created until then is removed, too."""
    borrowed = site.borrow()
    wait_step(borrowed, step)
    borrowed.release()
    borrowed.wait_released()


@pytest.mark.parametrize("step", list(DISCONNECTING))
def test_borrowed_again_while_the_peering_is_removed(site, step):
    """The requester may still have an identity which the provider has removed already."""
    first = site.borrow()
    first.wait_ready()
    first.release()
    wait_step(first, step)
    second = site.borrow()
    second.wait_ready()
    second.release()
    second.wait_released()


def test_namespace_is_deleted_with_its_request(site):
    """Liqo removes its copy in the provider only while there is a peering, which waits for that."""
    requester, provider = site.apis[REQUESTER], site.apis[PROVIDER]
    with site.namespace() as team:
        [borrowed] = site.borrow_ready(provider=PROVIDER, namespace=team, namespaces=[team])
        copy = f"{team}-{REQUESTER}"
        wait_until(lambda: provider.get(path_of("namespaces", name=copy)), LONGEST, poll=0.1)
        metadata = {"name": "slow", "namespace": copy, "finalizers": ["example.org/slow"]}
        provider.create("secrets", {"kind": "Secret", "metadata": metadata})
        requester.change("DELETE", path_of("namespaces", name=team))

        def waits():
            [found] = [
                one
                for one in requester.list("reservationinstructions")
                if one["spec"]["reservationName"] == borrowed.reservation
            ]
            peered = [one for one in found["status"]["conditions"] if one["type"] == "Peered"]
            return "copies of namespaces" in peered[0]["message"]

        wait_until(waits, LONGEST, poll=0.1, explain=borrowed.explain)
        assert borrowed.own("identities", f"controlplane-{PROVIDER}")
        assert borrowed.remote("tenants", REQUESTER)
        change = {"metadata": {"finalizers": None}}
        provider.change("PATCH", path_of("secrets", copy, "slow"), change)
    borrowed.wait_released()


@pytest.mark.parametrize("part, cluster", PARTS[:5])
@pytest.mark.parametrize("step", ["nonce", "tenant", "slice"])
def test_released_while_a_part_is_down(site, part, cluster, step):
    borrowed = site.borrow()
    wait_step(borrowed, step)
    restart = site.kill(part, cluster)
    borrowed.release()
    restart()
    borrowed.wait_released()
