"""What is measured is said in full, in the words of the wire; and what matters is told from what does not."""

import msgspec
import pytest
from msgspec.structs import replace

import make
from kubelend.agent import advertisement
from kubelend.agent.advertisement import AdvertisementConfig
from kubelend.core.inventory import Totals
from kubelend.core.models import ClusterId
from kubelend.core.resources import NOTHING, Resources
from kubelend.wire import bodies, conversion
from make import MINUTE, SECOND, T0

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


def test_the_broker_reads_what_was_measured_and_set():
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
    body = advertisement.advertisement_body(SETTINGS, measured, T0)
    assert (body.cost, body.policy, body.region) == (COST, POLICY, "eu")


def test_the_broker_is_not_told_what_only_it_knows():
    metrics = advertisement.advertisement_body(
        SETTINGS, totals(held="cpu=1,memory=1Gi"), T0
    ).resources
    assert metrics.reserved is None
    assert metrics.available is None


def test_no_amount_below_zero_is_sent():
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
def test_it_is_valid_for(settings, expected):
    assert advertisement.advertisement_body(settings, totals(), T0).valid_for == expected


def test_of_too_many_resources_as_many_are_named_as_can_be():
    many = Resources(cpu=1, memory=1, extended={f"example.com/r{n:02}": 1 for n in range(40)})
    other = Resources(extended={"example.com/a": 1, "example.com/r05": 1, "example.com/r39": 1})
    body = advertisement.advertisement_body(
        SETTINGS, replace(totals(), capacity=many, allocatable=many, allocated=other), T0
    )
    read = msgspec.json.decode(msgspec.json.encode(body), type=bodies.Advertisement).resources
    assert list(read.capacity.extended) == [f"example.com/r{n:02}" for n in range(32)]
    assert read.allocatable is not None
    assert read.allocatable.extended == read.capacity.extended
    assert read.allocated is not None
    assert list(read.allocated.extended) == ["example.com/r05"]


def test_as_many_resources_as_can_be_named_are_all_named():
    many = Resources(cpu=1, memory=1, extended={f"example.com/r{n:02}": 1 for n in range(31)})
    more = many + Resources(extended={"example.com/only-a-capacity": 1})
    body = advertisement.advertisement_body(
        SETTINGS, replace(totals(), capacity=more, allocatable=many), T0
    )
    assert list(body.resources.capacity.extended) == sorted(more.extended)


# -- the object


def test_the_object_shows_what_was_measured():
    measured = totals(pending="cpu=3,memory=1Gi", largest="cpu=4,memory=2Gi,gpu=1")
    shown = advertisement.advertisement_object(SETTINGS, measured, T0, None)
    assert shown.key == "default/cluster-advertisement"
    assert (shown.spec.cluster_id, shown.spec.timestamp, shown.spec.cost) == ("a", T0, COST)
    resources = shown.spec.resources
    assert resources.capacity == bodies.Amounts("11", "110Gi")
    assert resources.allocatable == bodies.Amounts(
        "10", "100Gi", "4", "100Gi", {"example.com/fpga": "8"}
    )
    assert resources.allocated == bodies.Amounts("2", "20Gi")
    assert resources.pending == bodies.Amounts("3", "1Gi")
    assert resources.largest == bodies.Amounts("4", "2Gi", "1")


def test_the_object_is_named_as_the_settings_say():
    settings = replace(SETTINGS, name="mine", namespace="lending")
    assert advertisement.advertisement_object(settings, totals(), T0, None).key == "lending/mine"


def answer(available):
    metrics = bodies.Metrics(bodies.Quantities("1", "1"), available=available)
    return bodies.PublishResult(bodies.Advertisement("a", metrics))


@pytest.mark.parametrize(
    "answered, allocated, expected",
    [
        pytest.param(answer(bodies.Amounts("5", "7Gi")), "cpu=2", "5", id="the broker's word"),
        pytest.param(None, "cpu=2", "7", id="no answer: the own sum without what is held"),
        pytest.param(answer(None), "cpu=2", "7", id="an answer that does not say"),
        pytest.param(None, "cpu=12", "0", id="never below nothing"),
    ],
)
def test_what_is_available_is_the_brokers_word_or_the_own_sum(answered, allocated, expected):
    measured = totals(allocated=allocated, held="cpu=1")
    shown = advertisement.advertisement_object(SETTINGS, measured, T0, answered)
    assert shown.spec.resources.available.cpu == expected


# -- what matters

MANY = {"allocatable": "cpu=10,gpu=1000,example.com/fpga=1000", "allocated": "cpu=2"}


@pytest.mark.parametrize(
    "told, found, expected",
    [
        pytest.param({}, {}, False, id="nothing changed"),
        pytest.param({}, {"capacity": "cpu=12,memory=110Gi"}, True, id="capacity"),
        pytest.param({}, {"allocatable": "cpu=9,memory=100Gi"}, True, id="allocatable"),
        pytest.param({}, {"held": "cpu=1m"}, True, id="a hold more"),
        pytest.param({"held": "cpu=1m"}, {}, True, id="a hold less"),
        pytest.param({}, {"pending": "cpu=100,memory=1Ti"}, False, id="pending is not offered"),
        pytest.param({}, {"largest": "cpu=1"}, False, id="the largest node is not offered"),
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
            id="anything is much of nothing",
        ),
    ],
)
def test_a_change_is_noticeable_or_not(told, found, expected):
    assert advertisement.is_significant_change(totals(**told), totals(**found)) is expected


def test_a_hold_that_only_changes_hands_is_not_noticeable():
    told = totals(held="cpu=1,memory=1Gi")
    assert not advertisement.is_significant_change(
        told, replace(told, nodes=4, pods=9, pending=NOTHING)
    )


# -- when


@pytest.mark.parametrize(
    "after, expected",
    [
        pytest.param(0, 30, id="at its moment"),
        pytest.param(29.9, 60, id="a little early: the moment is served"),
        pytest.param(26.9, 30, id="well before"),
        pytest.param(27.1, 60, id="shortly before"),
    ],
)
def test_the_next_moment_is_not_the_one_that_was_just_served(after, expected):
    settings = replace(SETTINGS, align=True)
    assert settings.next_due(T0 + after * SECOND) == T0 + expected * SECOND


def test_the_next_moment_is_never_within_the_damping():
    settings = replace(SETTINGS, align=True, damping=20 * SECOND)
    assert settings.next_due(T0 + 15 * SECOND) == T0 + 60 * SECOND


def test_unaligned_clusters_have_moments_of_their_own():
    due = {replace(SETTINGS, cluster_id=name).next_due(T0) for name in "abcdef"}
    assert len(due) == 6
    assert all(T0 < moment <= T0 + 33 * SECOND for moment in due)
