"""Where `kubectl lend` looks in a cluster: by what is defined there, and by where a broker keeps records."""

import json
import secrets

import pytest

import lend_plugin
from kubelend.envtest import servers
from kubelend.kube import resources
from kubelend.wire import cluster_namespaces, crds
from kubelend.wire.broker_objects import ClusterAdvertisement, Reservation
from kubelend.wire.objects import ResourceRequest

pytestmark = pytest.mark.timeout(120)

AMOUNTS = {"cpu": "4", "memory": "8Gi"}
RECORD = {"revision": 1, "checksum": "0", "data": "{}"}


@pytest.fixture
def bare(lab):
    """A cluster that knows none of our kinds yet."""
    [cluster] = lab.start(f"bare-{secrets.token_hex(4)}")
    yield cluster
    cluster.kill()


@pytest.fixture
def operator(bare, tmp_path):
    return lend_plugin.person(bare.assets, bare.admin_kubeconfig, tmp_path)


def define(cluster, *kinds):
    paths = [cluster.directory / f"{kind.plural}.json" for kind in kinds]
    for kind, path in zip(kinds, paths, strict=True):
        path.write_text(json.dumps(crds.crd(kind)))
    servers.apply_manifests(cluster, paths)


def make(cluster, namespace, **labels):
    metadata = {"name": namespace, "labels": labels}
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}
    cluster.call("POST", "/api/v1/namespaces", json.dumps(body).encode())


def keep(cluster, namespace, name):
    """An advertisement as a broker has it in its own namespace."""
    shares = dict.fromkeys(("capacity", "allocated", "available"), AMOUNTS)
    found = {
        "apiVersion": f"{ClusterAdvertisement.group}/{ClusterAdvertisement.version}",
        "kind": ClusterAdvertisement.kind,
        "metadata": {"name": f"{name}-adv", "namespace": namespace},
        "spec": {"clusterID": name, "resources": shares},
    }
    path = resources.resource_for(ClusterAdvertisement).path(namespace)
    found = json.loads(cluster.call("POST", path, json.dumps(found).encode()))
    found["status"] = {"phase": "Active", "active": True, "score": "50.00", "record": RECORD}
    cluster.call("PUT", f"{path}/{name}-adv/status", json.dumps(found).encode())


def test_cluster_without_our_kinds_is_told_from_one_that_is_empty(bare, operator):
    said = operator.lend("get", "reservations")
    assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert f"the cluster of context '{bare.name}' serves neither ResourceRequests nor" in said.err
    assert (
        "install Kubelend there (docs/deploy.md), or select another with --kube-context" in said.err
    )
    define(bare, ResourceRequest)
    said = operator.lend("get", "reservations")
    assert said == (0, "", "No reservations found in namespace default.\n")


def test_brokers_namespace_is_found_unless_there_are_several(bare, operator):
    define(bare, ClusterAdvertisement, Reservation)
    assert operator.lend("get", "clusters").err == "No clusters found in namespace default.\n"
    make(bare, "lending")
    keep(bare, "lending", "rome")
    assert operator.lend("get", "clusters", "-oname").out == "cluster/rome\n"
    assert (
        operator.lend("get", "reservations").err == "No reservations found in namespace lending.\n"
    )

    make(bare, "other")
    keep(bare, "other", "oslo")
    said = operator.lend("get", "clusters")
    assert (said.code, said.out) == (2, "")
    assert "brokers in the namespaces lending, other; select one with --namespace" in said.err
    assert operator.lend("get", "clusters", "-oname", "-nother").out == "cluster/oslo\n"


def test_where_both_kinds_are_the_brokers_namespace_is_the_brokers(bare, operator):
    define(bare, ClusterAdvertisement, Reservation, ResourceRequest)
    make(bare, "lending")
    keep(bare, "lending", "rome")
    want = ("borrow", "--cpu=1", "--memory=1Gi", "--timeout=1s")
    assert "Not reconciled by a broker yet" in operator.lend(*want, "-nlending").err
    assert "Not reconciled by an agent yet" in operator.lend(*want).err
    assert operator.lend("get", "clusters", "-oname").out == "cluster/rome\n"


def test_who_borrows_in_a_mailbox_is_the_cluster_whose_it_is(bare, operator):
    define(bare, ClusterAdvertisement, Reservation)
    make(bare, "mail-7", **{cluster_namespaces.CLUSTER_LABEL: "rome"})
    make(bare, "team")
    for namespace in ("mail-7", "team"):
        wish = {
            "apiVersion": f"{Reservation.group}/{Reservation.version}",
            "kind": Reservation.kind,
            "metadata": {"name": "mine", "namespace": namespace},
            "spec": {"requestedResources": AMOUNTS},
        }
        path = resources.resource_for(Reservation).path(namespace)
        bare.call("POST", path, json.dumps(wish).encode())

    def requesters(*flags):
        found = json.loads(operator.lend("get", "reservations", "-ojson", *flags).out)
        return [(one["id"], one["requesterID"]) for one in found["items"]]

    assert requesters("-nmail-7") == requesters("-nmail-7", "--cluster=rome") == [("mine", "rome")]
    assert requesters("-nteam") == [("mine", "team")]
    assert requesters("-A") == [("mail-7/mine", "rome"), ("team/mine", "team")]
