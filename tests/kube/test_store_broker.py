"""A broker on the Kubernetes store, from outside: over REST, through `kill -9`, and under audit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import broker_process
from kubelend.kube import resources
from kubelend.transports.client import BrokerClient
from kubelend.wire import bodies, broker_objects

REQUEST = bodies.ReservationRequest(bodies.Quantities("2", "2Gi"), duration="1h")


def offer(name):
    return bodies.Advertisement(name, bodies.Metrics(bodies.Quantities("4", "4Gi")))


@pytest.fixture
def store(place):
    return place.url


def kubelend(*arguments):
    """What a command prints as JSON."""
    program = Path(sys.executable).with_name("kubelend")
    done = subprocess.run([program, *arguments], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


async def reserve(url, certificates):
    async with (
        BrokerClient(url, certificates.cluster("lender")) as lender,
        BrokerClient(url, certificates.cluster("borrower")) as borrower,
    ):
        await lender.publish(offer("lender"))
        found = await borrower.reserve(REQUEST, key="k")
        await lender.acknowledge(found.id)
        return await borrower.activate(found.id)


async def test_what_was_answered_survives_a_kill(certificates, tmp_path, kube_client, place, store):
    # Under the name that it had, it takes its own lease up again at once.
    named = "--leader-elect-identity=broker-0"
    flags = (certificates.server(), tmp_path, f"--store={store}", named)
    with broker_process.running(*flags) as broker:
        active = await reserve(broker.url, certificates)
        assert kubelend("audit", "--json", "--store", store)["violations"] == 0
        broker.process.kill()
        broker.process.wait()
    report = kubelend("audit", "--json", "--store", store)
    assert (report["violations"], report["live"], report["clusters"]) == (0, 1, 1)
    assert kubelend("audit", "verify", "--json", "--store", store)["breaks"] == 0
    with broker_process.running(*flags) as broker:
        async with BrokerClient(broker.url, certificates.cluster("borrower")) as borrower:
            assert await borrower.reserve(REQUEST, key="k") == active
            await borrower.release(active.id)
    kind = resources.resource_for(broker_objects.Reservation)
    found = await kube_client.find(kind, active.id, place.namespace)
    assert (found.status.phase, found.spec.target_cluster_id) == ("Released", "lender")
    assert kubelend("audit", "--json", "--store", store)["live"] == 0
