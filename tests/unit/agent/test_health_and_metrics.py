"""What an operator sees of an agent: health, which agent is active, and metrics."""

import asyncio
import re
from contextlib import suppress
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

import make
from kubelend.agent.health import ActiveAgentGate, ComponentHealth
from kubelend.agent.metrics import AgentMetrics, MetricsInput
from kubelend.agent.reservation_cache import ReservationCache
from kubelend.communicators.middleware import SessionMiddleware
from kubelend.core.errors import BrokerUnreachable, IdentityInUse
from kubelend.core.inventory import Inventory
from kubelend.wire import bodies
from scripted_communicator import ScriptedCommunicator
from virtual_time import in_virtual_time, now, settled, stopped

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


def test_partial_error_leaves_the_agent_ready(health):
    health.report("peering", "paris does not answer", is_partial=True)
    assert health.errors == {"peering": "paris does not answer"}
    assert health.not_ready_reason == ""
    health.report("peering", "objects cannot be watched")
    assert health.not_ready_reason == "peering: objects cannot be watched"


# -- the active agent

ADVERTISEMENT = bodies.Advertisement("a", bodies.Metrics(bodies.Quantities("1", "1Gi")))
IN_USE, UNREACHABLE = IdentityInUse("another agent is active for a"), BrokerUnreachable("gone")


class GateRig:
    def __init__(self):
        self.broker, self.gate = ScriptedCommunicator(now), ActiveAgentGate()
        self.session = SessionMiddleware(self.broker, self.gate)

    async def advertise(self, error=None, seconds=0.0):
        """Calls time out after a second."""
        self.broker.error = None if error is None else lambda: error
        self.broker.seconds = seconds
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
    rig.broker.error = lambda: IN_USE
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
    moved = ["me"]
    return bodies.Reservation(
        id, requester, target, amounts, status, make.T0, previous_cluster_ids=moved
    )


class CountingInventory(Inventory):
    sums = 0

    def totals(self):
        self.sums += 1
        return super().totals()


def scrape(inventory=None, reservations=None, published_at=None):
    inputs = MetricsInput(
        "me",
        inventory or Inventory(),
        reservations or ReservationCache(),
        ComponentHealth(),
        lambda: True,
        (),
        lambda: published_at,
    )
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(AgentMetrics(inputs).render().decode())
        for sample in family.samples
    }


def test_reservations_are_counted_by_the_role_of_this_cluster():
    reservations = ReservationCache()
    reservations.put_instructions(
        [
            reservation("1", "me", "other"),
            reservation("2", "me", "", "Pending"),
            reservation("3", "other", "me"),
            reservation("4", "other", "me", "Reserved"),
            reservation("moved", "other", "third"),
            reservation("over", "other", "me", "Released"),
        ]
    )
    found = scrape(reservations=reservations)
    assert {name[1:]: value for name, value in found.items() if "_reservations" in name[0]} == {
        ("Active", "requester"): 1,
        ("Pending", "requester"): 1,
        ("Active", "provider"): 1,
        ("Reserved", "provider"): 1,
    }


def test_inventory_is_summed_once_per_scrape():
    inventory = CountingInventory()
    scrape(inventory)
    assert inventory.sums == 1


def test_last_advertisement_has_its_time():
    name = ("kubelend_agent_last_advertisement_timestamp_seconds",)
    assert scrape()[name] == 0
    assert scrape(published_at=make.T0)[name] == make.T0.timestamp()


def test_every_metric_is_documented():
    documented = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text("utf-8")
    names = {re.sub("_(bucket|sum|count|created)$", "", name) for name, *_ in scrape()}
    ours = {name for name in names if name.startswith("kubelend_agent_")}
    assert len(ours) > 10
    short = {name: "_" + name.removeprefix("kubelend_agent_") for name in ours}
    assert [
        n for n in ours if f"`{n}`" not in documented and f"`{short[n]}`" not in documented
    ] == []
