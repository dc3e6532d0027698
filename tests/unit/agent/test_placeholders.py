"""The plan of placeholders: where they are, how capacity is handed over and taken back, and what is held."""

import itertools

import pytest
from msgspec.structs import replace

from kubelend.agent import placeholders
from kubelend.agent.placeholders import (
    CreatePlaceholder,
    DeletePlaceholder,
    HandOver,
    HoldView,
    ReleasePod,
    UngatePlaceholder,
)
from kubelend.core.inventory import Hold
from kubelend.core.pod_requests import OffloadedFrom, Pod, PodScheduling
from kubelend.core.resources import NOTHING, Resources, parse_requested

R = "rsv-rome-1"
GI = 2**30
numbers = itertools.count()


def amounts(cpu=0, memory=0, **devices):
    """CPU in cores, memory in Gi."""
    extended = {name: n for name, n in devices.items() if name != "gpu"}
    return Resources(cpu * 1000, memory * GI, devices.get("gpu", 0), 0, extended)


def view(*pods, hold=None, **capacity):
    """`n1=4` is a node with 4 CPU and 16Gi free."""
    free = {name: amounts(n, 4 * n) if isinstance(n, int) else n for name, n in capacity.items()}
    holds = {} if hold is None else {R: Hold("rome", hold)}
    return HoldView(holds=holds, pods=pods, capacity=free)


def placeholder(node, size, *, bound=True, gated=False, reservation=R, **state):
    if gated:
        bound, state["nominated_node"] = False, node
    scheduling = PodScheduling(
        "kubelend", f"p{next(numbers)}", is_gated=gated, required_node=node, **state
    )
    return Pod(
        scheduling.name,
        node if bound else "",
        size,
        placeholder_for=reservation,
        scheduling=scheduling,
    )


def borrowed(size, node="", *, gated=False, origin="rome", on=R, **state):
    scheduling = PodScheduling("team", f"w{next(numbers)}", is_gated=gated, **state)
    return Pod(
        scheduling.name,
        node,
        size,
        offloaded_from=OffloadedFrom(origin, on),
        scheduling=scheduling,
    )


# -- size and place


@pytest.mark.parametrize(
    "wanted, capacity, pieces",
    [
        (amounts(4, 16), {"n1": 8, "n2": 8}, {"n1": (4, 16)}),
        (amounts(4, 16), {"n1": 8, "n2": 5}, {"n2": (4, 16)}),
        (
            amounts(16, 32),
            {"n1": 6, "n2": 6, "n3": 6},
            {"n1": (6, 12), "n2": (6, 12), "n3": (4, 8)},
        ),
        (amounts(9, 36), {"n1": 2, "n2": 8, "n3": 2}, {"n1": (1, 4), "n2": (8, 32)}),
        (amounts(9, 36), {"n1": 4, "n2": 4}, {"n1": (4, 16), "n2": (4, 16)}),
        (amounts(2, 2), {}, {}),
    ],
    ids=["first of equals", "least capacity", "in proportion", "few nodes", "part", "nowhere"],
)
def test_an_amount_is_placed_on_as_few_nodes_as_possible(wanted, capacity, pieces):
    free = {name: amounts(n, 4 * n) for name, n in capacity.items()}
    found = dict(placeholders.place(wanted, free))
    assert found == {name: amounts(*size) for name, size in pieces.items()}


def test_devices_are_placed_where_they_are_and_the_rest_elsewhere():
    capacity = {"gpu": amounts(4, 16, gpu=2), "n1": amounts(16, 64)}
    found = dict(placeholders.place(amounts(8, 32, gpu=2), capacity))
    assert found == {"gpu": amounts(4, 16, gpu=2), "n1": amounts(4, 16)}


def test_what_no_node_has_in_proportion_is_still_placed():
    capacity = {"n1": amounts(4, 0), "n2": amounts(0, 16)}
    found = dict(placeholders.place(amounts(4, 16), capacity))
    assert found == {"n1": amounts(4, 0), "n2": amounts(0, 16)}


def test_pieces_have_whole_mebibytes_and_add_up():
    wanted = parse_requested({"cpu": "20", "memory": "6Gi"})
    found = dict(placeholders.place(wanted, {name: amounts(8, 32) for name in "abc"}))
    assert sum(found.values(), NOTHING) == wanted
    assert all(piece.memory % 2**20 == 0 for piece in found.values())


def test_placeholders_are_created_for_what_is_missing():
    own = placeholder("n1", amounts(4, 16))
    found = placeholders.plan(view(own, hold=amounts(6, 24), n1=0, n2=8))
    assert found == [CreatePlaceholder(R, "n2", amounts(2, 8))]


def test_nothing_is_done_when_all_is_held():
    own = placeholder("n1", amounts(4, 16))
    assert placeholders.plan(view(own, hold=amounts(4, 16), n1=4)) == []


def test_pending_placeholders_are_not_created_again():
    own = placeholder("n1", amounts(4, 16), bound=False)
    assert placeholders.plan(view(own, hold=amounts(4, 16), n1=8)) == []


def test_one_that_cannot_be_scheduled_is_replaced_on_another_node():
    own = placeholder("n1", amounts(4, 16), bound=False, is_unschedulable=True)
    found = placeholders.plan(view(own, hold=amounts(4, 16), n1=4, n2=4))
    assert found == [CreatePlaceholder(R, "n2", amounts(4, 16)), DeletePlaceholder(own)]
    assert placeholders.plan(view(own, hold=amounts(4, 16), n1=4, n2=2)) == [
        CreatePlaceholder(R, "n2", amounts(2, 8))
    ]


def test_a_node_is_avoided_where_one_was_just_lost():
    seen = view(hold=amounts(4, 16), n1=8, n2=8)
    assert placeholders.plan(replace(seen, avoided={(R, "n1")})) == [
        CreatePlaceholder(R, "n2", amounts(4, 16))
    ]


def test_reservations_do_not_get_the_same_capacity():
    holds = {name: Hold("rome", amounts(4, 16)) for name in ("a", "b")}
    seen = replace(view(n1=6, n2=2), holds=holds)
    created = [one for one in placeholders.plan(seen) if isinstance(one, CreatePlaceholder)]
    assert sum((one.amounts for one in created), NOTHING) == amounts(8, 32)
    assert sum((one.amounts for one in created if one.node == "n1"), NOTHING) == amounts(6, 24)


def test_placeholders_on_nodes_that_take_no_pods_are_replaced():
    own = placeholder("cordoned", amounts(4, 16))
    found = placeholders.plan(view(own, hold=amounts(4, 16), n1=8))
    assert found == [CreatePlaceholder(R, "n1", amounts(4, 16)), DeletePlaceholder(own)]
    assert placeholders.plan(view(own, hold=amounts(4, 16), n1=0)) == []


def test_placeholders_of_ended_holds_are_deleted():
    own = placeholder("n1", amounts(4, 16))
    assert placeholders.plan(view(own, n1=0)) == [DeletePlaceholder(own)]


# -- hand over


def test_a_gated_pod_gets_the_capacity_of_a_placeholder_and_the_rest_is_held():
    small, large = placeholder("n1", amounts(2, 8)), placeholder("n2", amounts(4, 16))
    pod = borrowed(amounts(3, 8), gated=True)
    [found] = placeholders.plan(view(small, large, pod, hold=amounts(6, 24), n1=0, n2=0))
    assert found == HandOver(R, "n2", pod, (large,), amounts(1, 8))


def test_several_placeholders_of_a_node_give_way_together():
    parts = placeholder("n1", amounts(2, 8)), placeholder("n1", amounts(3, 12))
    pod = borrowed(amounts(4, 4), gated=True)
    [found] = placeholders.plan(view(*parts, pod, hold=amounts(5, 20), n1=0))
    assert isinstance(found, HandOver)
    assert set(found.placeholders) == set(parts)
    assert found.remainder == amounts(1, 16)


def test_free_capacity_of_the_node_may_complete_a_placeholder():
    own, pod = placeholder("n1", amounts(4, 16)), borrowed(amounts(5, 16), gated=True)
    [found] = placeholders.plan(view(own, pod, hold=amounts(4, 16), n1=1))
    assert found == HandOver(R, "n1", pod, (own,), NOTHING)


def test_two_pods_do_not_get_the_same_placeholder():
    own = placeholder("n1", amounts(4, 16))
    pods = [borrowed(amounts(4, 16), gated=True) for _ in range(2)]
    found = placeholders.plan(view(own, *pods, hold=amounts(4, 16), n1=0))
    assert found == [HandOver(R, "n1", pods[0], (own,), NOTHING), ReleasePod(pods[1], R)]


def test_a_pod_that_fits_on_no_node_is_left_to_the_scheduler():
    parts = placeholder("n1", amounts(4, 16)), placeholder("n2", amounts(4, 16))
    pod = borrowed(amounts(5, 4), gated=True)
    assert placeholders.plan(view(*parts, pod, hold=amounts(8, 32), n1=0, n2=0)) == [
        ReleasePod(pod, R)
    ]


def test_a_pod_waits_for_capacity_under_way_but_not_for_ever():
    own, pod = placeholder("n1", amounts(4, 16), bound=False), borrowed(amounts(4, 4), gated=True)
    seen = view(own, pod, hold=amounts(4, 16), n1=4)
    assert placeholders.plan(seen) == []
    assert placeholders.plan(replace(seen, overdue={pod.id})) == [ReleasePod(pod, R)]


@pytest.mark.parametrize("other", [{"on": "rsv-rome-2"}, {"origin": "paris"}])
def test_pods_for_which_nothing_is_held_lose_their_gate(other):
    own, pod = placeholder("n1", amounts(4, 16)), borrowed(amounts(1, 1), gated=True, **other)
    assert placeholders.plan(view(own, pod, hold=amounts(4, 16), n1=0)) == [ReleasePod(pod, "")]


def test_an_interrupted_hand_over_is_finished():
    own = placeholder("n1", amounts(4, 16))
    pod = borrowed(amounts(4, 16), gated=True, nominated_node="n1")
    before = view(own, pod, hold=amounts(4, 16), n1=0)
    assert placeholders.plan(before) == [HandOver(R, "n1", pod, (own,), NOTHING)]
    after = view(pod, hold=amounts(4, 16), n1=4)
    assert placeholders.plan(after) == [HandOver(R, "n1", pod, (), NOTHING)]


def test_capacity_of_a_nominated_pod_is_not_held_twice():
    pod = borrowed(amounts(4, 16), nominated_node="n1")
    assert placeholders.plan(view(pod, hold=amounts(4, 16), n1=4)) == []


def test_capacity_that_a_pod_did_not_use_is_held_again():
    pod = borrowed(amounts(4, 16), is_unschedulable=True)
    seen = replace(view(pod, hold=amounts(4, 16), n1=4), handed_over={pod.id})
    assert placeholders.plan(seen) == [CreatePlaceholder(R, "n1", amounts(4, 16))]
    own = placeholder("n1", amounts(4, 16))
    again = replace(view(own, pod, hold=amounts(4, 16), n1=0), handed_over={pod.id})
    assert placeholders.plan(again) == []


def test_without_gates_a_pod_is_handed_over_once_it_is_seen():
    own, pod = placeholder("n1", amounts(4, 16)), borrowed(amounts(4, 16))
    assert placeholders.plan(view(own, pod, hold=amounts(4, 16), n1=0)) == [
        HandOver(R, "n1", pod, (own,), NOTHING)
    ]


# -- take back, shrink


def test_capacity_is_taken_back_before_the_pod_is_gone():
    leaving = borrowed(amounts(4, 16), "n1", is_deleting=True)
    assert placeholders.plan(view(leaving, hold=amounts(4, 16), n1=0)) == [
        CreatePlaceholder(R, "n1", amounts(4, 16), is_gated=True)
    ]


def test_a_gated_placeholder_waits_for_the_capacity_and_then_gets_it():
    leaving = borrowed(amounts(4, 16), "n1", is_deleting=True)
    waiting = placeholder("n1", amounts(4, 16), gated=True)
    assert placeholders.plan(view(leaving, waiting, hold=amounts(4, 16), n1=0)) == []
    assert placeholders.plan(view(waiting, hold=amounts(4, 16), n1=4)) == [
        UngatePlaceholder(waiting)
    ]


def test_a_gated_placeholder_whose_capacity_is_lost_is_given_up():
    waiting = placeholder("n1", amounts(4, 16), gated=True)
    assert placeholders.plan(view(waiting, hold=amounts(4, 16), n1=0)) == [
        DeletePlaceholder(waiting)
    ]


def test_others_do_not_get_the_capacity_that_a_gated_placeholder_waits_for():
    leaving = borrowed(amounts(4, 16), "n1", is_deleting=True)
    waiting = placeholder("n1", amounts(4, 16), gated=True)
    seen = view(leaving, waiting, n1=2, n2=2)
    holds = {R: Hold("rome", amounts(4, 16)), "a": Hold("rome", amounts(2, 8))}
    assert placeholders.plan(replace(seen, holds=holds)) == [
        CreatePlaceholder("a", "n2", amounts(2, 8))
    ]


def test_pods_that_run_elsewhere_shrink_the_hold():
    own, pod = placeholder("n1", amounts(4, 16)), borrowed(amounts(1, 4), "n2")
    found = placeholders.plan(view(own, pod, hold=amounts(4, 16), n1=0, n2=0))
    assert found == [HandOver(R, "n1", None, (own,), amounts(3, 12))]
    whole = replace(pod, requests=amounts(4, 16))
    assert placeholders.plan(view(own, whole, hold=amounts(4, 16), n1=0)) == [
        DeletePlaceholder(own)
    ]


def test_many_placeholders_of_a_node_are_merged():
    parts = tuple(placeholder("n1", amounts(1, 4)) for _ in range(3))
    found = placeholders.plan(view(*parts, hold=amounts(3, 12), n1=0))
    assert found == [HandOver(R, "n1", None, parts, amounts(3, 12))]
    leaving = borrowed(amounts(1, 4), "n2", is_deleting=True)
    assert placeholders.plan(view(*parts, leaving, hold=amounts(3, 12), n1=0)) == []


def test_every_plan_settles():
    """Carried out again and again, a plan ends with everything held and nothing left to do."""
    pods: dict[str, Pod] = {}
    capacity = {name: amounts(8, 32) for name in ("n1", "n2", "n3")}
    for size in (amounts(20, 80), amounts(5, 20), amounts(11, 8)):
        holds = {R: Hold("rome", size)}
        for _ in range(10):
            for action in placeholders.plan(
                HoldView(holds, [*pods.values()], free(capacity, pods))
            ):
                carry_out(action, pods)
        assert placeholders.plan(HoldView(holds, [*pods.values()], free(capacity, pods))) == []
        assert sum((pod.requests for pod in pods.values()), NOTHING) == size
        assert all((NOTHING - left).clamped() == NOTHING for left in free(capacity, pods).values())


def free(capacity, pods):
    return {
        name: left - sum((pod.requests for pod in pods.values() if pod.node == name), NOTHING)
        for name, left in capacity.items()
    }


def carry_out(action, pods):
    match action:
        case CreatePlaceholder(_, node, size, _):
            made = placeholder(node, size)
            pods[made.id] = made
        case DeletePlaceholder(pod):
            del pods[pod.id]
        case HandOver(_, node, None, given, rest):
            for pod in given:
                del pods[pod.id]
            made = placeholder(node, rest)
            pods[made.id] = made
        case _:
            raise AssertionError(action)


# -- the condition


def state(*pods, hold, **capacity):
    return placeholders.held_state(view(*pods, hold=hold, **capacity), R)


def test_all_is_held_by_placeholders_and_pods_together():
    found = state(
        placeholder("n1", amounts(3, 12)),
        placeholder("n2", amounts(2, 8)),
        borrowed(amounts(1, 4), "n3"),
        hold=amounts(6, 24),
        n1=0,
        n2=0,
    )
    assert found[:2] == ("True", "Held")
    assert found.message == (
        "6 CPU / 24Gi Memory held; the requester's pods use 1 CPU / 4Gi Memory; "
        "capacity for further pods on 2 nodes, for one pod at most 3 CPU / 12Gi Memory"
    )


@pytest.mark.parametrize(
    "lost",
    [
        placeholder("n2", amounts(2, 8), bound=False, is_unschedulable=True),
        placeholder("n2", amounts(2, 8), is_deleting=True),
        placeholder("cordoned", amounts(2, 8)),
        borrowed(amounts(2, 8)),
    ],
    ids=["unschedulable", "evicted", "cordoned", "not handed over"],
)
def test_it_says_how_much_is_held(lost):
    found = state(placeholder("n1", amounts(4, 16)), lost, hold=amounts(6, 24), n1=0, n2=0)
    assert found[:2] == ("False", "PartiallyHeld")
    assert found.message.startswith("4 CPU / 16Gi Memory of 6 CPU / 24Gi Memory held; ")


def test_it_is_unknown_until_the_scheduler_has_decided():
    own = placeholder("n1", amounts(4, 16), bound=False)
    assert state(own, hold=amounts(4, 16), n1=4)[:2] == ("Unknown", "Holding")
    assert state(own, hold=amounts(6, 24), n1=4)[:2] == ("False", "PartiallyHeld")


def test_capacity_of_a_pod_that_is_being_deleted_is_held_once():
    leaving = borrowed(amounts(4, 16), "n1", is_deleting=True)
    waiting = placeholder("n1", amounts(4, 16), gated=True)
    assert state(leaving, waiting, hold=amounts(4, 16), n1=0).status == "True"
    assert state(leaving, waiting, hold=amounts(8, 32), n1=0).status != "True"


def test_a_hand_over_does_not_change_the_condition():
    nominated = borrowed(amounts(3, 12), nominated_node="n1")
    rest = placeholder("n1", amounts(1, 4), bound=False, nominated_node="n1")
    assert state(nominated, rest, hold=amounts(4, 16), n1=4).status == "True"
