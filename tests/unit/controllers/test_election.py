"""Who leads, where the lease is taken from under a leader; the API server says what the test wants.

What a real one says of leases that nobody touches is tested in tests/kube.
"""

import json
from datetime import timedelta

import pytest
from aiohttp import web

import make
import scripted_api
from kubelend.kube.client import Client
from kubelend.kube.leader_election import LeaderElection, LeaseIdentity, LeaseTimings

TIMES = LeaseTimings(timedelta(seconds=15), timedelta(seconds=10), timedelta(seconds=2))


class Server:
    """One lease, as an API server keeps it."""

    def __init__(self):
        self.lease = None
        self.loses_answers = False
        """Whether what is written arrives, and a second copy of it is refused."""
        self.before_writes = lambda: None
        self._version = 0

    def held_by(self, identity):
        self._keep({"metadata": {"name": "kubelend-broker"}, "spec": {"holderIdentity": identity}})

    def annotated(self):
        self._keep(self.lease)

    def deleted(self):
        self.lease = None

    async def answer(self, request):
        if request.method == "GET":
            gone = scripted_api.status(404, reason="NotFound", name="kubelend-broker")
            return gone if self.lease is None else scripted_api.found(self.lease)
        self.before_writes()
        sent = json.loads(await request.read())
        known = None if self.lease is None else self.lease["metadata"]["resourceVersion"]
        if sent["metadata"].get("resourceVersion") != known:
            return _conflict()
        self._keep(sent)
        return _conflict() if self.loses_answers else web.json_response(self.lease)

    def _keep(self, lease):
        self._version += 1
        metadata = {**lease["metadata"], "resourceVersion": str(self._version)}
        self.lease = {**lease, "metadata": metadata}


def _conflict():
    return scripted_api.status(409, reason="Conflict", name="kubelend-broker")


@pytest.fixture
def server():
    return Server()


@pytest.fixture
def now():
    return [1000.0]


@pytest.fixture
async def leader(certificates, server, now):
    """One that has led for a second."""
    async with scripted_api.running(certificates.server()) as scripted:
        scripted.answers.extend([server.answer] * 50)
        async with Client.open(scripted.access()) as client:
            chosen = LeaseIdentity("broker-1", "hub")

            def clock():
                return make.T0 + timedelta(seconds=now[0])

            made = LeaderElection(client, chosen, TIMES, clock, lambda: now[0])
            await made.try_acquire_or_renew()
            assert (made.is_leader, made.term) == (True, 1)
            now[0] += 1
            yield made


async def test_leader_that_sees_another_holder_leads_no_more(leader, server):
    server.held_by("broker-2")
    await leader.try_acquire_or_renew()
    assert (leader.is_leader, leader.leader) == (False, "broker-2")


async def test_leader_whose_renewal_meets_another_holder_leads_no_more(leader, server):
    server.before_writes = lambda: server.held_by("broker-2")
    await leader.try_acquire_or_renew()
    assert (leader.is_leader, leader.leader) == (False, "broker-2")


async def test_leader_whose_renewal_is_answered_by_nobody_leads_on(leader, server, now):
    server.loses_answers = True
    await leader.try_acquire_or_renew()
    now[0] += 9.9
    assert (leader.is_leader, leader.term) == (True, 1)


async def test_leader_whose_lease_somebody_else_has_touched_leads_on(leader, server, now):
    """But it was not renewed by that."""
    server.before_writes = server.annotated
    await leader.try_acquire_or_renew()
    assert (leader.is_leader, leader.term) == (True, 1)
    now[0] += 9
    assert not leader.is_leader


async def test_lease_that_was_deleted_is_taken_anew_and_begins_another_term(leader, server):
    """Another may have had it, and be gone again."""
    server.deleted()
    await leader.try_acquire_or_renew()
    assert (leader.is_leader, leader.term) == (True, 2)


async def test_lease_that_somebody_has_emptied_begins_another_term(leader, server):
    server.held_by("")
    await leader.try_acquire_or_renew()
    assert (leader.is_leader, leader.term) == (True, 2)


async def test_a_look_tells_at_once_who_leads_and_fails_for_nobody(leader, server):
    server.held_by("broker-2")
    await leader.refresh()
    assert not leader.is_leader

    async def refuse(_):
        return scripted_api.status(403, reason="Forbidden")

    server.answer = refuse
    await leader.refresh()
