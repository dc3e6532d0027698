"""The broker hears what is true now: on the clock, and soon after a change; and its answer is used."""

from msgspec.structs import replace

import make
from kubelend.core.errors import StoreFailed
from kubelend.core.inventory import Hold
from kubelend.sources.memory_objects import MemoryObjects
from kubelend.wire import bodies
from kubelend.wire.objects import Advertisement
from make import SECOND, T0
from publishers import Rig, unreachable, until
from virtual_time import in_virtual_time, now, settled

# -- the rhythm


@in_virtual_time
async def test_the_first_measurement_is_told_at_once_and_then_on_the_clock():
    rig = Rig()
    async with rig.running():
        await until(7)
        rig.measure()
        await until(100)
    assert rig.moments() == [7, 30, 60, 90]
    assert rig.publisher.published_at == T0 + 90 * SECOND


@in_virtual_time
async def test_before_the_first_measurement_nothing_is_told():
    rig = Rig()
    async with rig.running():
        rig.inventory.put_hold("r1", Hold("b", make.resources("cpu=1,memory=1Gi")))
        rig.publisher.notify_changed()
        await until(200)
        assert rig.broker.tries == []
        assert await rig.objects.list(Advertisement) == []


@in_virtual_time
async def test_without_alignment_a_cluster_has_moments_of_its_own():
    rig = Rig(cluster_id="cluster-a", align=False)
    rig.measure()
    async with rig.running():
        await until(100)
    assert rig.moments() == [0, 6.729, 36.729, 66.729, 96.729]


@in_virtual_time
async def test_a_clock_that_is_set_back_does_not_silence_the_cluster():
    set_back: list[bool] = []
    rig = Rig(clock=lambda: now() - make.HOUR if set_back else now())
    rig.measure()
    async with rig.running():
        await until(40)
        set_back.append(True)
        await until(200)
    assert rig.moments() == [0, 30, 60, 90, 120, 150, 180]


@in_virtual_time
async def test_a_timer_that_goes_off_early_does_not_have_everything_told_twice():
    rig = Rig(clock=lambda: T0 + (now() - T0) * 0.999)
    rig.measure()
    async with rig.running():
        await until(100)
    assert rig.moments() == [0, 30, 60.03, 90.06]


# -- changes


@in_virtual_time
async def test_a_change_that_matters_is_told_soon():
    rig = Rig()
    rig.measure("1")
    async with rig.running():
        await until(10)
        rig.use("2")
        await until(12)
    assert rig.moments() == [0, 10.2]
    assert rig.cpus() == ["1", "2"]


@in_virtual_time
async def test_a_change_that_does_not_matter_waits_for_its_moment():
    rig = Rig()
    rig.measure("1")
    async with rig.running():
        await until(10)
        rig.use("1050m")
        await until(35)
    assert rig.moments() == [0, 30]
    assert rig.cpus() == ["1", "1050m"]


@in_virtual_time
async def test_many_small_changes_matter_together():
    rig = Rig()
    rig.measure("1")
    async with rig.running():
        for step in range(1, 6):
            await until(10 + step)
            rig.use(f"{1000 + 30 * step}m")
        await until(20)
    assert rig.moments() == [0, 14.2]
    assert rig.cpus() == ["1", "1120m"]


@in_virtual_time
async def test_a_burst_of_changes_is_told_once():
    rig = Rig()
    rig.measure("1")
    async with rig.running():
        for step in range(1, 9):
            await until(10 + step / 50)
            rig.use(str(step))
        await until(25)
    assert rig.moments() == [0, 10.22]
    assert rig.cpus() == ["1", "8"]


@in_virtual_time
async def test_changes_without_end_are_damped_and_the_last_is_not_lost():
    rig = Rig()
    rig.measure("1")
    async with rig.running():
        for step in range(1, 51):
            await until(10 + step / 10)
            rig.use(f"{1000 + 100 * step}m")
        await until(29)
    gaps = [after - before for before, after in zip(rig.moments(), rig.moments()[1:], strict=False)]
    assert min(gaps) >= 2
    assert len(rig.moments()) == 5
    assert rig.cpus()[-1] == "6"
    assert rig.moments()[-1] <= 15 + 2.2


@in_virtual_time
async def test_what_changes_while_the_broker_answers_is_told_after_the_damping():
    rig = Rig()
    rig.measure("1")
    rig.broker.seconds = 3
    async with rig.running():
        await until(1)
        rig.use("5")
        await until(9)
    assert rig.moments() == [3, 8]
    assert rig.cpus() == ["1", "5"]


@in_virtual_time
async def test_a_change_that_is_undone_while_damped_is_not_told():
    rig = Rig()
    rig.measure("1")
    async with rig.running():
        await until(0.5)
        rig.use("5")
        await until(1)
        rig.use("1")
        await until(29)
    assert rig.moments() == [0]


@in_virtual_time
async def test_what_is_held_is_told_soon():
    rig = Rig()
    rig.measure()
    async with rig.running():
        await until(10)
        rig.inventory.put_hold("r1", Hold("b", make.resources("cpu=10m,memory=1Mi")))
        rig.publisher.notify_changed()
        await until(12)
    assert rig.moments() == [0, 10.2]


# -- the answer


@in_virtual_time
async def test_the_answers_instructions_go_where_all_words_of_the_broker_go():
    rig = Rig()
    rig.measure()
    rig.broker.promises = [promise("r1"), promise("r2")]
    async with rig.running():
        await settled()
    assert [found.id for found in rig.reservations.unfinished()] == ["r1", "r2"]
    assert [rig.reservations.find(found.id) for found in rig.broker.promises] == (
        rig.broker.promises
    )


@in_virtual_time
async def test_after_a_gap_the_answer_of_a_broker_that_counts_anew_is_believed():
    rig = Rig()
    rig.measure()
    rig.broker.promises = [replace(promise("r1"), revision=5)]
    rig.reservations.put(replace(promise("r1"), revision=100))
    rig.reservations.mark_gap()
    async with rig.running():
        await settled()
    assert [rig.reservations.find("r1")] == rig.broker.promises


def promise(name):
    return bodies.Reservation(
        id=name,
        requester_id="b",
        target_cluster_id="a",
        requested_resources=bodies.Quantities("1", "1Gi"),
        status=bodies.ReservationStatus("Reserved", ""),
        created_at=T0,
        revision=1,
    )


@in_virtual_time
async def test_people_see_what_the_broker_makes_of_it():
    rig = Rig()
    rig.measure("1")
    rig.broker.available = bodies.Amounts("7", "50Gi")
    async with rig.running():
        shown = await rig.shown()
    assert shown.spec.resources.available == bodies.Amounts("7", "50Gi")
    assert (shown.status.phase, shown.status.published, shown.status.message) == (
        "Active",
        True,
        "",
    )
    assert shown.status.last_update_time == shown.spec.timestamp == T0


@in_virtual_time
async def test_people_see_what_is_measured_and_why_it_is_not_published():
    rig = Rig()
    rig.measure("1")
    rig.broker.available = bodies.Amounts("7", "50Gi")
    async with rig.running():
        await until(10)
        rig.broker.trouble = unreachable
        rig.use("4")
        await until(11)
        shown = await rig.shown()
    assert shown.spec.resources.allocated.cpu == "4"
    assert shown.spec.resources.available.cpu == "6"  # the broker's word was on something else
    assert (shown.status.phase, shown.status.published) == ("Error", False)
    assert shown.status.message == "no route to the broker"
    assert shown.spec.timestamp == T0 + 10.2 * SECOND


class BrokenObjects(MemoryObjects):
    async def apply(self, wanted):
        raise StoreFailed("the disk is full")


@in_virtual_time
async def test_local_objects_that_cannot_be_written_do_not_keep_the_broker_from_hearing():
    rig = Rig(objects=BrokenObjects(now))
    rig.measure()
    async with rig.running():
        await until(61)
    assert rig.moments() == [0, 30, 60]
    assert rig.health.errors == {"advertisement": "the disk is full"}
