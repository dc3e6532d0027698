"""Reservations that end in a virtual node, with Liqo's own programs, Kubernetes' scheduler and our agents."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from labs import AGENT, LONGEST, REQUESTER, path_of
from liqo_sites import LOCAL, REMOTE
from waiting import PATIENCE, wait_until

pytestmark = [pytest.mark.timeout(300), pytest.mark.kube]

GRANT = "kubelend.io/grant"


def test_pod_runs_in_the_provider_and_nothing_is_left(site):
    code, out, err = site.lab("test")
    assert (code, err) == (0, ""), out
    shown = " ".join(out.split())
    steps = [
        "placeholders hold all of it",
        "CPU is Pending: it needs held room",
        "Tenant admitted",
        "Identity established",
        "ResourceSlice created",
        "ResourceSlice granted",
        "Quota of 500m CPU / 256Mi Memory set",
        "Node is Ready with exactly 500m CPU / 256Mi Memory",
        "ResourceRequest is Active",
        "scheduled onto the virtual node",
        "the same pod is Running",
        "CPU is still Pending",
        "second pod of 300m CPU refused: 0/3 nodes are available: 1 Insufficient cpu",
        "CPU is Running",
        "virtual node removed",
        "nothing of Liqo is left",
    ]
    assert [step for step in steps if step not in shown] == []
    assert sorted(steps, key=shown.index) == steps
    assert max(map(len, out.splitlines())) <= 80


def forge(site, own, name, grant):
    """Another slice beside one that was accepted."""
    metadata = {key: own["metadata"][key] for key in ("namespace", "labels")}
    annotations = {"liqo.io/create-virtual-node": "true", GRANT: grant}
    spec = {key: own["spec"][key] for key in ("class", "providerClusterID", "resources")}
    forged = {
        "kind": own["kind"],
        "metadata": metadata | {"name": name, "annotations": annotations},
        "spec": spec,
    }
    site.apis[REQUESTER].create("resourceslices", forged)


def delete_slice(site, own, name):
    path = path_of("resourceslices", own["metadata"]["namespace"], name)
    site.apis[REQUESTER].change("DELETE", path)
    wait_until(lambda: not site.apis[REQUESTER].get(path), LONGEST, poll=0.1)


def wait_answer(site, own, name, message):
    """Waits for the provider's answer to a slice, as the requester sees it."""
    path = path_of("resourceslices", own["metadata"]["namespace"], name)

    def answer():
        conditions = site.apis[REQUESTER].get(path).get("status", {}).get("conditions", [])
        return [one["message"] for one in conditions if one["type"] == "Resources"]

    wait_until(lambda: answer() == [message], LONGEST, poll=0.1, explain=answer)


def test_only_slices_with_their_own_grant_have_a_node(site):
    """Others are denied with the reason: replayed for a reservation that does not exist, or of another
    slice; forged; or none at all."""
    first, second = site.borrow_ready(2)
    both = {one.reservation: one.granted for one in (first, second)}
    assert site.virtual_nodes() == both
    own, other = first.own("resourceslices"), second.own("resourceslices")
    granted = own["metadata"]["annotations"][GRANT]
    forge(site, own, "replayed", granted)
    wait_answer(site, own, "replayed", "this cluster holds no reservation replayed")
    delete_slice(site, own, "replayed")

    header, claims, signature = other["metadata"]["annotations"][GRANT].split(".")
    answers = {
        granted: f"the grant is of reservation {first.reservation}",
        f"{header}.{claims}.{signature[::-1]}": "grant has an invalid signature",
        "": "the slice has no grant of the broker",
    }
    with site.suspended(AGENT, REQUESTER):  # it would put back what it has created
        for grant, message in answers.items():
            delete_slice(site, other, second.reservation)
            forge(site, other, second.reservation, grant)
            wait_answer(site, other, second.reservation, message)
            wait_until(lambda: [*site.virtual_nodes()] == [first.reservation], poll=0.1)
        delete_slice(site, other, second.reservation)
    wait_until(lambda: site.virtual_nodes() == both, LONGEST, poll=0.1, explain=second.explain)
    first.release()
    first.wait_released()
    assert site.virtual_nodes() == {second.reservation: second.granted}


def test_requester_that_keeps_its_slice_loses_it_and_no_other_one(site):
    """After the end no new pods at once, and after a time none at all; its other reservation goes on."""
    ended, kept = site.borrow_ready(2)
    with site.namespace(REMOTE) as work:
        ended.run_pod("old", work)
        kept.run_pod("stays", work)
        site.wait_lent_pods(work, "old", "stays")
        with site.suspended(AGENT, REQUESTER):
            site.run_as(REQUESTER, "release", ended.reservation)
            wait_until(lambda: ended.quotas()[0]["spec"].get("cordoned") is True, poll=0.1)
            ended.run_pod("late", work)
            site.wait_lent_pods(work, "stays")
            wait_until(lambda: not ended.quotas(), LONGEST, poll=0.1)
            kept.run_pod("new", work)
            site.wait_lent_pods(work, "stays", "new")
            assert [one["spec"]["resources"]["cpu"] for one in kept.quotas()] == ["500m"]


def test_namespaces_are_offloaded_while_a_reservation_names_them(site):
    def offloadings():
        return {one["metadata"]["namespace"]: one for one in api.list("namespaceoffloadings")}

    api = site.apis[REQUESTER]
    with site.namespace() as shared, site.namespace(LOCAL) as mine:
        first, second = (site.borrow(namespace=shared, namespaces=[shared]) for _ in range(2))
        own = site.borrow(namespace=mine, namespaces=[mine])
        for one in (first, second, own):
            one.wait_ready()
        assert offloadings().keys() == {mine, shared}
        for one in (first, own):
            one.release()
            one.wait_released()
        assert offloadings().keys() == {mine, shared}
        second.release()
        wait_until(lambda: offloadings().keys() == {mine}, LONGEST, poll=0.1, explain=offloadings)
        found = offloadings()[mine]
        assert found["spec"]["podOffloadingStrategy"] == LOCAL
        assert found["metadata"].get("labels", {}) == {}


def test_ten_lines_of_the_readme_run_a_pod_in_the_other_cluster(site):
    """All but the first two, which start the clusters and name their kubeconfig."""
    root = Path(__file__).parents[2]
    _, _, rest = (
        (root / "README.md").read_text("utf-8").partition("## On real Kubernetes API servers")
    )
    [block] = re.findall(r"^```bash\n(.*?)^```$", rest.partition("\n## ")[0], re.M | re.S)
    first, second, *lines = block.splitlines()
    assert len(lines) == 8
    assert first.startswith("make clusters ")
    assert second.startswith("export KUBECONFIG=")
    environment = {
        **os.environ,
        "KUBECONFIG": str(site.directory / "kubeconfig"),
        "PATH": f"{Path(site.record['kubectl']).parent}{os.pathsep}{os.environ['PATH']}",
    }
    done = subprocess.run(
        ["bash", "-euc", "\n".join(lines)],
        env=environment,
        cwd=root,
        capture_output=True,
        text=True,
        timeout=8 * PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^hello +1/1 +Running ", done.stdout, re.M)
    site.kubectl(REQUESTER, "delete", "--filename=examples/liqo/")
    site.kubectl(REQUESTER, "delete", "namespace", "demo")


def test_no_secret_of_the_handshake_is_logged(site):
    texts = [path.read_text() for path in site.directory.glob("*.log")]
    assert len(texts) >= 4
    assert not [
        found for text in texts for found in re.findall(r"LS0tLS1CRUdJTi|PRIVATE KEY", text)
    ]
