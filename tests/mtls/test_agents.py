"""Agents over real connections: one for each identity, whose ResourceRequests end as the broker says."""

import asyncio
import contextlib
import json
from datetime import UTC, datetime
from functools import cached_property

import aiohttp
import pytest

import brokers
import make
import waiting
from callers import Caller, offer, request_body
from clocks import Clock
from kubelend.agent.health import ComponentHealth
from kubelend.agent.requester import ResourceRequestReconciler
from kubelend.agent.reservation_cache import ReservationCache
from kubelend.agent.stream import InstructionListener
from kubelend.api import request
from kubelend.broker.agent_sessions import RECONNECT_GRACE
from kubelend.communicators import factory
from kubelend.communicators.factory import CommunicatorOptions
from kubelend.core.lifecycle import Role
from kubelend.kits.clock import utc_now
from kubelend.pki import identity
from kubelend.sources.memory_objects import MemoryObjects
from kubelend.wire import bodies
from kubelend.wire.objects import (
    Metadata,
    ReservationInstruction,
    ResourceRequest,
    ResourceRequestSpec,
)
from kubelend.wire.route import AGENT_HEADER
from mtls_headers import passed_on
from virtual_time import stopped
from waiting import until


class Agent(Caller):
    """A caller that names itself in every call, over connections of its own."""

    def __init__(self, port, directory, name, headers):
        super().__init__(port, directory, name)
        self.headers = headers

    @cached_property
    def session(self):
        return aiohttp.ClientSession(
            f"https://localhost:{self.port}",
            connector=aiohttp.TCPConnector(ssl=self.context, limit=0),
            headers=self.headers,
        )


@pytest.fixture
async def agent(broker, certificates):
    made = []

    def agent(instance, name="a"):
        directory = certificates.cluster(name)
        made.append(Agent(broker.port, directory, name, {AGENT_HEADER: instance}))
        return made[-1]

    yield agent
    for one in made:
        await one.hang_up()


async def is_refused(caller):
    answer = await caller.post("advertisements", offer(caller.name))
    if answer.status == 200:
        return False
    assert answer.refusal == (409, "IdentityInUse")
    return True


async def is_free_after_the_grace(caller, broker):
    """The end of a connection takes a moment to arrive; then it is the clock that counts."""
    await waiting.until(lambda: not len(broker.service.streams))
    broker.clock.pass_time(RECONNECT_GRACE - make.MOMENT)
    assert await is_refused(caller)
    broker.clock.pass_time(make.MOMENT)
    return not await is_refused(caller)


async def test_second_agent_is_refused_with_a_clear_reason(agent):
    one, two = agent("one"), agent("two")
    await one.advertise()
    answer = await two.post("advertisements", offer("a", "64"))
    assert answer.refusal == (409, "IdentityInUse")
    assert answer.problem.retryable
    assert answer.problem.error == (
        "another agent is active for a since 12:00:00 UTC (from 127.0.0.1, last seen 0 s ago);"
        " stop it, or issue a separate certificate for this cluster"
    )
    own = await one.read("advertisements", "a")
    assert own["resources"]["capacity"]["cpu"] == "4", "what it sent has changed nothing"


async def test_all_that_changes_something_is_refused_and_nothing_else(agent, broker):
    await broker.cluster("b").advertise("8")
    one, two = agent("one"), agent("two")
    await one.advertise()
    held = (await one.reserve())["id"]
    lent = (await broker.cluster("b").reserve())["id"]
    calls = {
        "reserve": ("POST", "reservations"),
        "activate": ("POST", "reservations", held, "activate"),
        "renew": ("POST", "reservations", held, "renew"),
        "release": ("DELETE", "reservations", held),
        "acknowledge": ("POST", "instructions", lent, "acknowledge"),
        "refuse": ("POST", "instructions", lent, "refuse"),
        "stream": ("GET", "instructions", "stream"),
        "exchange_handshake": ("PUT", "reservations", held, "handshake"),
    }
    bodies = {"reserve": request_body(), "exchange_handshake": {"clusterID": "liqo"}}
    assert {*calls, "publish"} == request.SESSION_ROUTES
    for route, call in calls.items():
        content = json.dumps(bodies[route]).encode() if route in bodies else None
        answer = await two.call(*call, content=content)
        assert answer.refusal == (409, "IdentityInUse"), route
    for path in (["instructions"], ["reservations"], ["reservations", held], ["version"]):
        assert (await two.get(*path)).status == 200
    assert (await one.read("reservations", held))["status"]["phase"] == "Reserved"


async def test_people_and_callers_without_an_instance_have_no_session(agent, broker, certificates):
    await agent("one").advertise()
    await broker.cluster("b").advertise()
    plain = broker.cluster("a")
    await plain.advertise()
    held = [(await plain.reserve())["id"] for _ in range(2)]
    assert (await plain.delete("reservations", held[0])).status == 200
    await agent("").advertise()
    alice = Agent(broker.port, certificates.admin("a"), "a", {AGENT_HEADER: "two"})
    assert (await alice.delete("reservations", held[1])).status == 200
    await alice.hang_up()
    assert await is_refused(agent("two")), "and they end no session"


async def test_end_of_the_stream_ends_the_session_after_the_grace(agent, broker):
    one, two = agent("one"), agent("two")
    await one.advertise()
    async with one.stream() as stream:
        await stream.event()
        assert await is_refused(two)
    assert await is_free_after_the_grace(two, broker)
    assert await is_refused(one)


async def test_silent_agent_loses_its_session_and_its_stream(agent, broker):
    one, two = agent("one"), agent("two")
    async with one.stream() as stream:
        await stream.event()
        broker.clock.pass_time(90 * make.SECOND - make.MOMENT)
        assert await is_refused(two)
        broker.clock.pass_time(make.MOMENT)
        assert not await is_refused(two)
        assert [event for event in await stream.rest() if not event.comment] == []
    assert await is_refused(one)


@pytest.mark.broker(agent_timeout=make.SECOND)
async def test_polls_keep_the_session_for_the_time_that_is_set(agent, broker):
    one, two = agent("one"), agent("two")
    await one.advertise()
    for _ in range(3):
        broker.clock.pass_time(make.SECOND - make.MOMENT)
        assert (await one.get("instructions")).status == 200
        assert await is_refused(two)
    broker.clock.pass_time(make.SECOND)
    assert not await is_refused(two)


async def test_behind_a_proxy_it_is_the_caller_that_counts(certificates):
    proxy = certificates.write("edge", identity.client_profile("envoy", Role.PROXY))
    clock = Clock(datetime.now(UTC))
    async with brokers.running(certificates, clock=clock, trust_proxies=True) as broker:
        found = {
            (name, instance): Agent(
                broker.port,
                proxy,
                name,
                {AGENT_HEADER: instance, **passed_on(certificates.cluster(name))},
            )
            for name, instance in (("a", "one"), ("a", "two"), ("b", "two"))
        }
        assert not await is_refused(found["a", "one"])
        assert not await is_refused(found["b", "two"])
        answer = await found["a", "two"].post("advertisements", offer("a"))
        assert answer.refusal == (409, "IdentityInUse")
        assert "(through envoy, last seen 0 s ago)" in answer.problem.detail
        async with found["a", "one"].stream() as stream:
            await stream.event()
        assert await is_free_after_the_grace(found["a", "two"], broker)
        for caller in found.values():
            await caller.hang_up()


@pytest.fixture
async def connect(broker):
    """Opens the communicator of a cluster; all are closed at the end."""
    async with contextlib.AsyncExitStack() as stack:

        async def connect(cluster):
            options = CommunicatorOptions(
                f"https://localhost:{broker.port}", broker.certificates.cluster(cluster)
            )
            found = await factory.open_communicator("http", options)
            assert found is not None
            stack.push_async_callback(found.close)
            return found

        yield connect


@pytest.fixture
async def lenders(connect):
    found = {}
    for name, cpu in (("large", "8"), ("small", "4")):
        found[name] = await connect(name)
        offer = bodies.Metrics(bodies.Quantities(cpu, "8Gi"))
        await found[name].publish(bodies.Advertisement(name, offer))
    return found


@pytest.fixture
async def objects(connect):
    """Those of a cluster whose requester and listener run."""
    kept, reservations, health = MemoryObjects(utc_now), ReservationCache(), ComponentHealth()
    communicator = await connect("borrower")
    requester = ResourceRequestReconciler(
        kept, communicator, reservations, health, utc_now, cluster_id="borrower"
    )
    running = [
        asyncio.create_task(requester.run()),
        asyncio.create_task(InstructionListener(communicator, reservations, health).run()),
    ]
    yield kept
    await stopped(*running)


def resource_request(cpu):
    return ResourceRequest(Metadata("w"), ResourceRequestSpec(cpu, "1Gi"))


async def phase_is(objects, phase, target=""):
    async def shown():
        found = await objects.find(ResourceRequest, "default/w")
        return (found.status.phase, found.status.target_cluster_id) == (phase, target)

    await until(shown)
    return (await objects.find(ResourceRequest, "default/w")).status


async def says(objects, key, message):
    found = await objects.find(ReservationInstruction, key)
    return found is not None and found.spec.message == message


async def test_request_is_placed_moves_with_its_provider_and_ends_with_its_object(lenders, objects):
    await objects.apply(resource_request("2"))
    status = await phase_is(objects, "Reserved", "large")
    await lenders["large"].refuse(status.reservation_name, "no")
    status = await phase_is(objects, "Reserved", "small")
    assert status.message == "Resources reserved in cluster small, moved there from cluster large"
    key = f"default/{status.reservation_name}"
    await until(lambda: says(objects, key, "Use small for 2 CPU / 1Gi Memory"))
    await objects.delete(ResourceRequest, "default/w")

    async def is_finished():
        found = await objects.find(ReservationInstruction, key)
        return found.status.phase == "Finished"

    await until(is_finished)
    assert await objects.find(ResourceRequest, "default/w") is None
    left = await lenders["small"].find(status.reservation_name)
    assert left.status.reason == "ReleasedByRequester"
