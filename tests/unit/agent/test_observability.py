"""What an operator sees of an agent: health, which agent is active, metrics, and a log line for each step."""

import asyncio
import re
from contextlib import suppress
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

import listeners
import make
import peers
import providers
import requesters
from fake_broker import UNREACHABLE, FakeBroker
from kubelend.agent.health import ActiveAgentGate, ComponentHealth
from kubelend.agent.metrics import AgentMetrics, MetricsInput
from kubelend.agent.reservation_cache import ReservationCache
from kubelend.communicators.factory import SessionMiddleware
from kubelend.core.errors import BrokerUnreachable, IdentityInUse
from kubelend.core.inventory import Inventory
from kubelend.core.models import ReservationId
from kubelend.wire import bodies
from virtual_time import in_virtual_time, passed, settled, stopped

# -- health


@pytest.fixture
def health():
    return ComponentHealth()


def test_each_error_and_its_end_are_logged_once(health):
    with capture_logs() as lines:
        for error in ["", "no broker", "no broker", "revoked", "", ""]:
            health.report("publisher", error)
            assert health.errors == ({"publisher": error} if error else {})
    assert [(line["log_level"], line["event"], line.get("error")) for line in lines] == [
        ("warning", "Component unhealthy", "no broker"),
        ("warning", "Component unhealthy", "revoked"),
        ("info", "Component healthy", None),
    ]
    assert {line["component"] for line in lines} == {"publisher"}


def test_agent_is_ready_once_all_required_components_are_healthy(health):
    assert health.not_ready_reason == ""
    health.require("stream")
    health.require("collector")
    assert health.not_ready_reason == "collector: starting; stream: starting"
    health.report("collector")
    health.report("stream", "cut")
    health.report("publisher", "no broker")
    assert health.not_ready_reason == "publisher: no broker; stream: cut"
    health.report("publisher")
    assert health.not_ready_reason == "stream: cut"
    health.errors.clear()
    assert health.errors == {"stream": "cut"}, "a copy"
    health.report("stream")
    assert health.not_ready_reason == ""


# -- the active agent

ADVERTISEMENT = bodies.Advertisement("a", bodies.Metrics(bodies.Quantities("1", "1Gi")))
IN_USE = IdentityInUse("another agent is active for a")


class GateRig:
    def __init__(self):
        self.broker, self.gate = FakeBroker("a", make.runner()), ActiveAgentGate()
        self.session = SessionMiddleware(self.broker, self.gate)

    async def advertise(self, error=None, seconds=0.0):
        """Calls time out after a second."""
        self.broker.error, self.broker.seconds = error, {"publish": seconds}
        with suppress(IdentityInUse, BrokerUnreachable, TimeoutError):
            async with asyncio.timeout(1):
                await self.session.publish(ADVERTISEMENT)

    async def is_active(self):
        waiting = asyncio.create_task(self.gate.wait())
        await settled()
        is_active = waiting.done()
        await stopped(waiting)
        return is_active


@pytest.mark.parametrize(
    "error, seconds",
    [(None, 0.0), (UNREACHABLE, 0.0), (None, 5.0)],
    ids=["accepted", "unreachable", "hangs"],
)
@in_virtual_time
async def test_agent_is_active_once_the_broker_does_not_reject_its_advertisement(error, seconds):
    rig = GateRig()
    assert not await rig.is_active()
    for _ in range(2):
        await rig.advertise(IN_USE)
        assert not await rig.is_active()
    await rig.advertise(error, seconds)
    assert await rig.is_active()


@in_virtual_time
async def test_responses_pass_unchanged():
    rig = GateRig()
    assert (await rig.session.publish(ADVERTISEMENT)).advertisement == ADVERTISEMENT
    rig.broker.error = IN_USE
    with pytest.raises(IdentityInUse) as refused:
        await rig.session.publish(ADVERTISEMENT)
    assert refused.value is IN_USE


@in_virtual_time
async def test_agent_that_was_replaced_ends_with_the_reason():
    rig = GateRig()
    watching = asyncio.create_task(rig.gate.run())
    for error in (IN_USE, None, UNREACHABLE, None):
        await rig.advertise(error)
    await settled()
    assert not watching.done(), "waiting for the takeover, or an unreachable broker, is no end"
    await rig.advertise(IN_USE)
    with pytest.raises(IdentityInUse, match="another agent is active for a"):
        await watching


# -- metrics


def reservation(id, requester, target, phase="Active"):
    amounts, status = bodies.Quantities("1", "1Gi"), bodies.ReservationStatus(phase, "")
    fields = (id, requester, target, amounts, status, make.T0)
    return bodies.Reservation(*fields, previous_cluster_ids=["me"])


class CountingInventory(Inventory):
    sums = 0

    def totals(self):
        self.sums += 1
        return super().totals()


def scrape(*reservations, published_at=None):
    inventory, cache = CountingInventory(), ReservationCache()
    cache.put_instructions(reservations)
    state = (inventory, cache, ComponentHealth(), lambda: True, (), lambda: published_at)
    text = AgentMetrics(MetricsInput("me", *state)).render().decode()
    assert inventory.sums == 1, "it is summed once per scrape"
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_reservations_are_counted_by_the_role_of_this_cluster():
    found = scrape(
        reservation("1", "me", "other"),
        reservation("2", "me", "", "Pending"),
        reservation("3", "other", "me"),
        reservation("4", "other", "me", "Reserved"),
        reservation("moved", "other", "third"),
        reservation("over", "other", "me", "Released"),
    )
    assert {name[1:]: value for name, value in found.items() if "_reservations" in name[0]} == {
        ("Active", "requester"): 1,
        ("Pending", "requester"): 1,
        ("Active", "provider"): 1,
        ("Reserved", "provider"): 1,
    }


def test_last_advertisement_has_its_time():
    name = ("kubelend_agent_last_advertisement_timestamp_seconds",)
    assert scrape()[name] == 0
    assert scrape(published_at=make.T0)[name] == make.T0.timestamp()


def test_every_metric_is_documented():
    documented = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text("utf-8")
    names = {re.sub("_(bucket|sum|count|created)$", "", name) for name, *_ in scrape()}
    ours = {name for name in names if name.startswith("kubelend_agent_")}
    assert len(ours) > 10
    for name in ours:
        short = "_" + name.removeprefix("kubelend_agent_")
        assert f"`{name}`" in documented or f"`{short}`" in documented, name


# -- log lines

REQUEST = {"namespace": "default", "name": "w"}
AMOUNTS = {"cpu": "2", "memory": "1Gi"}
EXPIRES = (make.T0 + make.HOUR).isoformat()
PLACED = REQUEST | AMOUNTS | {"reservation": "rsv-1", "cluster": "p1", "expires_at": EXPIRES}


@pytest.fixture
def lines():
    with capture_logs() as captured:
        yield captured


def logged(lines, prefix):
    """The message and the keys of the lines at info whose message begins so."""
    return [
        (line["event"], {k: v for k, v in line.items() if k not in ("event", "log_level")})
        for line in lines
        if line["event"].startswith(prefix) and line["log_level"] == "info"
    ]


async def expire(rig, _):
    await passed(3700)


async def activate_and_release(rig, _):
    for change in (rig.broker.runner.activate, rig.broker.runner.release):
        change(ReservationId("rsv-1"))
        await rig.notify("rsv-1")


async def delete(rig, key):
    await rig.delete(key)
    await passed(60)


RELEASED = REQUEST | {"reservation": "rsv-1"}


@pytest.mark.parametrize(
    "end, steps",
    [
        (expire, [("expired", PLACED)]),
        (activate_and_release, [("active", PLACED), ("released", PLACED)]),
        (delete, [("released", RELEASED)]),
    ],
)
@requesters.requester()
async def test_request_from_its_start_to_its_end(lines, rig, end, steps):
    await end(rig, await rig.create_request(cpu="2"))
    steps = [("received", REQUEST | AMOUNTS), ("reserved", PLACED), *steps]
    found = logged(lines, "ResourceRequest ")
    assert found == [(f"ResourceRequest {step}", keys) for step, keys in steps]
    found = logged(lines, "ReservationInstruction ")
    steps = ["delivered", "finished"]
    assert [event for event, _ in found] == [f"ReservationInstruction {step}" for step in steps]
    for _, keys in found:
        assert keys.items() >= (PLACED | {"name": "rsv-1"}).items()


@pytest.mark.parametrize(
    "cpu, reason, steps",
    [("99", "NoCapacity", ["received", "rejected"]), ("none", "InvalidQuantity", ["rejected"])],
)
@requesters.requester()
async def test_request_that_is_rejected_has_its_reason(lines, cpu, reason, steps, rig):
    key = await rig.create_request(cpu=cpu)
    await passed(60)
    message = (await rig.status(key)).message
    found = logged(lines, "ResourceRequest ")
    assert [event for event, _ in found] == [f"ResourceRequest {step}" for step in steps]
    assert found[-1][1] == REQUEST | {"reason": reason, "error": message}


@requesters.requester()
async def test_request_that_is_queued(lines, rig):
    await rig.create_request("first", cpu="8")
    await rig.create_request(cpu="8", wait="10m")
    ((_, keys),) = logged(lines, "ResourceRequest queued")
    assert keys.items() >= (REQUEST | {"reservation": "rsv-2"}).items()


@requesters.requester()
async def test_renewal_has_its_new_expiry(lines, rig):
    await rig.create_request(renew=True)
    await passed(2500)
    expiry = (make.T0 + make.HOUR + 40 * make.MINUTE).isoformat()
    assert logged(lines, "Reservation renewed") == [
        ("Reservation renewed", {"reservation": "rsv-1", "expires_at": expiry})
    ]


@pytest.mark.parametrize("source", ["stream", "poll"])
@listeners.listener()
async def test_instruction_of_the_broker(lines, source, rig):
    lines.clear()
    found = rig.reserve()
    if source == "stream":
        rig.broker.send(found)
    else:
        rig.broker.disconnect(UNREACHABLE)
        rig.broker.stream_error = UNREACHABLE
        await passed(10)
    await settled()
    ((_, keys),) = logged(lines, "Instruction received")
    expected = {"reservation": found, "phase": "Reserved", "cluster": "me", "requester": "r"}
    assert keys == expected | {"source": source, "revision": rig.broker.body(found).revision}


@providers.provider()
async def test_hold_that_is_made_and_withdrawn(lines, rig):
    found = await rig.place()
    rig.release(found)
    await rig.notify(found)
    await settled()
    body = rig.broker.body(found)
    keys = {"reservation": found, "requester": "r", "cpu": "3", "memory": "1Gi"}
    keys |= {"expires_at": EXPIRES}
    assert logged(lines, "Reservation ") == [
        ("Reservation held", keys),
        ("Reservation withdrawn", keys | {"reason": body.status.message}),
    ]


@providers.provider(policy=make.policy(deny=["r"]))
async def test_hold_that_is_refused_has_its_reason(lines, rig):
    found = await rig.place()
    ((_, keys),) = logged(lines, "Reservation refused")
    assert (keys["reservation"], keys["reason"]) == (found, "this cluster does not lend to r")


@peers.peering()
async def test_peering_from_its_start_to_its_end(lines, rig):
    key = await rig.instruct("rsv-1", "one")
    await rig.finish(key)
    await passed(60)
    keys = {"namespace": "default", "name": "rsv-1", "reservation": "rsv-1", "cluster": "one"}
    keys |= {"cpu": "500m", "memory": "1Gi"}
    assert logged(lines, "Peering ") == [
        ("Peering started", keys),
        ("Peering ready", keys | {"reason": "node ready"}),
        ("Peering disconnecting", keys),
        ("Peering disconnected", keys),
    ]
    assert logged(lines, "Reservation activated") == [
        ("Reservation activated", {"reservation": "rsv-1", "cluster": "one"})
    ]


@peers.peering()
async def test_peering_that_breaks_is_logged_once(lines, rig):
    await rig.instruct("rsv-1", "one")
    rig.peering.unready["rsv-1"] = "node NotReady"
    await passed(300)
    (line,) = [line for line in lines if line["event"].startswith("Peering no longer ready")]
    assert (line["log_level"], line["reason"]) == ("warning", "node NotReady")
