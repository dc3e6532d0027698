"""Two agents with one identity over real connections: the second is refused until the first is gone."""

import asyncio
import json
import sys
from datetime import UTC, datetime
from functools import cached_property

import aiohttp
import pytest

import brokers
import make
import waiting
from callers import Caller, offer, wish
from clocks import Clock
from kubelend.api import request
from kubelend.broker.agent_sessions import RECONNECT_GRACE
from kubelend.core.lifecycle import Role
from kubelend.pki import identity
from kubelend.wire.route import AGENT_HEADER
from mtls_headers import passed_on
from waiting import PATIENCE


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


def test_what_an_agent_does_in_its_clusters_name():
    assert sorted(request.SESSION_ROUTES) == [
        "acknowledge",
        "activate",
        "publish",
        "refuse",
        "release",
        "renew",
        "reserve",
        "stream",
    ]


async def test_all_that_changes_something_is_refused_and_nothing_else(agent, broker):
    await broker.cluster("b").advertise("8")
    one, two = agent("one"), agent("two")
    await one.advertise()
    held = (await one.reserve())["id"]
    lent = (await broker.cluster("b").reserve())["id"]
    for method, *path in (
        ("POST", "reservations"),
        ("POST", "reservations", held, "activate"),
        ("POST", "reservations", held, "renew"),
        ("DELETE", "reservations", held),
        ("POST", "instructions", lent, "acknowledge"),
        ("POST", "instructions", lent, "refuse"),
        ("GET", "instructions", "stream"),
    ):
        content = json.dumps(wish()).encode() if path == ["reservations"] else None
        answer = await two.call(method, *path, content=content)
        assert answer.refusal == (409, "IdentityInUse"), (method, path)
    for path in (["instructions"], ["reservations"], ["reservations", held], ["version"]):
        assert (await two.get(*path)).status == 200
    assert (await one.read("reservations", held))["status"]["phase"] == "Reserved"


async def test_callers_that_do_not_name_themselves_are_not_concerned(agent, broker):
    await agent("one").advertise()
    plain = broker.cluster("a")
    await plain.advertise()
    await broker.cluster("b").advertise()
    held = await plain.reserve()
    assert (await plain.delete("reservations", held["id"])).status == 200
    nameless = agent("")
    await nameless.advertise()
    assert await is_refused(agent("two")), "and they end no session"


async def test_people_are_not_concerned(agent, broker, certificates):
    await broker.cluster("b").advertise()
    await agent("one").advertise()
    held = (await agent("one").reserve())["id"]
    alice = Agent(broker.port, certificates.admin("a"), "a", {AGENT_HEADER: "two"})
    assert (await alice.delete("reservations", held)).status == 200
    await alice.hang_up()
    await agent("one").advertise()


async def test_refusals_are_counted_and_logged_without_a_flood(agent, broker, log):
    await agent("one").advertise()
    two = agent("two")
    assert all(await asyncio.gather(*(is_refused(two) for _ in range(50))))
    counted = broker.metric(
        "kubelend_http_requests_rejected_total", route="publish", code="IdentityInUse"
    )
    assert counted == 50
    (line,) = log.lines("Request rejected")
    assert (line["caller"], line["code"]) == ("a", "IdentityInUse")
    audited = await broker.viewer().read("audit", refused="true")
    assert {line["code"] for line in audited["lines"]} == {"IdentityInUse"}
    assert len(audited["lines"]) == 20


# -- the session ends


async def test_end_of_the_stream_ends_the_session_after_the_grace(agent, broker):
    one, two = agent("one"), agent("two")
    await one.advertise()
    async with one.stream() as stream:
        await stream.event()
        assert await is_refused(two)
    assert await is_free_after_the_grace(two, broker)
    assert await is_refused(one)


async def test_agent_that_opens_its_stream_again_keeps_its_session(agent, broker):
    one, two = agent("one"), agent("two")
    for _ in range(2):
        async with one.stream() as stream:
            await stream.event()
            broker.clock.pass_time(RECONNECT_GRACE)
            assert await is_refused(two)
        await waiting.until(lambda: not len(broker.service.streams))
        assert await is_refused(two)


async def test_agent_that_is_killed_can_be_started_again_after_the_grace(
    broker, certificates, agent
):
    """Nothing is said any more: the kernel closes its connections."""
    url, directory = f"https://localhost:{broker.port}", str(certificates.cluster("a"))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _AGENT, url, directory, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        assert await asyncio.wait_for(process.stdout.readline(), PATIENCE) == b"open\n"
        two = agent("two")
        assert await is_refused(two)
        process.kill()
        assert await is_free_after_the_grace(two, broker)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


_AGENT = """
import asyncio, sys
from pathlib import Path
from kubelend.transports.client import BrokerClient
from kubelend.wire import bodies

async def main():
    async with BrokerClient(sys.argv[1], Path(sys.argv[2]), instance="one") as client:
        await client.publish(
            bodies.Advertisement("a", bodies.Metrics(bodies.Quantities("4", "8Gi")))
        )
        async for _ in client.stream(on_reset=lambda: print("open", flush=True)):
            pass

asyncio.run(main())
"""


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


async def test_polls_keep_the_session(agent, broker):
    one, two = agent("one"), agent("two")
    await one.advertise()
    for _ in range(5):
        broker.clock.pass_time(make.MINUTE)
        assert (await one.get("instructions")).status == 200
        assert await is_refused(two)


async def test_how_long_it_may_be_silent_is_a_setting(start, certificates):
    broker = await start(agent_timeout=make.SECOND)
    directory = certificates.cluster("a")
    one, two = (Agent(broker.port, directory, "a", {AGENT_HEADER: name}) for name in ("one", "two"))
    await one.advertise()
    assert await is_refused(two)
    broker.clock.pass_time(make.SECOND)
    assert not await is_refused(two)
    await one.hang_up()
    await two.hang_up()


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
