"""Agents over real connections: one for each identity."""

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
from kubelend.api import request
from kubelend.broker.agent_sessions import RECONNECT_GRACE
from kubelend.core.lifecycle import Role
from kubelend.pki import identity
from kubelend.wire.route import AGENT_HEADER
from mtls_headers import passed_on


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
