"""Brokers as processes, killed while reservations are asked for over REST and applied as objects.

Whenever that happens, whoever comes next finds one lock for each object that was answered, or none.
"""

import asyncio
import contextlib
import random
from collections import Counter
from functools import partial

import pytest
import yaml

import broker_process
import kube_faults
from kube_faults import CPUS, LIVE, eventually
from kubelend.envtest import assets
from kubelend.wire.broker_objects import Reservation

pytestmark = pytest.mark.timeout(240)

KILLS = 10
WISHES = 24


def flags(kube, namespace, identity):
    return broker_process.election_flags(kube, namespace, identity, 3, 2, 0.5)


def kill(broker):
    broker.process.kill()
    broker.process.wait()


async def test_broker_killed_at_any_moment_leaves_one_lock_or_none(
    kube, namespace, certificates, tmp_path
):
    """Started anew at the same address each time, and with the same name: so it has not to wait."""
    port, dice = assets.free_port(), random.Random(7)
    options = (*flags(kube, namespace, "only"), f"--http-port={port}")

    def running():
        return broker_process.running(certificates.server(), tmp_path, *options)

    async with contextlib.AsyncExitStack() as stack:
        broker = await asyncio.to_thread(stack.enter_context, running())
        urls = [f"https://localhost:{port}"]
        load = await stack.enter_async_context(
            kube_faults.loading(kube, namespace, urls, certificates)
        )
        await load.offer()

        async def kill_again_and_again():
            nonlocal broker
            for _ in range(KILLS):
                enough = load.answered + dice.randrange(12)
                await eventually(partial(has_answered, load, enough))
                await asyncio.sleep(dice.random() / 10)
                await asyncio.to_thread(kill, broker)
                broker = await asyncio.to_thread(stack.enter_context, running())

        promised = await load.under(kill_again_and_again)
        await load.check(promised)
        await asyncio.to_thread(kill, broker)


def wishes(namespace):
    """A document for each, as one would hand it to kubectl."""
    return yaml.safe_dump_all(
        {
            "apiVersion": "broker.fluidos.eu/v1alpha1",
            "kind": "Reservation",
            "metadata": {"name": f"wish-{number}", "namespace": namespace},
            "spec": {"requestedResources": {"cpu": "1", "memory": "1Gi"}, "requesterID": "me"},
        }
        for number in range(WISHES)
    )


async def test_leader_killed_while_objects_are_applied_leaves_each_in_one_phase(
    kube, namespace, certificates, tmp_path
):
    documents = tmp_path / "wishes.yaml"
    documents.write_text(wishes(namespace))
    async with contextlib.AsyncExitStack() as stack:
        brokers = []
        for name in ("first", "second"):
            directory = tmp_path / name
            directory.mkdir()
            running = broker_process.running(
                certificates.server(), directory, *flags(kube, namespace, name)
            )
            brokers.append(await asyncio.to_thread(stack.enter_context, running))
        urls = [broker.url for broker in brokers]
        load = await stack.enter_async_context(
            kube_faults.loading(kube, namespace, urls, certificates)
        )
        await load.offer()
        applying = asyncio.create_task(
            asyncio.to_thread(kube.kubectl, "apply", f"--filename={documents}")
        )
        await load.shows(Reservation, "wish-1", lambda one: one.status.phase != "")
        await asyncio.to_thread(kill, brokers[0])
        await applying
        found = [
            await load.shows(Reservation, f"wish-{number}", lambda one: one.status.phase != "")
            for number in range(WISHES)
        ]
        phases = Counter(one.status.phase for one in found)
        assert phases == {"Reserved": 2 * CPUS, "Failed": WISHES - 2 * CPUS}
        await load.check({one.metadata.name for one in found if one.status.phase in LIVE})
        for one in found:
            told = Counter(reason for reason, _ in await load.objects.events(one.metadata.name))
            assert set(told) <= {one.status.phase}
            assert told.total() <= 2


def has_answered(load, enough):
    return load.answered >= enough
