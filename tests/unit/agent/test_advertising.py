"""Measuring and advertising: the collector, what is sent and shown of it, when, and after failures."""

import asyncio
from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

import make
from failing_objects import FailingObjects
from fake_broker import UNREACHABLE, FakeBroker
from kubelend.agent import advertisement
from kubelend.agent.advertisement import AdvertisementConfig
from kubelend.agent.health import ComponentHealth
from kubelend.agent.ports import ClusterChange, NodeDeleted, PodDeleted, Snapshot
from kubelend.agent.publisher import AdvertisementWriter, Collector, LocalPublisher, Publisher
from kubelend.agent.reservation_cache import ReservationCache
from kubelend.core.errors import (
    BrokerUnreachable,
    Forbidden,
    IdentityInUse,
    InvalidInput,
    InvalidQuantity,
    KubelendError,
    NotReady,
    RateLimited,
    StoreFailed,
    Unavailable,
)
from kubelend.core.inventory import Hold, Inventory, Totals
from kubelend.core.models import ClusterId
from kubelend.core.pod_requests import Node, Pod
from kubelend.core.resources import Resources
from kubelend.sources.memory_objects import MemoryObjects
from kubelend.wire import bodies, conversion, quantities
from kubelend.wire.objects import Advertisement, AdvertisementStatus
from make import MINUTE, MOMENT, NO_TIME, SECOND, T0
from virtual_time import in_virtual_time, now, rig_decorator, running, settled

ALL = make.resources("cpu=10,memory=100Gi")
KEY = "default/cluster-advertisement"
COST = bodies.Cost(cpu_cost="0.05", currency="EUR")
POLICY = bodies.LendingPolicy(deny=["team-x"], keep_back={"cpu": "2"})
SETTINGS = AdvertisementConfig(
    cluster_id="a",
    cluster_name="Alpha",
    cost=COST,
    labels={"tier": "gold"},
    region="eu",
    policy=POLICY,
    endpoint_url="https://a.example",
)


TOTALS = {
    "capacity": "cpu=11,memory=110Gi",
    "allocatable": "cpu=10,memory=100Gi,storage=100Gi,gpu=4,example.com/fpga=8",
    "allocated": "cpu=2,memory=20Gi",
    "pending": "",
    "largest": "",
    "held": "",
}


def totals(**texts):
    amounts = {name: make.resources(text) for name, text in (TOTALS | texts).items()}
    free = amounts["allocatable"] - amounts["allocated"] - amounts.pop("held")
    return Totals(**amounts, free=free, nodes=3, pods=7)


# -- the body


def test_body_carries_the_measurement_and_the_settings():
    measured = totals(allocated="cpu=1500m,memory=3Gi,gpu=1,example.com/fpga=2")
    sent = msgspec.json.encode(advertisement.advertisement_body(SETTINGS, measured, T0))
    read = conversion.to_advertisement(
        msgspec.json.decode(sent, type=bodies.Advertisement), ClusterId("a"), T0 + SECOND
    )
    for name in ("capacity", "allocatable", "allocated"):
        assert getattr(read, name) == getattr(measured, name)
    assert (read.cluster, read.name, read.endpoint) == ("a", "Alpha", "https://a.example")
    assert (read.sent_at, read.valid_for) == (T0, 90 * SECOND)
    assert read.labels["tier"] == "gold"
    body = advertisement.advertisement_body(SETTINGS, totals(held="cpu=1"), T0)
    assert (body.cost, body.policy, body.region) == (COST, POLICY, "eu")
    assert body.resources.reserved is None, "the broker's own"
    assert body.resources.available == quantities.to_quantities(totals(held="cpu=1").free)


def test_cluster_without_a_name_is_named_by_its_id():
    """The published broker refuses an advertisement without a name."""
    assert (
        advertisement.advertisement_body(
            replace(SETTINGS, cluster_name=""), totals(), T0
        ).cluster_name
        == "a"
    )


def test_no_negative_amount_is_sent():
    broken = replace(totals(), allocated=Resources(cpu=-1, memory=5))
    allocated = advertisement.advertisement_body(SETTINGS, broken, T0).resources.allocated
    assert allocated == bodies.Quantities("0", "5")


@pytest.mark.parametrize(
    "settings, expected",
    [
        pytest.param(SETTINGS, "1m30s", id="three intervals"),
        pytest.param(replace(SETTINGS, interval=SECOND), "10s", id="ten seconds at least"),
        pytest.param(replace(SETTINGS, valid_for=5 * MINUTE), "5m0s", id="as set"),
        pytest.param(replace(SETTINGS, valid_for=SECOND), "1s", id="as set, however short"),
    ],
)
def test_validity(settings, expected):
    assert advertisement.advertisement_body(settings, totals(), T0).valid_for == expected


@pytest.mark.parametrize("count, sent", [(40, 32), (31, 31)], ids=["too many", "allowed"])
def test_at_most_32_extended_resources_are_sent(count, sent):
    names = [f"example.com/r{number:02}" for number in range(count)]
    many = Resources(cpu=1, memory=1, extended=dict.fromkeys(names, 1))
    other = Resources(extended={"example.com/r05": 1, "example.com/r39": 1} if count == 40 else {})
    measured = replace(totals(), capacity=many, allocatable=many, allocated=other)
    body = advertisement.advertisement_body(SETTINGS, measured, T0)
    read = msgspec.json.decode(msgspec.json.encode(body), type=bodies.Advertisement).resources
    assert read.allocatable is not None
    assert read.allocated is not None
    assert list(read.capacity.extended) == list(read.allocatable.extended) == names[:sent]
    assert list(read.allocated.extended) == (["example.com/r05"] if count == 40 else [])


# -- the object


def test_object_shows_the_measurement():
    measured = totals(pending="cpu=3,memory=1Gi", largest="cpu=4,memory=2Gi,gpu=1")
    shown = advertisement.advertisement_object(SETTINGS, measured, T0, None)
    assert shown.key == "default/cluster-advertisement"
    named = replace(SETTINGS, name="mine", namespace="lending")
    assert advertisement.advertisement_object(named, measured, T0, None).key == "lending/mine"
    assert (shown.spec.cluster_id, shown.spec.timestamp, shown.spec.cost) == ("a", T0, COST)
    resources = shown.spec.resources
    assert resources.capacity == bodies.Amounts("11", "110Gi")
    assert resources.allocatable == bodies.Amounts(
        "10", "100Gi", "4", "100Gi", {"example.com/fpga": "8"}
    )
    assert resources.allocated == bodies.Amounts("2", "20Gi")
    assert resources.pending == bodies.Amounts("3", "1Gi")
    assert resources.largest == bodies.Amounts("4", "2Gi", "1")


@pytest.mark.parametrize(
    "available, allocated, expected",
    [
        pytest.param(bodies.Amounts("5", "7Gi"), "cpu=2", "5", id="computed by the broker"),
        pytest.param(None, "cpu=2", "7", id="not computed: free without what is held"),
        pytest.param(None, "cpu=12", "0", id="never negative"),
    ],
)
def test_available_is_what_the_broker_computed_or_what_is_free_here(available, allocated, expected):
    measured = totals(allocated=allocated, held="cpu=1")
    shown = advertisement.advertisement_object(SETTINGS, measured, T0, available)
    assert shown.spec.resources.available.cpu == expected


# -- significant changes

MANY = {"allocatable": "cpu=10,gpu=1000,example.com/fpga=1000", "allocated": "cpu=2"}
FULL = {"allocated": "cpu=9", "held": "cpu=1"}
NONE = {"allocatable": "", "allocated": ""}


def fpgas(count):
    return {"allocated": f"cpu=2,example.com/fpga={count}"}


@pytest.mark.parametrize(
    "published, found, expected",
    [
        pytest.param({}, {}, False, id="nothing changed"),
        pytest.param({}, {"capacity": "cpu=12,memory=110Gi"}, True, id="capacity"),
        pytest.param({}, {"allocatable": "cpu=9,memory=100Gi"}, True, id="allocatable"),
        pytest.param({}, {"held": "cpu=1m"}, True, id="a hold more"),
        pytest.param({"held": "cpu=1m"}, {}, True, id="a hold less"),
        pytest.param({}, {"pending": "cpu=100,memory=1Ti"}, False, id="pending is not offered"),
        pytest.param({}, {"largest": "cpu=1"}, False, id="the largest node is not offered"),
        pytest.param({"held": "cpu=1"}, {"held": "cpu=1"}, False, id="the same amount held"),
        pytest.param({}, {"allocated": "cpu=2099m,memory=20Gi"}, False, id="a little less free"),
        pytest.param({}, {"allocated": "cpu=2100m,memory=20Gi"}, True, id="1 % less free"),
        pytest.param({}, {"allocated": "cpu=2,memory=21Gi"}, True, id="1 % less memory"),
        pytest.param({}, {"allocated": "cpu=2,memory=20Gi,storage=1Gi"}, True, id="1 % of storage"),
        pytest.param({}, {"allocated": "cpu=1501m,memory=20Gi"}, False, id="a little more free"),
        pytest.param({}, {"allocated": "cpu=1500m,memory=20Gi"}, True, id="5 % more free"),
        pytest.param(MANY, MANY | {"allocated": "cpu=2,gpu=1"}, True, id="a device of many"),
        pytest.param(MANY | fpgas(2), MANY | fpgas(1), True, id="another device given back"),
        pytest.param({"allocated": "cpu=9950m"}, {"allocated": "cpu=10"}, True, id="all used up"),
        pytest.param({"allocated": "cpu=10"}, {"allocated": "cpu=9990m"}, True, id="some again"),
        pytest.param(FULL, FULL | {"allocated": "cpu=9001m"}, False, id="none before and now"),
        pytest.param(NONE, NONE | {"allocated": "cpu=1m"}, True, id="anything without capacity"),
    ],
)
def test_change_is_significant_or_not(published, found, expected):
    assert advertisement.is_significant_change(totals(**published), totals(**found)) is expected


# -- the schedule


def test_next_due_time_is_never_within_the_damping():
    settings = replace(SETTINGS, align=True, damping=20 * SECOND)
    assert settings.next_due(T0 + 15 * SECOND) == T0 + 60 * SECOND


INTERVAL = 30 * SECOND


def at(hour: int, minute: int, second: float = 0) -> datetime:
    return datetime(2026, 1, 1, hour, minute, tzinfo=UTC) + timedelta(seconds=second)


@pytest.mark.parametrize(
    "earliest, interval, offset, expected",
    [
        pytest.param(at(10, 0, 7), INTERVAL, NO_TIME, at(10, 0, 30), id="on the clock"),
        pytest.param(at(10, 0), INTERVAL, NO_TIME, at(10, 0), id="itself"),
        pytest.param(at(10, 0) + MOMENT, INTERVAL, NO_TIME, at(10, 0, 30), id="just over"),
        pytest.param(at(10, 0, 7), INTERVAL, 8 * SECOND, at(10, 0, 8), id="offset ahead"),
        pytest.param(at(10, 0, 9), INTERVAL, 8 * SECOND, at(10, 0, 38), id="offset behind"),
        pytest.param(at(10, 1), 7 * MINUTE, NO_TIME, at(10, 2), id="does not divide the hour"),
        pytest.param(at(10, 0, 0.05), 0.1 * SECOND, NO_TIME, at(10, 0, 0.1), id="short"),
    ],
)
def test_next_scheduled_time_is_the_first_not_before(earliest, interval, offset, expected):
    assert advertisement.next_scheduled(earliest, interval, offset) == expected


def test_offset_of_a_cluster_is_constant_and_offsets_are_spread_over_the_interval():
    offset = advertisement.advertising_offset
    assert offset("cluster-a", INTERVAL) == timedelta(microseconds=6_728_758)
    offsets = [offset(f"cluster-{number}", INTERVAL) for number in range(300)]
    tenths = [sum(k <= offset / (INTERVAL / 10) < k + 1 for offset in offsets) for k in range(10)]
    assert sum(tenths) == 300
    assert min(tenths) > 10
    assert min(offsets) >= NO_TIME


# -- the collector

TEN = make.resources("cpu=10,memory=10Gi")
ONE = make.resources("cpu=1,memory=1Gi")


class ScriptedSource:
    """Yields the changes of `send`; an error ends it, and None ends it without one."""

    def __init__(self):
        self.problem = ""
        self.opened: list[float] = []
        self.closed = 0
        self._script: asyncio.Queue[ClusterChange | KubelendError | None] = asyncio.Queue()

    async def identity(self):
        return "a"

    async def changes(self):
        self.opened.append(asyncio.get_running_loop().time())
        try:
            while (change := await self._script.get()) is not None:
                if isinstance(change, KubelendError):
                    raise change
                yield change
        finally:
            self.closed += 1

    def send(self, *changes):
        for change in changes:
            self._script.put_nowait(change)


class CollectorRig:
    def __init__(self):
        self.source, self.inventory = ScriptedSource(), Inventory()
        self.health = ComponentHealth()
        self.notified: list[int] = []
        self.collector = Collector(
            self.source,
            self.inventory,
            self.health,
            lambda: self.notified.append(self.inventory.totals().allocated.cpu),
        )

    def running(self):
        return running(self.collector.run())

    @property
    def cpus(self):
        totals = self.inventory.totals()
        return totals.allocatable.cpu, totals.allocated.cpu


collector = rig_decorator(CollectorRig)


SNAPSHOT = Snapshot([Node("n", TEN, TEN)], [Pod("p", "n", ONE)])


@pytest.mark.parametrize(
    "change, expected",
    [
        pytest.param(Node("m", TEN, TEN), (20_000, 1000), id="node added"),
        pytest.param(Node("n", TEN, ONE), (1000, 1000), id="node modified"),
        pytest.param(NodeDeleted("n"), (0, 0), id="node deleted"),
        pytest.param(Pod("q", "n", ONE), (10_000, 2000), id="pod added"),
        pytest.param(Pod("p", "n", TEN), (10_000, 10_000), id="pod modified"),
        pytest.param(PodDeleted("p"), (10_000, 0), id="pod deleted"),
        pytest.param(Snapshot([Node("m", ONE, ONE)], []), (1000, 0), id="another snapshot"),
    ],
)
@collector()
async def test_change_is_applied(rig, change, expected):
    rig.source.send(SNAPSHOT)
    await settled()
    assert rig.cpus == (10_000, 1000)
    rig.source.send(change)
    await settled()
    assert rig.cpus == expected
    assert rig.notified == [1000, expected[1]]  # after each change


@collector()
async def test_error_of_the_source_and_its_end_are_logged_once(rig):
    rig.source.send(SNAPSHOT)
    with capture_logs() as logged:
        await asyncio.sleep(10)
        rig.source.problem = "no route to the API server"
        await asyncio.sleep(1)
        assert rig.health.errors == {"collector": "no route to the API server"}
        await asyncio.sleep(3600)
        rig.source.problem = ""
        await asyncio.sleep(1)
        assert rig.health.errors == {}
    assert [line["event"] for line in logged] == ["Component unhealthy", "Component healthy"]


@collector()
async def test_it_has_not_measured_before_the_first_snapshot_and_says_why(rig):
    rig.health.require("collector")
    await asyncio.sleep(60)
    assert rig.health.not_ready_reason == "collector: starting"
    rig.source.problem = "no route to the API server"
    await asyncio.sleep(1)
    assert rig.health.not_ready_reason == "collector: no route to the API server"
    assert not rig.collector.measured.is_set()
    rig.source.problem = ""
    rig.source.send(SNAPSHOT)
    await settled()
    assert rig.collector.measured.is_set()
    assert rig.health.not_ready_reason == ""


@pytest.mark.parametrize(
    "end, expected",
    [
        pytest.param(InvalidQuantity("'x' is no number"), "'x' is no number", id="invalid"),
        pytest.param(Unavailable("gone away"), "gone away", id="unavailable"),
        pytest.param(None, "ended unexpectedly", id="no error"),
    ],
)
@in_virtual_time
async def test_source_that_ends_is_reported_and_reopened(end, expected):
    rig = CollectorRig()
    async with rig.running():
        rig.source.send(SNAPSHOT, end)
        await settled()
        assert expected in rig.health.errors["collector"]
        assert rig.cpus == (10_000, 1000)
        rig.source.send(Snapshot([Node("m", ONE, ONE)], []))
        await asyncio.sleep(2)
        assert rig.health.errors == {}
        assert rig.cpus == (1000, 0)
    assert rig.source.closed == len(rig.source.opened) == 2


@collector()
async def test_source_that_keeps_ending_is_reopened_with_backoff_until_it_has_worked(rig):
    rig.source.send(*[InvalidQuantity("pod p: 'x' is not a quantity")] * 20)
    with capture_logs() as logged:
        await asyncio.sleep(600)
    assert len(rig.source.opened) == 21
    assert len(logged) == 1
    rig.source.send(SNAPSHOT, Unavailable("gone away"))
    await asyncio.sleep(2)
    assert 600 < rig.source.opened[-1] <= 601


# -- publishing


class Rig:
    """One node with 10 cores. Advertisements are due at full half minutes, unless the settings differ."""

    def __init__(self, **settings):
        self.inventory, self.health = Inventory(), ComponentHealth()
        self.broker, self.objects = FakeBroker("a", make.runner()), FailingObjects()
        self.reservations, self.measured = ReservationCache(), asyncio.Event()
        self.clock, self.chance = now, 0.0
        self.publisher = Publisher(
            settings=AdvertisementConfig(**{"cluster_id": "a", "align": True, **settings}),
            inventory=self.inventory,
            communicator=self.broker,
            reservations=self.reservations,
            objects=self.objects,
            health=self.health,
            clock=lambda: self.clock(),  # noqa: PLW0108  a test replaces it
            chance=lambda: self.chance,
        )

    def running(self):
        return running(self.publisher.run(self.measured))

    def measure(self, cpu="1"):
        self.inventory.reset([Node("n", ALL, ALL)], [])
        self.use(cpu)
        self.measured.set()

    def use(self, cpu):
        self.inventory.put_pod(Pod("p", "n", make.resources(f"cpu={cpu},memory=1Gi")))
        self.publisher.notify_changed()

    def moments(self):
        """Of every accepted advertisement, in seconds from the start."""
        return [at for at, _ in self.broker.accepted]

    def tries(self):
        return self.broker.times("publish")

    def cpus(self):
        """What was advertised as allocated, each time."""
        found = [body.resources.allocated for _, body in self.broker.accepted]
        return [allocated.cpu for allocated in found if allocated is not None]

    async def shown(self):
        await settled()
        found = await self.objects.find(Advertisement, KEY)
        assert found is not None
        return found


publisher = rig_decorator(Rig)


async def until(seconds):
    """Let time pass, up to so many seconds from the start."""
    await asyncio.sleep(seconds - asyncio.get_running_loop().time())


# -- publishing on schedule


@publisher()
async def test_first_measurement_is_sent_at_once_and_then_on_schedule(rig):
    rig.inventory.put_hold("r1", Hold("b", make.resources("cpu=1,memory=1Gi")))
    rig.publisher.notify_changed()
    await until(7)
    assert await rig.objects.list(Advertisement) == []
    rig.measure()
    await until(100)
    assert rig.moments() == [7, 30, 60, 90]
    assert rig.publisher.published_at == T0 + 90 * SECOND


@publisher(cluster_id="cluster-a", align=False)
async def test_unaligned_cluster_has_due_times_of_its_own(rig):
    rig.measure()
    await until(100)
    assert rig.moments() == [0, 6.729, 36.729, 66.729, 96.729]


@publisher()
async def test_clock_that_is_set_back_does_not_stop_the_publisher(rig):
    rig.measure()
    await until(40)
    rig.clock = lambda: now() - make.HOUR
    await until(200)
    assert rig.moments() == [0, 30, 60, 90, 120, 150, 180]


@publisher()
async def test_timer_that_fires_early_does_not_send_twice(rig):
    rig.clock = lambda: T0 + (now() - T0) * 0.999
    rig.measure()
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
@publisher()
async def test_change_of_usage_is_sent(rig, uses, end, moments, cpus):
    rig.measure("1")
    for second, cpu in uses:
        await until(second)
        rig.use(cpu)
    await until(end)
    assert rig.moments() == moments
    assert rig.cpus() == cpus


@publisher()
async def test_change_during_a_call_is_sent_after_the_damping(rig):
    rig.measure("1")
    rig.broker.seconds["publish"] = 3
    await until(1)
    rig.use("5")
    await until(9)
    assert rig.moments() == [3, 8]
    assert rig.cpus() == ["1", "5"]


# -- the response


@publisher()
async def test_reservations_in_the_response_are_cached(rig):
    rig.measure()
    listed = [reservation("r1"), replace(reservation("r2"), revision=5)]
    rig.broker.listed = listed
    rig.reservations.put(replace(reservation("r2"), revision=100))
    rig.reservations.mark_gap()  # after which a broker that counts anew is believed
    await settled()
    assert [rig.reservations.find(each.id) for each in listed] == listed


def reservation(name):
    amounts, status = bodies.Quantities("1", "1Gi"), bodies.ReservationStatus("Reserved", "")
    return bodies.Reservation(name, "b", "a", amounts, status, T0, revision=1)


@publisher()
async def test_object_shows_what_the_broker_computed_or_why_it_is_not_published(rig):
    rig.measure("1")
    rig.broker.available = bodies.Amounts("7", "50Gi")
    shown = await rig.shown()
    assert shown.spec.resources.available == rig.broker.available
    assert (shown.status.phase, shown.status.message) == ("Active", "")
    assert shown.status.published
    assert shown.status.last_update_time == shown.spec.timestamp == T0
    await until(10)
    rig.broker.error = UNREACHABLE
    rig.use("4")
    await until(11)
    shown = await rig.shown()
    assert shown.spec.resources.allocated.cpu == "4"
    assert shown.spec.resources.available.cpu == "6"  # the broker's was for another measurement
    assert (shown.status.phase, shown.status.published) == ("Error", False)
    assert shown.status.message == "no route"
    assert shown.spec.timestamp == T0 + 10.2 * SECOND


@publisher()
async def test_objects_that_cannot_be_written_do_not_stop_advertisements(rig):
    rig.objects.error = StoreFailed("the disk is full")
    rig.measure()
    await until(61)
    assert rig.moments() == [0, 30, 60]
    assert rig.health.errors == {"advertisement": "the disk is full"}


# -- failures


@publisher()
async def test_outage_of_an_hour_is_two_log_lines_and_ends_with_the_newest_measurement(rig):
    rig.chance = 0.5
    rig.measure("1")
    with capture_logs() as logged:
        await until(10)
        rig.broker.error = UNREACHABLE
        for second in range(10, 3610, 2):
            await until(second)
            rig.use(f"{1000 + second}m")
        tries = len(rig.tries())
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
        (UNREACHABLE, 0.0, [0, 1, 3, 7, 15, 31, 61, 91, 121]),
        (UNREACHABLE, 1.0, [0, 0.5, 1.5, 3.5]),
        (IdentityInUse("another agent"), 0.0, [0, 1, 3, 5, 7, 9]),
        (RateLimited("slowly", retry_after=5), 0.0, [0, 5, 10]),
        (RateLimited("slowly", retry_after=0), 0.0, [0, 1, 3, 7]),
        (RateLimited("slowly", retry_after=1e9), 0.0, [0, 30, 60]),
    ],
    ids=["doubles", "jitter", "takeover", "Retry-After", "short Retry-After", "limited"],
)
@publisher()
async def test_transient_error_is_retried_after(rig, error, chance, expected):
    rig.chance, rig.broker.error = chance, error
    rig.measure()
    await until(expected[-1] + 0.4)
    assert rig.tries() == expected


@publisher()
async def test_backoff_starts_again_after_a_success(rig):
    rig.broker.error = UNREACHABLE
    rig.measure()
    await until(14)
    rig.broker.error = None
    await until(29)
    rig.broker.error = UNREACHABLE
    await until(31.5)
    assert rig.tries() == [0, 1, 3, 7, 15, 30, 31]


@publisher()
async def test_error_is_logged_again_only_if_its_class_changes(rig):
    rig.measure()
    with capture_logs() as logged:
        for second in range(1, 100):
            rig.broker.error = BrokerUnreachable(f"no answer at {second}")
            await until(second)
        assert len(logged) == 1
        rig.broker.error = NotReady("the broker is starting")
        await until(150)
        assert rig.health.errors == {"publisher": "the broker is starting"}
        assert len(logged) == 2
        for error in (None, NotReady("again")):
            rig.broker.error = error
            await asyncio.sleep(60)
    assert len(logged) == 4, "the end of an outage, and the next one"


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
    rig.broker.seconds["publish"] = seconds
    rig.measure()
    async with rig.running():
        await until(end)
        assert rig.health.errors == ({"publisher": error} if error else {})
    assert (rig.tries(), rig.moments()) == (tries, moments)


@publisher()
async def test_permanent_error_is_reported_and_retried_when_due_only(rig):
    rig.broker.error = Forbidden("the cluster was removed")
    rig.measure()
    with capture_logs() as logged:
        await until(10)
        rig.use("9")
        await until(40)
        assert rig.health.errors == {"publisher": "the cluster was removed"}
        assert (await rig.shown()).status.message == "the cluster was removed"
        assert len(logged) == 1
        rig.broker.error = InvalidInput("policy.hours: not a time")
        await until(70)
        assert rig.health.errors == {"publisher": "policy.hours: not a time"}
    assert rig.tries() == [0, 30, 60]


# -- without a broker


@in_virtual_time
async def test_without_a_broker_the_object_is_written_when_due():
    objects, inventory, measured = MemoryObjects(now), Inventory(), asyncio.Event()
    settings = AdvertisementConfig(cluster_id="a", align=True)
    local = LocalPublisher(settings, inventory, objects, ComponentHealth(), now)
    async with running(local.run(measured)):
        await until(10)
        assert await objects.list(Advertisement) == []
        inventory.reset([Node("n", ALL, ALL)], [])
        measured.set()
        for second, due in ((11, 10), (31, 30), (61, 60)):
            await until(second)
            [found] = await objects.list(Advertisement)
            assert found.spec.timestamp == T0 + due * SECOND
            assert (found.status.phase, found.status.message) == ("Active", "no broker configured")


# -- writing the object


class WriterRig:
    def __init__(self):
        self.objects, self.health = FailingObjects(), ComponentHealth()
        settings = AdvertisementConfig(cluster_id="a")
        self.writer = AdvertisementWriter(settings, self.objects, self.health, now)

    def submit(self, cpu="1"):
        inventory, amounts = Inventory(), make.resources(f"cpu={cpu},memory=1Gi")
        inventory.reset([Node("n", amounts, amounts)], [])
        self.writer.submit(inventory.totals(), AdvertisementStatus("Active", message=f"m{cpu}"))

    def running(self):
        return running(self.writer.run())

    async def found(self):
        await settled()
        found = await self.objects.find(Advertisement, KEY)
        assert found is not None
        return found

    async def assert_shown(self, cpu):
        found = await self.found()
        assert found.spec.resources.capacity.cpu == cpu
        assert found.status.message == f"m{cpu}"


writer = rig_decorator(WriterRig)


@pytest.mark.parametrize(
    "fault, error",
    [
        ({"error": StoreFailed("the disk is full")}, "the disk is full"),
        ({"seconds": 1e6}, f"Advertisement {KEY}: not written within 10s"),
        ({"conflicts": 10**6}, "was modified"),
    ],
    ids=["broken", "hangs", "always modified"],
)
@writer()
async def test_failed_write_is_reported_until_one_succeeds(rig, fault, error):
    for name, value in fault.items():
        setattr(rig.objects, name, value)
    rig.submit("1")
    await asyncio.sleep(11)
    assert list(rig.health.errors) == ["advertisement"]
    assert error in rig.health.errors["advertisement"]
    for name in fault:
        delattr(rig.objects, name)
    rig.submit("2")
    await rig.assert_shown("2")
    assert rig.health.errors == {}


@writer()
async def test_slow_write_is_followed_by_the_newest_state_only(rig):
    rig.objects.seconds = 5
    for cpu in "1234":
        rig.submit(cpu)
        await asyncio.sleep(1)
    await asyncio.sleep(20)
    await rig.assert_shown("4")
    assert rig.objects.writes == 2
