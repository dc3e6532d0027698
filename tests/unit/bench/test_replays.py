"""A world played again tells which of its events an agent has taken in last."""

import pytest

from kubelend.agent.ports import PodDeleted
from kubelend.bench.agent import SimulationReplay
from kubelend.core.errors import KubelendError
from kubelend.core.inventory import Inventory
from kubelend.core.pod_requests import Node, Pod
from kubelend.sources import simulation_spec
from kubelend.sources.simulation import SimulatedCluster

MOST = 10_000


class Books:
    """What an agent knows that takes everything in."""

    def __init__(self, description):
        self._world = SimulatedCluster(description)
        self._inventory = Inventory()
        self._inventory.reset(*self._world.snapshot())
        self._events = 0
        self.came_with = {self.memory: 0}
        """The event after which so much was in use for the first time."""

    @property
    def memory(self):
        return self._inventory.totals().allocated.memory

    def take(self, events):
        """Until so many pods came, went or changed."""
        until = self._events + events
        while self._events < until:
            for change in self._world.step().changes:
                match change:
                    case Pod():
                        self._inventory.put_pod(change)
                    case PodDeleted(id):
                        self._inventory.delete_pod(id)
                    case Node():
                        self._inventory.put_node(change)
                self._events += isinstance(change, Pod | PodDeleted)
            self.came_with.setdefault(self.memory, self._events)


def steady():
    return simulation_spec.steady_simulation_spec(nodes=4, pods=40, events_per_second=50)


@pytest.mark.parametrize("events", [0, 1, 7, 200])
def test_events_are_counted_up_to_what_the_agent_knows(events):
    books = Books(steady())
    books.take(events)
    assert SimulationReplay(steady()).events_until(books.memory, MOST) == events


def test_the_next_count_begins_where_the_last_ended():
    books, replay = Books(steady()), SimulationReplay(steady())
    books.take(30)
    replay.events_until(books.memory, MOST)
    books.take(45)
    assert replay.events_until(books.memory, MOST) == 45


def test_pods_that_wait_for_room_are_in_use_only_once_they_have_it():
    full = simulation_spec.SimulationSpec(
        [simulation_spec.NodeGroup({"cpu": "1", "memory": "1Gi"})],
        work=[
            simulation_spec.PodWorkload(
                "10/s", {"cpu": "10m", "memory": "300Mi..700Mi"}, lifetime="1s..9s"
            )
        ],
    )
    books = Books(full)
    books.take(40)
    # Those that only began to wait since have changed no sum.
    assert (
        SimulationReplay(full).events_until(books.memory, MOST)
        == books.came_with[books.memory]
        < 40
    )


def test_a_sum_that_never_was_is_an_error():
    with pytest.raises(
        KubelendError, match="12345 allocated bytes, which the simulation never reached"
    ):
        SimulationReplay(steady()).events_until(12345, 100)


def test_a_sum_beyond_the_bound_is_an_error():
    books = Books(steady())
    books.take(50)
    with pytest.raises(KubelendError):
        SimulationReplay(steady()).events_until(books.memory, 20)


def test_a_world_where_nothing_happens_has_no_other_sum():
    still = simulation_spec.parse_simulation_spec(
        "nodes: [{capacity: {cpu: 1, memory: 1Gi}}]", "here"
    )
    assert SimulationReplay(still).events_until(0, MOST) == 0
    with pytest.raises(KubelendError):
        SimulationReplay(still).events_until(1, MOST)
