"""The broker as a person runs it in a cluster: by flags, watched by probes, and used with kubectl."""

import contextlib
import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

import brokers
import waiting
from kubelend.kube import config
from kubelend.stores.kubernetes.store import KubernetesStore
from waiting import PATIENCE, wait_until

pytestmark = pytest.mark.timeout(180)

EXAMPLES = Path(__file__).parents[2] / "examples" / "objects"
KUBELEND = Path(sys.executable).with_name("kubelend")


class Broker:
    """A process that serves objects, and nothing else."""

    def __init__(self, process, log):
        self.process = process
        self._log = log

    def log(self):
        whole, _, _ = self._log.read_text().rpartition("\n")
        return [json.loads(line) for line in whole.splitlines() if line.startswith("{")]

    def readiness(self):
        ports = [line["port"] for line in self.log() if line.get("component") == "probes"]
        if not ports:
            return 0, ""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{ports[0]}/readyz", timeout=5) as found:
                return found.status, found.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def wait_until(self, condition):
        def holds():
            found = condition()
            assert found or self.process.poll() is None, self._log.read_text()
            return found

        wait_until(holds, explain=lambda: (self.readiness(), self._log.read_text()))


@contextlib.contextmanager
def running(cluster, namespace, directory, *flags):
    path = directory / "broker.log"
    with path.open("wb") as log:
        process = subprocess.Popen(
            [
                *(KUBELEND, "broker", "--broker-interface=kubernetes"),
                *(f"--kubeconfig={cluster.admin_kubeconfig}", f"--http-namespace={namespace}"),
                *("--health-probe-bind-address=127.0.0.1:0", "--metrics-bind-address=0", *flags),
            ],
            stdout=log,
            stderr=log,
        )
    try:
        yield Broker(process, path)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.wait(PATIENCE)


def test_examples_are_served_and_pass_the_audit(kube, namespace, tmp_path):
    def kubectl(*arguments):
        return kube.kubectl(f"--namespace={namespace}", *arguments)

    with running(kube, namespace, tmp_path) as broker:
        broker.wait_until(lambda: broker.readiness() == (200, "ok"))
        kubectl("apply", f"--filename={EXAMPLES / 'cluster-advertisement.yaml'}")
        kubectl("wait", "--for=jsonpath={.status.active}=true", "clusteradvertisements", "--all")
        for name in ("reservation", "reservation-impossible"):
            kubectl("apply", f"--filename={EXAMPLES / name}.yaml")
        for name, phase in (("my-workload", "Reserved"), ("too-large", "Failed")):
            kubectl("wait", f"--for=jsonpath={{.status.phase}}={phase}", f"reservation/{name}")
        broker.wait_until(lambda: "6950m" in kubectl("get", "clusteradvertisements"))
        described = kubectl("describe", "reservation", "my-workload")
        assert "Resources locked in cluster fd32c7d2" in described
        broker.wait_until(lambda: "Reserved" in kubectl("get", "events"))
        kubectl("delete", "reservation", "my-workload", "too-large", "--timeout=20s")
        broker.wait_until(lambda: "8950m" in kubectl("get", "clusteradvertisements"))
        assert [line for line in broker.log() if line["logger"] == "kubelend.controllers"] == []
    store = f"kubernetes://{kube.admin_kubeconfig}?namespace={namespace}"
    done = subprocess.run(
        [KUBELEND, "audit", f"--store={store}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_missing_permissions_are_reported_by_the_probe(kube, namespace, tmp_path):
    kubeconfig = kube.kubeconfig_for("nobody")
    with running(kube, namespace, tmp_path, f"--store=kubernetes://{kubeconfig}") as broker:
        broker.wait_until(lambda: broker.readiness()[0] == 503)
        broker.wait_until(lambda: "forbidden" in broker.readiness()[1])


async def test_both_interfaces_are_served_at_once(kube, namespace, certificates):
    found = config.config_from_kubeconfig(kube.admin_kubeconfig)
    async with brokers.running(
        certificates,
        open_store=lambda: KubernetesStore.open(found, namespace),
        broker_interface="kubernetes,http",
        store=f"kubernetes://{kube.admin_kubeconfig}",
        http_namespace=namespace,
    ) as broker:
        manager = broker.process.controller_manager
        assert manager is not None
        await waiting.until(lambda: manager.unready is None)
        await broker.cluster("lender").advertise()
        kube.kubectl(
            f"--namespace={namespace}", "apply", f"--filename={EXAMPLES / 'reservation.yaml'}"
        )
        await waiting.until(lambda: "my-workload" in broker.service.current()[0].reservations)
        held = await broker.cluster("user-team").read("reservations", "my-workload")
        assert held["targetClusterID"] == "lender"
