"""The advertisement: the measurement in full, which changes are significant, and when it is due."""

from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from msgspec.structs import replace

import make
from kubelend.agent import advertisement
from kubelend.agent.advertisement import AdvertisementConfig
from kubelend.core.inventory import Totals
from kubelend.core.models import ClusterId
from kubelend.core.resources import Resources
from kubelend.wire import bodies, conversion
from make import MINUTE, MOMENT, NO_TIME, SECOND, T0

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


def totals(
    *,
    allocatable="cpu=10,memory=100Gi,storage=100Gi,gpu=4,example.com/fpga=8",
    allocated="cpu=2,memory=20Gi",
    held="",
    capacity="cpu=11,memory=110Gi",
    pending="",
    largest="",
):
    rest = make.resources(allocatable) - make.resources(allocated) - make.resources(held)
    return Totals(
        capacity=make.resources(capacity),
        allocatable=make.resources(allocatable),
        allocated=make.resources(allocated),
        pending=make.resources(pending),
        largest=make.resources(largest),
        free=rest,
        nodes=3,
        pods=7,
    )


# -- the body


def test_body_carries_the_measurement_and_the_settings():
    measured = totals(allocated="cpu=1500m,memory=3Gi,gpu=1,example.com/fpga=2")
    sent = msgspec.json.encode(advertisement.advertisement_body(SETTINGS, measured, T0))
    read = conversion.to_advertisement(
        msgspec.json.decode(sent, type=bodies.Advertisement), ClusterId("a"), T0 + SECOND
    )
    assert (read.capacity, read.allocatable, read.allocated) == (
        measured.capacity,
        measured.allocatable,
        measured.allocated,
    )
    assert (read.cluster, read.name, read.endpoint) == ("a", "Alpha", "https://a.example")
    assert (read.sent_at, read.valid_for) == (T0, 90 * SECOND)
    assert read.labels["tier"] == "gold"
    body = advertisement.advertisement_body(SETTINGS, totals(held="cpu=1"), T0)
    assert (body.cost, body.policy, body.region) == (COST, POLICY, "eu")
    assert (body.resources.reserved, body.resources.available) == (None, None), "the broker's own"


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
        pytest.param(MANY, {**MANY, "allocated": "cpu=2,gpu=1"}, True, id="a device of many"),
        pytest.param(
            {**MANY, "allocated": "cpu=2,example.com/fpga=2"},
            {**MANY, "allocated": "cpu=2,example.com/fpga=1"},
            True,
            id="another device given back",
        ),
        pytest.param({"allocated": "cpu=9950m"}, {"allocated": "cpu=10"}, True, id="all used up"),
        pytest.param({"allocated": "cpu=10"}, {"allocated": "cpu=9990m"}, True, id="some again"),
        pytest.param(
            {"allocated": "cpu=9", "held": "cpu=1"},
            {"allocated": "cpu=9001m", "held": "cpu=1"},
            False,
            id="none before and none now",
        ),
        pytest.param(
            {"allocatable": "", "allocated": ""},
            {"allocatable": "", "allocated": "cpu=1m"},
            True,
            id="anything is significant without capacity",
        ),
    ],
)
def test_change_is_significant_or_not(published, found, expected):
    assert advertisement.is_significant_change(totals(**published), totals(**found)) is expected


# -- the schedule


@pytest.mark.parametrize(
    "after, expected",
    [
        pytest.param(0, 30, id="on time"),
        pytest.param(29.9, 60, id="timer slightly early"),
        pytest.param(26.9, 30, id="well before"),
        pytest.param(27.1, 60, id="shortly before"),
    ],
)
def test_next_due_time_is_not_the_one_just_served(after, expected):
    settings = replace(SETTINGS, align=True)
    assert settings.next_due(T0 + after * SECOND) == T0 + expected * SECOND


def test_next_due_time_is_never_within_the_damping():
    settings = replace(SETTINGS, align=True, damping=20 * SECOND)
    assert settings.next_due(T0 + 15 * SECOND) == T0 + 60 * SECOND


def test_unaligned_clusters_have_due_times_of_their_own():
    due = {replace(SETTINGS, cluster_id=name).next_due(T0) for name in "abcdef"}
    assert len(due) == 6
    assert all(T0 < each <= T0 + 33 * SECOND for each in due)


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


def test_offset_of_a_cluster_is_constant():
    assert advertisement.advertising_offset("cluster-a", INTERVAL) == timedelta(
        microseconds=6_728_758
    )


def test_offsets_are_spread_over_the_interval():
    offsets = [
        advertisement.advertising_offset(f"cluster-{number}", INTERVAL) for number in range(300)
    ]
    tenths = [sum(k <= offset / (INTERVAL / 10) < k + 1 for offset in offsets) for k in range(10)]
    assert sum(tenths) == 300
    assert min(tenths) > 10
    assert min(offsets) >= NO_TIME
