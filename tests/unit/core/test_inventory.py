"""What a cluster has and uses is summed exactly, nothing counts twice, and nothing is forgotten."""

import msgspec
import pytest

from kubelend.core.inventory import Hold, Inventory
from kubelend.core.pod_requests import Node, OffloadedFrom, Pod
from kubelend.core.resources import NOTHING, Resources

FPGA = "example.com/fpga"
VIRTUAL = {"liqo.io/type": "virtual-node"}


def cpu(cores, **others):
    return Resources(cpu=cores, **others)


TEN = cpu(10)


def node(name="n1", amount=TEN, **fields):
    return Node(name, cpu(amount.cpu + 1), amount, **fields)


def pod(id, amount=1, on="n1", of=None, **fields):
    """One that asks for so much CPU; `of` is "origin/virtual node" of a guest."""
    guest = OffloadedFrom(*of.split("/")) if of else None
    requests = amount if isinstance(amount, Resources) else cpu(amount)
    return Pod(id, on, requests, offloaded_from=guest, **fields)


def inventory(*things, **holds):
    """Of nodes and pods, and of holds as `res1=("rome", 4)`."""
    made = Inventory()
    for thing in things:
        made.put_node(thing) if isinstance(thing, Node) else made.put_pod(thing)
    for reservation, (requester, amount) in holds.items():
        resources = amount if isinstance(amount, Resources) else cpu(amount)
        made.put_hold(reservation, Hold(requester, resources))
    return made


def allocated(found):
    return found.totals().allocated.cpu


def free(found, without=""):
    assert found.free() == found.totals().free
    return found.free(without).cpu


# -- nodes and pods


def test_empty_cluster_has_nothing():
    totals = Inventory().totals()
    assert (totals.nodes, totals.pods) == (0, 0)
    assert {totals.capacity, totals.allocated, totals.free, totals.largest} == {NOTHING}


def test_nodes_and_pods_are_summed():
    found = inventory(node("n1"), node("n2", cpu(20)), pod("a", 2), pod("b", 3, on="n2"))
    totals = found.totals()
    assert (totals.capacity, totals.allocatable) == (cpu(32), cpu(30))
    assert (totals.allocated, totals.free) == (cpu(5), cpu(25))
    assert (totals.nodes, totals.pods) == (2, 2)


@pytest.mark.parametrize(
    "fields",
    [{"is_ready": False}, {"is_schedulable": False}, {"labels": VIRTUAL}],
    ids=["not_ready", "cordoned", "virtual"],
)
def test_node_that_does_not_count_takes_its_pods_with_it_and_brings_them_back(fields):
    found = inventory(node("n1"), node("n2"), pod("a", 2), pod("b", 3, on="n2"))
    before = found.totals()
    found.put_node(node("n2", **fields))
    found.put_pod(pod("c", 4, on="n2"))
    assert (found.totals().allocatable, allocated(found)) == (cpu(10), 2)
    assert (found.totals().nodes, found.totals().pods) == (1, 1)
    found.delete_pod("c")
    found.put_node(node("n2"))
    assert found.totals() == before


def test_pod_may_be_seen_before_its_node():
    found = inventory(pod("a", 2))
    assert found.totals().allocated == found.totals().pending == NOTHING
    found.put_node(node())
    assert allocated(found) == 2


def test_node_that_is_gone_leaves_no_use_behind_and_one_of_its_name_finds_its_pods():
    found = inventory(node(), pod("a", 2))
    found.delete_node("n1")
    assert (allocated(found), free(found)) == (0, 0)
    found.put_node(node())
    assert allocated(found) == 2


def test_node_that_changes_counts_once():
    found = inventory(node(), pod("a", 2))
    found.put_node(node("n1", cpu(20)))
    assert (allocated(found), free(found), found.totals().capacity.cpu) == (2, 18, 21)


def test_unscheduled_pods_are_pending_and_no_use():
    found = inventory(node(), pod("a", 2, on=""), pod("b", 3, on="", of="rome/v"))
    assert found.totals().pending == cpu(5)
    assert (allocated(found), found.totals().pods) == (0, 0)
    found.put_pod(pod("a", 2))
    assert (found.totals().pending, allocated(found)) == (cpu(3), 2)


def test_finished_pods_count_nowhere():
    found = inventory(node(), pod("a", 2), pod("b", 3, on=""), pod("c", 4, is_finished=True))
    assert allocated(found) == 2
    found.put_pod(pod("a", 2, is_finished=True))
    found.put_pod(pod("b", 3, on="", is_finished=True))
    assert (allocated(found), found.totals().pending, found.totals().pods) == (0, NOTHING, 0)


def test_pod_that_changes_counts_as_it_is_now():
    found = inventory(node("n1"), node("n2", is_ready=False), pod("a", 2))
    found.put_pod(pod("a", 5))
    assert allocated(found) == 5
    found.put_pod(pod("a", 5, on="n2"))
    assert allocated(found) == 0
    found.put_pod(pod("a", 5, of="rome/v"))
    assert allocated(found) == 5


def test_what_is_gone_twice_was_gone():
    found = inventory(node(), pod("a", 2))
    for _ in range(2):
        found.delete_pod("a")
        found.delete_pod("never there")
        found.delete_node("never there")
        found.delete_hold("never there")
    assert (allocated(found), free(found)) == (0, 10)


def test_reset_forgets_nodes_and_pods_and_keeps_holds():
    found = inventory(node("n1"), pod("a", 2), pod("b", 2, on=""), res1=("rome", 4))
    found.reset([node("n2", cpu(20))], [pod("c", 3, on="n2"), pod("d", 9, is_finished=True)])
    assert (
        found.totals()
        == inventory(node("n2", cpu(20)), pod("c", 3, on="n2"), res1=("rome", 4)).totals()
    )
    assert found.totals().pending == NOTHING
    assert free(found) == 13


def test_every_resource_is_summed_by_itself():
    most = Resources(8, 100, 4, 50, {FPGA: 2})
    found = inventory(node("n1", most), pod("a", Resources(1, 30, 1, 5, {FPGA: 1, "other": 3})))
    assert found.free() == Resources(7, 70, 3, 45, {FPGA: 1, "other": -3})
    found.delete_pod("a")
    assert found.free() == most


# -- the largest fit on one node


def test_largest_is_the_most_left_on_one_node_of_each_resource():
    found = inventory(
        node("n1", cpu(10, memory=5, extended={FPGA: 1})),
        node("n2", cpu(4, memory=50)),
        pod("a", 7),
        pod("b", cpu(0, memory=20), on="n2", of="rome/v"),
    )
    assert found.totals().largest == cpu(4, memory=30, extended={FPGA: 1})


def test_largest_is_never_negative_and_counts_no_holds():
    found = inventory(node("n1", cpu(3)), pod("a", cpu(5, gpu=1)), res1=("rome", 4))
    assert found.totals().largest == NOTHING
    found.delete_pod("a")
    assert found.totals().largest == cpu(3)
    assert free(found) == -1


# -- holds and guests


def guests(*things, **holds):
    return inventory(node("n1", cpu(100)), *things, **holds)


HOLDS = [
    # things and holds: allocated, free of 100
    ("hold_alone", guests(res1=("rome", 4)), 0, 96),
    ("own_use_beside_a_hold", guests(pod("a", 10), res1=("rome", 4)), 10, 86),
    ("guests_within_their_hold", guests(pod("a", 3, of="rome/res1"), res1=("rome", 4)), 0, 96),
    ("guests_that_fill_it", guests(pod("a", 4, of="rome/res1"), res1=("rome", 4)), 0, 96),
    ("guests_beyond_it", guests(pod("a", 7, of="rome/res1"), res1=("rome", 4)), 3, 93),
    (
        "guests_together_beyond_it",
        guests(pod("a", 3, of="rome/res1"), pod("b", 3, of="rome/res1"), res1=("rome", 4)),
        2,
        94,
    ),
    ("guests_without_a_hold", guests(pod("a", 7, of="rome/v")), 7, 93),
    ("guests_of_another_cluster", guests(pod("a", 7, of="oslo/v"), res1=("rome", 4)), 7, 89),
    (
        "the_name_of_a_hold_is_not_enough",
        guests(pod("a", 3, of="oslo/res1"), res1=("rome", 4)),
        3,
        93,
    ),
    (
        "one_hold_does_not_pay_for_another",
        guests(pod("a", 7, of="rome/res1"), res1=("rome", 4), res2=("rome", 9)),
        3,
        84,
    ),
    ("guests_by_another_name", guests(pod("a", 3, of="rome/v"), res1=("rome", 4)), 0, 96),
    ("guests_by_no_name", guests(pod("a", 3, of="rome/"), res1=("rome", 4)), 0, 96),
    (
        "guests_by_other_names_against_other_holds",
        guests(
            pod("a", 6, of="rome/v"),
            pod("b", 8, of="rome/w"),
            pod("c", 1, of="rome/res3"),
            res1=("rome", 4),
            res2=("rome", 5),
            res3=("rome", 20),
        ),
        5,
        66,
    ),
    (
        "guests_by_another_name_while_all_holds_are_known",
        guests(pod("a", 3, of="rome/v"), pod("b", 1, of="rome/res1"), res1=("rome", 4)),
        3,
        93,
    ),
    (
        "a_guest_that_asks_for_nothing_claims_its_hold",
        guests(pod("a", 3, of="rome/v"), pod("b", 0, of="rome/res1"), res1=("rome", 4)),
        3,
        93,
    ),
    (
        "unscheduled_and_finished_guests_use_nothing",
        guests(
            pod("a", 7, on="", of="rome/res1"),
            pod("b", 7, of="rome/res1", is_finished=True),
            res1=("rome", 4),
        ),
        0,
        96,
    ),
    (
        "guests_on_nodes_that_do_not_count",
        guests(node("n2", labels=VIRTUAL), pod("a", 7, on="n2", of="rome/res1"), res1=("rome", 4)),
        0,
        96,
    ),
]


@pytest.mark.parametrize(
    "found, used, left", [case[1:] for case in HOLDS], ids=[case[0] for case in HOLDS]
)
def test_holds_and_guests_count_once(found, used, left):
    assert (allocated(found), free(found)) == (used, left)


def test_guest_that_asks_for_nothing_keeps_its_group_until_it_goes():
    found = guests(
        pod("a", 0, of="rome/res1"),
        pod("b", 3, of="rome/res1"),
        pod("c", 3, of="rome/v"),
        res1=("rome", 4),
    )
    found.delete_pod("b")
    assert (allocated(found), free(found)) == (3, 93)
    found.delete_pod("a")
    assert (allocated(found), free(found)) == (0, 96)


def test_larger_of_hold_and_use_is_taken_of_each_resource():
    found = inventory(
        node("n1", cpu(10, memory=100, extended={FPGA: 3})),
        pod("a", cpu(1, memory=50, extended={FPGA: 2}), of="rome/res1"),
        res1=("rome", cpu(4, memory=10, extended={FPGA: 1})),
    )
    assert found.totals().allocated == cpu(0, memory=40, extended={FPGA: 1})
    assert found.free() == cpu(6, memory=50, extended={FPGA: 1})


def test_what_the_broker_computes_is_what_is_free():
    for case in HOLDS:
        found, totals = case[1], case[1].totals()
        reserved = sum((hold.resources for hold in found.holds.values()), NOTHING)
        assert totals.free == totals.allocatable - totals.allocated - reserved


def test_more_promised_than_there_is_shows():
    assert free(inventory(node("n1", cpu(10)), pod("a", 8), res1=("rome", 4))) == -2


@pytest.mark.parametrize(
    "found, left",
    [
        (guests(pod("a", 9), res1=("rome", 4)), 91),
        (guests(res1=("rome", 4), res2=("rome", 5)), 95),
        (guests(res1=("rome", 4), res2=("oslo", 5)), 95),
        (guests(pod("a", 3, of="rome/res1"), res1=("rome", 4)), 100),
        (guests(pod("a", 7, of="rome/res1"), res1=("rome", 4), res2=("rome", 5)), 95),
        (guests(pod("a", 3, of="rome/v"), res1=("rome", 4), res2=("rome", 5)), 95),
        (guests(pod("a", 20, of="rome/v"), res1=("rome", 4), res2=("rome", 5)), 84),
        (guests(res2=("rome", 5)), 95),
    ],
    ids=[
        "own_use_stays",
        "holds_of_the_same_cluster_stay",
        "holds_of_others_stay",
        "its_guests_do_not_speak_against_it",
        "nor_those_beyond_it",
        "nor_those_that_may_be_its_own",
        "up_to_its_size",
        "one_that_is_not_held",
    ],
)
def test_free_without_a_reservation_counts_its_share_as_free(found, left):
    assert free(found, without="res1") == left


def test_hold_that_changes_or_goes_frees_the_rest():
    found = guests(pod("a", 3, of="rome/res1"), res1=("rome", 8))
    found.put_hold("res1", Hold("rome", cpu(5)))
    assert (allocated(found), free(found)) == (0, 95)
    assert dict(found.holds) == {"res1": Hold("rome", cpu(5))}
    found.delete_hold("res1")
    assert (allocated(found), free(found), dict(found.holds)) == (3, 97, {})


def test_totals_are_a_record_that_stays():
    found = inventory(node(), pod("a", 2))
    totals = found.totals()
    text = msgspec.json.encode(totals)
    found.put_pod(pod("b", 2))
    assert msgspec.json.encode(totals) == text
