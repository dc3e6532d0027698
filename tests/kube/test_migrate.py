"""docs/migrate.md, command by command, on an API server with the CRDs and the objects of the Go broker."""

import asyncio
import os
import re
import secrets
import shlex
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import yaml

import broker_process
import charts
import published_objects
from callers import Caller
from kube_stores import Place
from kubelend.core.errors import StoreFailed
from kubelend.envtest import servers
from published_objects import ADVERTISEMENTS, RESERVATIONS, PublishedObjects
from waiting import PATIENCE, wait_until

pytestmark = [pytest.mark.timeout(240), pytest.mark.kube]

GUIDE = charts.ROOT / "docs" / "migrate.md"
GO_CRDS = "liqo-resource-broker/config/crd/bases"


@pytest.fixture
def home(tmp_path, certificates, monkeypatch):
    """Where a reader is: with our deploy/, the certificates, and a checkout of the Go broker."""
    (tmp_path / "deploy").symlink_to(charts.DEPLOY)
    (tmp_path / "certs").symlink_to(certificates.server())
    (tmp_path / GO_CRDS).mkdir(parents=True)
    (tmp_path / GO_CRDS / "all.yaml").write_text(yaml.safe_dump_all(published_objects.crds()))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def cluster(lab):
    [cluster] = lab.start(f"migrate-{secrets.token_hex(4)}")
    servers.create_crds(cluster, published_objects.crds())
    yield cluster
    cluster.kill()


@pytest.fixture
def shell(cluster, monkeypatch):
    paths = (cluster.assets.kubectl.parent, Path(sys.executable).parent)
    monkeypatch.setenv("PATH", ":".join([*map(str, paths), os.environ["PATH"]]))
    monkeypatch.setenv("KUBECONFIG", str(cluster.admin_kubeconfig))
    monkeypatch.setenv("KUBECACHEDIR", str(cluster.directory / "kubectl"))

    def shell(script):
        command = ["bash", "-euo", "pipefail", "-c", script]
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=4 * PATIENCE
        )
        assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return shell


@pytest.fixture
def published(cluster):
    place = Place(cluster)
    place.namespace = "default"
    return PublishedObjects(place)


def advertise(url, certificates):
    async def call():
        agent = Caller(int(url.rpartition(":")[2]), certificates.cluster("paris"), "paris")
        try:
            await agent.advertise(cpu="8", memory="64Gi")
        finally:
            await agent.hang_up()

    asyncio.run(call())


def test_guide_leads_there_and_back(shell, home, published, certificates):
    published.advertise("paris", counted="99")
    published.reserve("rsv-rome-1", cpu="3")
    published.reserve("for-ever", cpu="1", duration="")
    published.reserve("rejected", phase="Failed")
    prepare, start, check, back = re.findall(
        r"```bash\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL
    )
    ledger_records = "deploy/crds/broker.fluidos.eu_ledgerrecords.yaml"
    shell(
        f"kubectl apply -f {ledger_records} && kubectl wait --for=condition=Established -f {ledger_records}"
    )
    with (
        closing(published.place.open()) as store,
        pytest.raises(StoreFailed, match=r"has no status\.record.*kubectl apply -f deploy/crds"),
    ):
        store.load()
    shell(prepare)
    flags = shlex.split(start)[2:]
    with broker_process.running(certificates.server(), home, *flags) as broker:
        advertise(broker.url, certificates)
        assert "rsv-rome-1" in shell(check)
        advertise(broker.url, certificates)
        wait_until(lambda: published.find(ADVERTISEMENTS, "paris-adv") is not None)
        offer = published.find(ADVERTISEMENTS, "paris-adv")
        assert offer.spec.resources.capacity.cpu == "8"
    assert "live reservations: 2" in shell(back)
    [offer] = published.list(ADVERTISEMENTS)
    assert offer["spec"]["resources"]["reserved"]["cpu"] == "4"
    phases = {one["metadata"]["name"]: one["status"] for one in published.list(RESERVATIONS)}
    assert phases["rsv-rome-1"].keys() <= set(published_objects.FIELDS["reservations"][1])
    assert phases["rsv-rome-1"]["phase"] == phases["for-ever"]["phase"] == "Reserved"
    assert "expiresAt" not in phases["for-ever"]
    assert phases["rejected"]["phase"] == "Failed"
