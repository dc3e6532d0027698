"""Which instructions came, which did not, and how long they took."""

import pytest

import make
from kubelend.agent import holds
from kubelend.bench.agents import DeliveryTracker, RecordingObjects
from kubelend.wire import bodies, conversion, objects
from kubelend.wire.objects import Metadata, ResourceRequest, ResourceRequestSpec


class Timer:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def timer():
    return Timer()


@pytest.fixture
def deliveries(timer):
    return DeliveryTracker(timer)


def promise(reservation="rsv-1", provider="berlin") -> bodies.Reservation:
    return conversion.from_reservation(make.reservation(reservation, target=provider))


def instruction(reservation="rsv-1"):
    return holds.provider_instruction(promise(reservation), "default")


def withdrawn():
    status = holds.finished_status(holds.WITHDRAWN, "", make.T0)
    return objects.with_status(instruction(), status, make.T0)


def held():
    return objects.with_status(instruction(), holds.held_status(is_enforced=True), make.T0)


def test_the_time_is_from_the_answer_to_the_object(deliveries, timer):
    deliveries.on_reserved(promise())
    timer.now += 0.25
    deliveries.on_instruction("berlin", instruction())
    assert deliveries.latencies == [0.25]
    assert (deliveries.count, deliveries.missed) == (1, 0)


def test_only_the_first_time_that_it_is_written_counts(deliveries, timer):
    deliveries.on_reserved(promise())
    deliveries.on_instruction("berlin", instruction())
    timer.now += 5
    deliveries.on_instruction("berlin", withdrawn())
    assert deliveries.latencies == [0.0]


def test_an_object_that_is_there_before_the_answer_took_no_time(deliveries, timer):
    deliveries.on_instruction("berlin", instruction())
    timer.now += 1
    deliveries.on_reserved(promise())
    assert deliveries.latencies == [0.0]
    assert deliveries.missed == 0


def test_a_promise_without_an_object_is_missed(deliveries):
    deliveries.on_reserved(promise("rsv-1"))
    deliveries.on_reserved(promise("rsv-2"))
    deliveries.on_instruction("berlin", instruction("rsv-2"))
    assert (deliveries.count, deliveries.missed) == (2, 1)
    assert len(deliveries.latencies) == 1


def test_an_object_in_another_cluster_does_not_count(deliveries):
    deliveries.on_reserved(promise(provider="berlin"))
    deliveries.on_instruction("paris", instruction())
    assert deliveries.missed == 1


@pytest.mark.parametrize(
    "cluster, object, missed",
    [
        pytest.param("berlin", withdrawn(), 0, id="withdrawn"),
        pytest.param("berlin", instruction(), 1, id="only written"),
        pytest.param("berlin", held(), 1, id="still held"),
        pytest.param("paris", withdrawn(), 1, id="withdrawn by another"),
    ],
)
def test_a_release_has_to_reach_the_provider_too(deliveries, cluster, object, missed):
    deliveries.on_reserved(promise())
    deliveries.on_instruction("berlin", instruction())
    deliveries.on_released("rsv-1")
    deliveries.on_instruction(cluster, object)
    assert deliveries.missed == missed


def test_what_is_not_released_need_not_be_withdrawn(deliveries):
    deliveries.on_reserved(promise())
    deliveries.on_instruction("berlin", instruction())
    assert deliveries.missed == 0


async def test_instructions_are_noted_as_they_are_kept(deliveries):
    kept = RecordingObjects("berlin", deliveries, lambda: make.T0)
    deliveries.on_reserved(promise())
    await kept.apply(instruction())
    assert deliveries.missed == 0
    deliveries.on_released("rsv-1")
    assert deliveries.missed == 1
    await kept.set_status(withdrawn())
    assert deliveries.missed == 0


async def test_what_is_not_kept_is_not_noted(deliveries):
    kept = RecordingObjects("berlin", deliveries, lambda: make.T0)
    deliveries.on_reserved(promise())
    assert await kept.set_status(withdrawn()) is None
    assert deliveries.missed == 1


async def test_other_objects_are_kept_like_any(deliveries):
    kept = RecordingObjects("berlin", deliveries, lambda: make.T0)
    await kept.apply(ResourceRequest(Metadata("w"), ResourceRequestSpec("1", "1Gi")))
    assert [found.key for found in await kept.list(ResourceRequest)] == ["default/w"]
    assert deliveries.count == 0
