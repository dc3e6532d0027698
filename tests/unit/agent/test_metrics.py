"""A scrape says how the agent stands at that moment."""

import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import make
from kubelend.agent.health import ComponentHealth
from kubelend.agent.metrics import AgentMetrics, MetricsInput
from kubelend.agent.reservation_cache import ReservationCache
from kubelend.core.inventory import Inventory
from kubelend.wire import bodies


def body(id, requester, target, phase="Active"):
    return bodies.Reservation(
        id,
        requester,
        target,
        bodies.Quantities("1", "1Gi"),
        bodies.ReservationStatus(phase, ""),
        make.T0,
        previous_cluster_ids=["me"],
    )


class Counted(Inventory):
    sums = 0

    def totals(self):
        self.sums += 1
        return super().totals()


@pytest.fixture
def inventory():
    return Counted()


@pytest.fixture
def reservations():
    return ReservationCache()


@pytest.fixture
def scrape(inventory, reservations):
    def scrape(published_at=None):
        watched = MetricsInput(
            "me", inventory, reservations, ComponentHealth(), lambda: True, (), lambda: published_at
        )
        found = text_string_to_metric_families(AgentMetrics(watched).render().decode())
        return {
            (sample.name, *sample.labels.values()): sample.value
            for family in found
            for sample in family.samples
        }

    return scrape


def test_reservations_count_by_the_part_that_this_cluster_has_in_them(reservations, scrape):
    reservations.put_instructions(
        [
            body("1", "me", "other"),
            body("2", "me", "", "Pending"),
            body("3", "other", "me"),
            body("4", "other", "me", "Reserved"),
            body("moved", "other", "third"),
            body("over", "other", "me", "Released"),
        ]
    )
    counts = {name[1:]: value for name, value in scrape().items() if "_reservations" in name[0]}
    assert counts == {
        ("Active", "requester"): 1,
        ("Pending", "requester"): 1,
        ("Active", "provider"): 1,
        ("Reserved", "provider"): 1,
    }


def test_the_sums_are_made_once_for_a_scrape(inventory, scrape):
    scrape()
    assert inventory.sums == 1


def test_the_last_advertisement_has_its_time(scrape):
    name = ("kubelend_agent_last_advertisement_timestamp_seconds",)
    assert scrape()[name] == 0
    assert scrape(make.T0)[name] == make.T0.timestamp()


def test_every_metric_is_documented(scrape):
    documented = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text("utf-8")
    names = {re.sub("_(bucket|sum|count|created)$", "", name) for name, *_ in scrape(make.T0)}
    ours = {name for name in names if name.startswith("kubelend_agent_")}
    assert len(ours) > 10
    short = {name: "_" + name.removeprefix("kubelend_agent_") for name in ours}
    assert [
        n for n in ours if f"`{n}`" not in documented and f"`{short[n]}`" not in documented
    ] == []
