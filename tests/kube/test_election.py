"""Who leads, agreed on a real API server; only time is the test's."""

import asyncio
from datetime import timedelta

import pytest

import make
from kubelend.core.errors import Forbidden
from kubelend.kube import config
from kubelend.kube.client import Client
from kubelend.kube.leader_election import LEASES, LeaderElection, LeaseIdentity, LeaseTimings
from waiting import PATIENCE, until

TIMES = LeaseTimings(timedelta(seconds=15), timedelta(seconds=10), timedelta(seconds=2))


class Watch:
    """Seconds that pass when the test says so."""

    def __init__(self):
        self.seconds = 1000.0

    def __call__(self):
        return self.seconds

    @property
    def passed(self):
        return timedelta(seconds=self.seconds)


@pytest.fixture
def watch():
    return Watch()


@pytest.fixture
def candidate(kube_client, namespace, watch):
    def candidate(identity, times=TIMES, client=kube_client):
        chosen = LeaseIdentity(identity, namespace)
        return LeaderElection(client, chosen, times, lambda: make.T0 + watch.passed, watch)

    return candidate


async def lease(client, namespace):
    return (await client.find(LEASES, "kubelend-broker", namespace)).spec


async def test_the_first_leads_and_the_second_sees_whom_to_ask(candidate, kube_client, namespace):
    first, second = candidate("broker-1"), candidate("broker-2")
    await first.try_acquire_or_renew()
    await second.try_acquire_or_renew()
    assert (first.is_leader, second.is_leader) == (True, False)
    assert (first.leader, second.leader) == ("broker-1", "broker-1")
    found = await lease(kube_client, namespace)
    assert (found.lease_duration_seconds, found.lease_transitions) == (15, 0)


async def test_of_many_at_once_one_leads(candidate):
    many = [candidate(f"broker-{number}") for number in range(8)]
    for _ in range(2):
        await asyncio.gather(*(one.try_acquire_or_renew() for one in many))
    assert sum(one.is_leader for one in many) == 1
    assert len({one.leader for one in many}) == 1


async def test_a_leader_that_renews_leads_on_however_long_it_takes(candidate, watch):
    first, second = candidate("broker-1"), candidate("broker-2")
    for _ in range(10):
        await first.try_acquire_or_renew()
        await second.try_acquire_or_renew()
        assert (first.is_leader, second.is_leader) == (True, False)
        watch.seconds += 5


async def test_an_interruption_begins_another_term(candidate, watch):
    only = candidate("broker-1")
    for _ in range(3):
        await only.try_acquire_or_renew()
        watch.seconds += 5
    assert only.term == 1
    watch.seconds += 10
    await only.try_acquire_or_renew()
    assert (only.is_leader, only.term) == (True, 2)


async def test_a_silent_leader_stops_before_another_may_begin(candidate, watch):
    first, second = candidate("broker-1"), candidate("broker-2")
    await first.try_acquire_or_renew()
    await second.try_acquire_or_renew()
    watch.seconds += 9.9
    assert first.is_leader
    watch.seconds += 0.2
    assert not first.is_leader
    watch.seconds += 4.8
    await second.try_acquire_or_renew()
    assert not second.is_leader
    watch.seconds += 0.2
    await second.try_acquire_or_renew()
    assert (second.is_leader, second.leader) == (True, "broker-2")


async def test_a_leader_that_was_asleep_finds_its_successor(
    candidate, watch, kube_client, namespace
):
    first, second = candidate("broker-1"), candidate("broker-2")
    await first.try_acquire_or_renew()
    await second.try_acquire_or_renew()
    watch.seconds += 16
    await second.try_acquire_or_renew()
    await first.try_acquire_or_renew()
    assert (first.is_leader, second.is_leader, first.leader) == (False, True, "broker-2")
    assert (await lease(kube_client, namespace)).lease_transitions == 1


async def test_leader_whose_lease_was_deleted_stops_when_it_sees_its_successor(
    candidate, kube_client, namespace
):
    first, second = candidate("broker-1"), candidate("broker-2")
    await first.try_acquire_or_renew()
    await kube_client.delete(LEASES, "kubelend-broker", namespace)
    await second.try_acquire_or_renew()
    assert second.is_leader
    await first.try_acquire_or_renew()
    assert (first.is_leader, first.leader) == (False, "broker-2")


async def test_who_resigns_makes_room_at_once(candidate):
    first, second = candidate("broker-1"), candidate("broker-2")
    await first.try_acquire_or_renew()
    await first.release()
    assert not first.is_leader
    await second.try_acquire_or_renew()
    assert second.is_leader


async def test_a_short_patience_does_not_cut_another_brokers_lease_short(candidate, watch):
    first = candidate("broker-1")
    hasty = candidate("broker-2", LeaseTimings(timedelta(seconds=3), timedelta(seconds=2)))
    await first.try_acquire_or_renew()
    await hasty.try_acquire_or_renew()
    watch.seconds += 14
    await hasty.try_acquire_or_renew()
    assert not hasty.is_leader
    watch.seconds += 1.1
    await hasty.try_acquire_or_renew()
    assert hasty.is_leader


async def test_won_returns_when_the_lease_is_taken(candidate):
    quick = LeaseTimings(timedelta(seconds=15), timedelta(seconds=10), timedelta(milliseconds=10))
    only = candidate("broker-1", quick)
    running = asyncio.create_task(only.run())
    await asyncio.wait_for(only.wait_for_leadership(), PATIENCE)
    assert only.is_leader
    running.cancel()
    await asyncio.wait([running])


async def test_without_the_right_to_it_nobody_leads_until_it_is_given(candidate, kube, namespace):
    stranger = config.config_from_kubeconfig(kube.kubeconfig_for("stranger"))
    async with Client.open(stranger) as client:
        quick = LeaseTimings(
            timedelta(seconds=15), timedelta(seconds=10), timedelta(milliseconds=50)
        )
        only = candidate("broker-1", quick, client)
        with pytest.raises(Forbidden):
            await only.try_acquire_or_renew()
        running = asyncio.create_task(only.run())
        verbs = ["--verb=get,create,update", "--resource=leases.coordination.k8s.io"]
        kube.kubectl("create", "role", "elector", f"--namespace={namespace}", *verbs)
        binding = ["--role=elector", "--user=stranger", f"--namespace={namespace}"]
        kube.kubectl("create", "rolebinding", "elector", *binding)
        await until(lambda: only.is_leader)
        running.cancel()
        await asyncio.wait([running])
