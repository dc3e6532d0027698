"""The columns hold what the records say, whatever is added, rewritten and taken away."""

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

import make
from kubelend.core import fleet as fleets
from kubelend.core import lending, timestamps
from kubelend.core.fleet import Fleet
from kubelend.core.models import Cluster, ClusterId
from kubelend.core.resources import NOTHING

NOON = timestamps.to_micros(make.T0)
POLICIES = [
    None,
    None,
    make.policy(keep_back="cpu=2,example.com/a=1"),
    make.policy(allow=["s"], max_lent="cpu=3"),
    make.policy(deny=["r"], max_per_requester="cpu=1,example.com/b=1"),
    make.policy(hours=["13:00-14:00"]),
    make.policy(hours=["11:00-14:00"], deny=["r"]),
]
NAMES = ["cpu", "memory", "gpu", "storage", "example.com/a", "example.com/b"]


def put(fleet, cluster):
    free = cluster.ceiling.clamped()
    holds = lending.effective_policy(cluster.advertisement.policy, None)
    fleet.put(cluster, free)
    fleet.set_policy(cluster, holds)
    if holds is not None:
        fleet.apply_policy(cluster.id, holds, free, NOTHING)


def contents(fleet):
    """Every column as lists, by cluster."""
    return {
        "ids": fleet.ids,
        "labels": fleet.labels,
        "free": {name: _list(fleet.free(name)) for name in NAMES},
        "ceiling": {name: _list(fleet.ceiling(name)) for name in NAMES},
        "free_and_allocatable": {
            name: None
            if fleet.free_and_allocatable(name) is None
            else [_list(part) for part in fleet.free_and_allocatable(name)]
            for name in NAMES
        },
        "valid_until": _list(fleet.valid_until),
        "uncordoned": _list(fleet.uncordoned),
        "currency": _list(fleet.currency),
        "rates": _list(fleet.rates),
        "labelled": _list(fleet.with_label("zone", "x")),
        "prices": fleet.prices,
        "available": {name: _list(fleet.available(name)) for name in NAMES},
        "limit_columns": {name: limit_column(fleet, name) for name in NAMES},
        "requester_cap_left": {
            name: _list(fleet.requester_cap_left(name, make.R)) for name in NAMES
        },
        "requester_mask": None
        if fleet.policy_columns is None
        else [_list(mask) for mask in fleet.policy_columns.requester_mask(make.R, len(fleet))],
        "within_hours": _list(fleet.within_hours(NOON)),
        "usable": _list(fleet.usable(NOON)),
        "nominations": fleet.nomination_count,
        "not_nominated_above": [_list(fleet.not_nominated_above(1, ticket)) for ticket in range(7)],
    }


def limit_column(fleet, name):
    found = fleet.limit_column(name)
    return None if found is None else [_list(array[: len(fleet)]) for array in found.arrays()]


def _list(array):
    return None if array is None else array.tolist()


def test_rows_are_in_the_order_of_ids():
    fleet = Fleet()
    for name in ("m", "a", "z", "b"):
        put(fleet, make.cluster(name))
    assert fleet.ids == ["a", "b", "m", "z"]
    assert [fleet.find_row(ClusterId(name)) for name in ("a", "z", "c")] == [0, 3, None]


def test_fleet_grows_over_its_first_room_without_losing_a_row():
    fleet = Fleet(capacity=2)
    for number in range(40, 0, -1):
        put(fleet, make.cluster(f"c{number:03}", f"cpu={number},memory={number}Gi"))
    assert _list(fleet.free("cpu")) == [1000 * number for number in range(1, 41)]
    assert fleet.not_nominated_above(-(2**31), 0).all()


def test_column_of_an_extended_resource_comes_and_goes_with_the_last_cluster_that_offers_it():
    fleet = Fleet()
    assert fleet.free("example.com/a") is None
    put(fleet, make.cluster("x", "cpu=1,example.com/a=2"))
    put(fleet, make.cluster("y", "cpu=1,example.com/a=3"))
    put(fleet, make.cluster("z", "cpu=1"))
    assert _list(fleet.free("example.com/a")) == [2, 3, 0]
    put(fleet, make.cluster("x", "cpu=1"))
    assert _list(fleet.free("example.com/a")) == [0, 3, 0]
    fleet.remove(ClusterId("y"))
    assert fleet.free("example.com/a") is None
    assert fleet.ceiling("example.com/a") is None
    assert fleet.free_and_allocatable("example.com/a") is None


def test_label_masks_follow_the_labels():
    fleet = Fleet()
    put(fleet, make.cluster("a", labels={"zone": "x"}))
    assert fleet.with_label("zone", "x").tolist() == [True]
    put(fleet, make.cluster("b", labels={"zone": "x"}))
    assert fleet.with_label("zone", "x").tolist() == [True, True]
    put(fleet, make.cluster("a", labels={"zone": "y"}))
    assert fleet.with_label("zone", "x").tolist() == [False, True]
    fleet.remove(ClusterId("a"))
    assert fleet.with_label("zone", "x").tolist() == [True]


def test_labels_of_requests_do_not_fill_the_memory():
    fleet = Fleet()
    put(fleet, make.cluster("a", labels={"n": "7"}))
    seen = [
        bool(fleet.with_label("n", str(value))[0]) for value in range(3 * fleets.MAX_LABEL_MASKS)
    ]
    assert seen == [value == 7 for value in range(3 * fleets.MAX_LABEL_MASKS)]
    assert len(fleet._label_masks) <= fleets.MAX_LABEL_MASKS  # noqa: SLF001 - only its size shows it


@pytest.mark.parametrize(
    "priority, ticket, open_to",
    [(0, 99, False), (4, 1, False), (5, 11, False), (5, 10, True), (5, 9, True), (6, 99, True)],
)
def test_nomination_keeps_out_who_ranks_behind(priority, ticket, open_to):
    fleet = Fleet()
    put(fleet, make.cluster("a"))
    fleet.set_nomination(ClusterId("a"), (5, 10))
    assert fleet.not_nominated_above(priority, ticket).tolist() == [open_to]


def test_nominations_are_counted_once_and_end_with_their_cluster():
    fleet = Fleet()
    put(fleet, make.cluster("a"))
    fleet.set_nomination(ClusterId("a"), (0, 1))
    fleet.set_nomination(ClusterId("a"), (1, 2))
    put(fleet, make.cluster("a", "cpu=9"))
    assert fleet.nomination_count == 1
    fleet.remove(ClusterId("a"))
    assert fleet.nomination_count == 0
    put(fleet, make.cluster("a"))
    assert fleet.not_nominated_above(0, 1).all()


def test_unknown_cluster_changes_nothing():
    fleet = Fleet()
    put(fleet, make.cluster("a"))
    before = contents(fleet)
    fleet.remove(ClusterId("x"))
    fleet.set_free(ClusterId("x"), make.resources("cpu=1"), make.resources("cpu=1"))
    fleet.renew_validity(make.cluster("x"))
    fleet.set_nomination(ClusterId("x"), (1, 1))
    assert contents(fleet) == before


def test_instants_and_currencies_fit_a_column_exactly():
    assert (
        timestamps.to_micros(make.T0 + timedelta(microseconds=1)) - timestamps.to_micros(make.T0)
        == 1
    )
    codes = [fleets.currency_code(text) for text in ("EUR", "USD", "CREDITS", "ZZZZZZZZ")]
    assert len(set(codes)) == 4
    assert all(0 < code < 2**63 for code in codes)


@st.composite
def clusters(draw):
    extended = draw(st.sampled_from(["", ",example.com/a=1", ",example.com/a=2,example.com/b=3"]))
    return make.cluster(
        draw(st.sampled_from("abcdef")),
        f"cpu={draw(st.integers(0, 9))},memory={draw(st.integers(0, 9))}Gi{extended}",
        allocated=f"cpu={draw(st.integers(0, 9))}",
        labels=draw(st.sampled_from([{}, {"zone": "x"}, {"zone": "y"}])),
        prices=draw(st.sampled_from([None, make.price_list(cpu="1"), make.price_list("EUR")])),
        cordon=draw(st.sampled_from([None, "closed"])),
        policy=draw(st.sampled_from(POLICIES)),
    )


@given(st.lists(clusters() | st.sampled_from("abcdef"), max_size=30))
def test_fleet_with_a_past_equals_one_that_is_written_afresh(steps):
    """A cluster is put, a letter is removed; rows and columns must shift without a trace."""
    fleet = Fleet(capacity=1)
    present: dict[ClusterId, Cluster] = {}
    for step in steps:
        if isinstance(step, str):
            fleet.remove(ClusterId(step))
            present.pop(ClusterId(step), None)
        else:
            put(fleet, step)
            present[step.id] = step
            fleet.set_nomination(step.id, (1, "abcdef".index(step.id)))
    fresh = Fleet()
    for cluster in present.values():
        put(fresh, cluster)
        fresh.set_nomination(cluster.id, (1, "abcdef".index(cluster.id)))
    assert contents(fleet) == contents(fresh)


def test_extended_resources_are_counted_by_the_clusters_that_offer_them():
    """Written again, or with other names, a cluster counts once; the last to go takes the column."""
    fleet = Fleet()
    for amounts in ("example.com/a=1", "example.com/a=2", "example.com/a=1,example.com/b=1"):
        put(fleet, make.cluster("x", f"cpu=1,{amounts}"))
        put(fleet, make.cluster("y", f"cpu=1,{amounts}"))
    fleet.remove(ClusterId("x"))
    assert _list(fleet.free("example.com/a")) == _list(fleet.free("example.com/b")) == [1]
    put(fleet, make.cluster("y", "cpu=1,example.com/b=5"))
    assert (fleet.free("example.com/a"), _list(fleet.free("example.com/b"))) == (None, [5])
    fleet.remove(ClusterId("y"))
    put(fleet, make.cluster("z", "cpu=1,example.com/a=7"))
    assert (_list(fleet.free("example.com/a")), fleet.free("example.com/b")) == ([7], None)


def test_usable_clusters_stay_usable_when_the_arrays_grow():
    fleet = Fleet(capacity=2)
    for name in ("a", "b"):
        put(fleet, make.cluster(name))
    assert fleet.usable(NOON).all()  # cached from here on
    put(fleet, make.cluster("c"))
    assert fleet.usable(NOON).tolist() == [True, True, True]
