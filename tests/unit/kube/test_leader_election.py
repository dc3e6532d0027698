"""Leader election while others write the lease. Undisturbed elections are tested in tests/kube."""

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
    """An API server with one lease."""

    def __init__(self):
        self.lease = None
        self.loses_responses = False
        """Whether writes succeed, but are answered with a conflict."""
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
        return _conflict() if self.loses_responses else web.json_response(self.lease)

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
    """A leader for one second."""
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


@pytest.mark.parametrize("is_late", [False, True], ids=["before it renews", "while it renews"])
async def test_leader_steps_down_if_another_holds_the_lease(leader, server, is_late):
    if is_late:
        server.before_writes = lambda: server.held_by("broker-2")
    else:
        server.held_by("broker-2")
    await leader.try_acquire_or_renew()
    assert (leader.is_leader, leader.leader) == (False, "broker-2")


async def test_leader_stays_leader_if_the_response_of_its_renewal_is_lost(leader, server, now):
    server.loses_responses = True
    await leader.try_acquire_or_renew()
    now[0] += 9.9
    assert (leader.is_leader, leader.term) == (True, 1)


async def test_edit_of_the_lease_does_not_renew_it(leader, server, now):
    server.before_writes = server.annotated
    await leader.try_acquire_or_renew()
    assert (leader.is_leader, leader.term) == (True, 1)
    now[0] += 9
    assert not leader.is_leader


@pytest.mark.parametrize("release", [Server.deleted, lambda server: server.held_by("")])
async def test_lease_without_a_holder_is_acquired_in_another_term(leader, server, release):
    """Another replica may have held it meanwhile."""
    release(server)
    await leader.try_acquire_or_renew()
    assert (leader.is_leader, leader.term) == (True, 2)


async def test_refresh_observes_the_holder_and_never_fails(leader, server):
    server.held_by("broker-2")
    await leader.refresh()
    assert not leader.is_leader

    async def refuse(_):
        return scripted_api.status(403, reason="Forbidden")

    server.answer = refuse
    await leader.refresh()
