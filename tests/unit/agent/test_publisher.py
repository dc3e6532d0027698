"""The broker has the current measurement: on schedule, soon after a change, and after every failure."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

import make
from kubelend.agent.advertisement import AdvertisementConfig
from kubelend.agent.health import ComponentHealth
from kubelend.agent.publisher import AdvertisementWriter, LocalPublisher
from kubelend.core.errors import (
    BrokerUnreachable,
    Forbidden,
    IdentityInUse,
    InvalidInput,
    NotReady,
    RateLimited,
    StoreFailed,
)
from kubelend.core.inventory import Hold, Inventory
from kubelend.core.pod_requests import Node
from kubelend.sources.memory_objects import MemoryObjects
from kubelend.wire import bodies
from kubelend.wire.objects import Advertisement, AdvertisementStatus, Metadata
from make import SECOND, T0
from publishers import ALL, Rig, unreachable, until
from virtual_time import in_virtual_time, now, settled, stopped

KEY = "default/cluster-advertisement"

# -- the schedule


@in_virtual_time
async def test_first_measurement_is_sent_at_once_and_then_on_schedule():
    rig = Rig()
    async with rig.running():
        await until(7)
        rig.measure()
        await until(100)
    assert rig.moments() == [7, 30, 60, 90]
    assert rig.publisher.published_at == T0 + 90 * SECOND


@in_virtual_time
async def test_nothing_is_sent_before_the_first_measurement():
    rig = Rig()
    async with rig.running():
        rig.inventory.put_hold("r1", Hold("b", make.resources("cpu=1,memory=1Gi")))
        rig.publisher.notify_changed()
        await until(200)
        assert rig.broker.tries == []
        assert await rig.objects.list(Advertisement) == []


@in_virtual_time
async def test_unaligned_cluster_has_due_times_of_its_own():
    rig = Rig(cluster_id="cluster-a", align=False)
    rig.measure()
    async with rig.running():
        await until(100)
    assert rig.moments() == [0, 6.729, 36.729, 66.729, 96.729]


@in_virtual_time
async def test_clock_that_is_set_back_does_not_stop_the_publisher():
    set_back: list[bool] = []
    rig = Rig(clock=lambda: now() - make.HOUR if set_back else now())
    rig.measure()
    async with rig.running():
        await until(40)
        set_back.append(True)
        await until(200)
    assert rig.moments() == [0, 30, 60, 90, 120, 150, 180]


@in_virtual_time
async def test_timer_that_fires_early_does_not_send_twice():
    rig = Rig(clock=lambda: T0 + (now() - T0) * 0.999)
    rig.measure()
    async with rig.running():
        await until(100)
    assert rig.moments() == [0, 30, 60.03, 90.06]


# -- changes


@pytest.mark.parametrize(
    "uses, end, moments, cpus",
    [
        pytest.param([(10, "2")], 12, [0, 10.2], ["1", "2"], id="significant: soon"),
        pytest.param([(10, "1050m")], 35, [0, 30], ["1", "1050m"], id="not significant: when due"),
        pytest.param(
            [(10 + step, f"{1000 + 30 * step}m") for step in range(1, 6)],
            20,
            [0, 14.2],
            ["1", "1120m"],
            id="small ones add up",
        ),
        pytest.param(
            [(10 + step / 50, str(step)) for step in range(1, 9)],
            25,
            [0, 10.22],
            ["1", "8"],
            id="a burst is sent once",
        ),
        pytest.param([(0.5, "5"), (1, "1")], 29, [0], ["1"], id="undone while damped"),
    ],
)
@in_virtual_time
async def test_change_of_usage_is_sent(uses, end, moments, cpus):
    rig = Rig()
    rig.measure("1")
    async with rig.running():
        for second, cpu in uses:
            await until(second)
            rig.use(cpu)
        await until(end)
    assert rig.moments() == moments
    assert rig.cpus() == cpus


@in_virtual_time
async def test_continuous_changes_are_damped_and_the_last_is_not_lost():
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
async def test_change_during_a_call_is_sent_after_the_damping():
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
async def test_hold_is_sent_soon():
    rig = Rig()
    rig.measure()
    async with rig.running():
        await until(10)
        rig.inventory.put_hold("r1", Hold("b", make.resources("cpu=10m,memory=1Mi")))
        rig.publisher.notify_changed()
        await until(12)
    assert rig.moments() == [0, 10.2]


# -- the response


@in_virtual_time
async def test_reservations_in_the_response_are_cached():
    rig = Rig()
    rig.measure()
    rig.broker.reservations = [reservation("r1"), replace(reservation("r2"), revision=5)]
    rig.reservations.put(replace(reservation("r2"), revision=100))
    rig.reservations.mark_gap()  # after which a broker that counts anew is believed
    async with rig.running():
        await settled()
    found = [rig.reservations.find(each.id) for each in rig.broker.reservations]
    assert found == rig.broker.reservations


def reservation(name):
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
async def test_object_shows_what_the_broker_computed():
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
async def test_object_shows_the_measurement_and_why_it_is_not_published():
    rig = Rig()
    rig.measure("1")
    rig.broker.available = bodies.Amounts("7", "50Gi")
    async with rig.running():
        await until(10)
        rig.broker.error = unreachable
        rig.use("4")
        await until(11)
        shown = await rig.shown()
    assert shown.spec.resources.allocated.cpu == "4"
    assert shown.spec.resources.available.cpu == "6"  # the broker's was for another measurement
    assert (shown.status.phase, shown.status.published) == ("Error", False)
    assert shown.status.message == "no route to the broker"
    assert shown.spec.timestamp == T0 + 10.2 * SECOND


class BrokenObjects(MemoryObjects):
    async def apply(self, wanted):
        raise StoreFailed("the disk is full")


@in_virtual_time
async def test_objects_that_cannot_be_written_do_not_stop_advertisements():
    rig = Rig(objects=BrokenObjects(now))
    rig.measure()
    async with rig.running():
        await until(61)
    assert rig.moments() == [0, 30, 60]
    assert rig.health.errors == {"advertisement": "the disk is full"}


# -- failures


@in_virtual_time
async def test_outage_of_an_hour_is_two_log_lines_and_ends_with_the_newest_measurement():
    rig = Rig(chance=0.5)
    rig.measure("1")
    with capture_logs() as logged:
        async with rig.running():
            await until(10)
            rig.broker.error = unreachable
            for second in range(10, 3610, 2):
                await until(second)
                rig.use(f"{1000 + second}m")
            tries = len(rig.broker.tries)
            rig.broker.error = None
            await until(3640)
            assert (await rig.shown()).status.published
    assert [(line["event"], line["component"]) for line in logged] == [
        ("Component unhealthy", "publisher"),
        ("Component healthy", "publisher"),
    ]
    assert rig.cpus()[:2] == ["1", "4608m"]  # nothing older
    # After 1, 2, 4, 8 and 16 s each 30 s, of which chance takes a quarter.
    assert 155 <= tries <= 170


@pytest.mark.parametrize(
    "error, chance, expected",
    [
        (unreachable(), 0.0, [0, 1, 3, 7, 15, 31, 61, 91, 121]),
        (unreachable(), 1.0, [0, 0.5, 1.5, 3.5]),
        (IdentityInUse("another agent"), 0.0, [0, 1, 3, 5, 7, 9]),
        (RateLimited("slowly", retry_after=5), 0.0, [0, 5, 10]),
        (RateLimited("slowly", retry_after=0), 0.0, [0, 1, 3, 7]),
        (RateLimited("slowly", retry_after=1e9), 0.0, [0, 30, 60]),
    ],
    ids=["doubles", "jitter", "takeover", "Retry-After", "short Retry-After", "limited"],
)
@in_virtual_time
async def test_transient_error_is_retried_after(error, chance, expected):
    rig = Rig(chance=chance)
    rig.broker.error = lambda: error
    rig.measure()
    async with rig.running():
        await until(expected[-1] + 0.4)
    assert rig.tries() == expected


@in_virtual_time
async def test_backoff_starts_again_after_a_success():
    rig = Rig()
    rig.broker.error = unreachable
    rig.measure()
    async with rig.running():
        await until(14)
        rig.broker.error = None
        await until(29)
        rig.broker.error = unreachable
        await until(31.5)
    assert rig.tries() == [0, 1, 3, 7, 15, 30, 31]


@in_virtual_time
async def test_changes_do_not_shorten_the_backoff():
    rig = Rig()
    rig.broker.error = unreachable
    rig.measure()
    async with rig.running():
        for step in range(60):
            await until(step / 10)
            rig.use(str(step % 9))
    assert len(rig.broker.tries) == 3


@in_virtual_time
async def test_error_is_logged_again_only_if_its_class_changes():
    rig = Rig()
    rig.measure()
    rig.broker.error = lambda: BrokerUnreachable(f"no answer at {now()}")
    with capture_logs() as logged:
        async with rig.running():
            await until(100)
            assert len(logged) == 1
            rig.broker.error = lambda: NotReady("the broker is starting")
            await until(150)
            assert rig.health.errors == {"publisher": "the broker is starting"}
    assert len(logged) == 2


@in_virtual_time
async def test_each_outage_is_logged():
    rig = Rig()
    rig.measure()
    with capture_logs() as logged:
        async with rig.running():
            for second, error in ((10, unreachable), (40, None), (70, unreachable), (100, None)):
                await until(second)
                rig.broker.error = error
            await until(130)
    assert [line["event"] for line in logged] == ["Component unhealthy", "Component healthy"] * 2


@pytest.mark.parametrize(
    "interval, seconds, end, tries, moments, error",
    [
        (30, 1e6, 31.5, [0, 31], [], "the broker did not answer within 30s"),
        (1, 9, 9.5, [0], [9], ""),
    ],
    ids=["gives up after the interval", "but not before ten seconds"],
)
@in_virtual_time
async def test_call_that_hangs(interval, seconds, end, tries, moments, error):
    rig = Rig(interval=interval * SECOND)
    rig.broker.seconds = seconds
    rig.measure()
    async with rig.running():
        await until(end)
        assert rig.health.errors == ({"publisher": error} if error else {})
    assert (rig.tries(), rig.moments()) == (tries, moments)


@in_virtual_time
async def test_permanent_error_is_reported_and_retried_when_due_only():
    rig = Rig()
    rig.broker.error = lambda: Forbidden("the cluster was removed")
    rig.measure()
    with capture_logs() as logged:
        async with rig.running():
            await until(10)
            rig.use("9")
            await until(40)
            assert rig.health.errors == {"publisher": "the cluster was removed"}
            assert (await rig.shown()).status.message == "the cluster was removed"
            assert len(logged) == 1
            rig.broker.error = lambda: InvalidInput("policy.hours: not a time")
            await until(70)
            assert rig.health.errors == {"publisher": "policy.hours: not a time"}
    assert rig.tries() == [0, 30, 60]


# -- without a broker


@in_virtual_time
async def test_without_a_broker_the_object_is_written_when_due():
    objects, inventory, measured = MemoryObjects(now), Inventory(), asyncio.Event()
    settings = AdvertisementConfig(cluster_id="a", align=True)
    publisher = LocalPublisher(settings, inventory, objects, ComponentHealth(), now)
    task = asyncio.create_task(publisher.run(measured))
    await until(10)
    assert await objects.list(Advertisement) == []
    inventory.reset([Node("n", ALL, ALL)], [])
    measured.set()
    for second, due in ((11, 10), (31, 30), (61, 60)):
        await until(second)
        [found] = await objects.list(Advertisement)
        assert found.spec.timestamp == T0 + due * SECOND
        assert (found.status.phase, found.status.message) == ("Active", "no broker configured")
    await stopped(task)


# -- writing the object


class FailingObjects(MemoryObjects):
    """Writes fail or are slow."""

    is_broken = False
    seconds = 0.0
    writes = 0
    conflicts = 0
    """How often another client changes the object just before its status is set."""

    async def apply(self, wanted):
        self.writes += 1
        await asyncio.sleep(self.seconds)
        if self.is_broken:
            raise StoreFailed("the disk is full")
        return await super().apply(wanted)

    async def set_status(self, wanted):
        if self.conflicts:
            self.conflicts -= 1
            found = await super().find(Advertisement, KEY)
            assert found is not None
            labels = {"team": str(self.conflicts)}
            await super().apply(replace(found, metadata=replace(found.metadata, labels=labels)))
        return await super().set_status(wanted)


class WriterRig:
    def __init__(self):
        self.objects, self.health = FailingObjects(now), ComponentHealth()
        settings = AdvertisementConfig(cluster_id="a")
        self.writer = AdvertisementWriter(settings, self.objects, self.health, now)

    def submit(self, cpu="1"):
        inventory, amounts = Inventory(), make.resources(f"cpu={cpu},memory=1Gi")
        inventory.reset([Node("n", amounts, amounts)], [])
        self.writer.submit(inventory.totals(), AdvertisementStatus("Active", message=f"m{cpu}"))

    @asynccontextmanager
    async def running(self):
        task = asyncio.create_task(self.writer.run())
        yield
        await stopped(task)

    async def found(self):
        await settled()
        found = await self.objects.find(Advertisement, KEY)
        assert found is not None
        return found

    async def assert_shown(self, cpu):
        found = await self.found()
        assert found.spec.resources.capacity.cpu == cpu
        assert found.status.message == f"m{cpu}"


@in_virtual_time
async def test_object_is_created_updated_and_recreated():
    rig = WriterRig()
    async with rig.running():
        for cpu in ("1", "2"):
            rig.submit(cpu)
            await rig.assert_shown(cpu)
        old = await rig.found()
        await rig.objects.delete(Advertisement, KEY)
        rig.submit("3")
        await rig.assert_shown("3")
        assert (await rig.found()).metadata.uid != old.metadata.uid
    assert len(await rig.objects.list(Advertisement)) == 1


@in_virtual_time
async def test_labels_and_annotations_of_others_stay():
    rig = WriterRig()
    async with rig.running():
        rig.submit("1")
        found = await rig.found()
        metadata = Metadata(found.metadata.name, labels={"a": "b"}, annotations={"c": "d"})
        await rig.objects.apply(replace(found, metadata=metadata))
        rig.submit("2")
        metadata = (await rig.found()).metadata
    assert (metadata.labels, metadata.annotations) == ({"a": "b"}, {"c": "d"})
    assert metadata.generation == 2


@pytest.mark.parametrize(
    "fault, error",
    [
        ({"is_broken": True}, "the disk is full"),
        ({"seconds": 1e6}, f"Advertisement {KEY}: not written within 10s"),
        ({"conflicts": 10**6}, "was modified"),
    ],
    ids=["broken", "hangs", "always modified"],
)
@in_virtual_time
async def test_failed_write_is_reported_until_one_succeeds(fault, error):
    rig = WriterRig()
    async with rig.running():
        for name, value in fault.items():
            setattr(rig.objects, name, value)
        rig.submit("1")
        await asyncio.sleep(11)
        assert list(rig.health.errors) == ["advertisement"]
        assert error in rig.health.errors["advertisement"]
        for name in fault:
            setattr(rig.objects, name, 0)
        rig.submit("2")
        await rig.assert_shown("2")
    assert rig.health.errors == {}


@in_virtual_time
async def test_slow_write_is_followed_by_the_newest_state_only():
    rig = WriterRig()
    rig.objects.seconds = 5
    async with rig.running():
        for cpu in "1234":
            rig.submit(cpu)
            await asyncio.sleep(1)
        await asyncio.sleep(20)
        await rig.assert_shown("4")
    assert rig.objects.writes == 2


@in_virtual_time
async def test_status_is_written_although_others_modify_the_object():
    rig = WriterRig()
    rig.objects.conflicts = 3
    async with rig.running():
        rig.submit()
        found = await rig.found()
    assert (found.status.phase, found.metadata.labels) == ("Active", {"team": "0"})
    assert rig.health.errors == {}
