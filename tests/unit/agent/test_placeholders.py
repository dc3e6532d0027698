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


FOUR = amounts(4, 16)
OWN, PENDING = placeholder("n1", FOUR), placeholder("n1", FOUR, bound=False)
STUCK = placeholder("n1", FOUR, bound=False, is_unschedulable=True)
CORDONED = placeholder("cordoned", FOUR)
PLACES = {
    "missing": (view(OWN, hold=amounts(6, 24), n1=0, n2=8), [("n2", amounts(2, 8))]),
    "all held": (view(OWN, hold=FOUR, n1=4), []),
    "pending": (view(PENDING, hold=FOUR, n1=8), []),
    "cannot be scheduled": (view(STUCK, hold=FOUR, n1=4, n2=4), [("n2", FOUR), STUCK]),
    "fits in part elsewhere": (view(STUCK, hold=FOUR, n1=4, n2=2), [("n2", amounts(2, 8))]),
    "just lost": (
        replace(view(hold=FOUR, n1=8, n2=8), avoided={(R, "n1")}),
        [("n2", FOUR)],
    ),
    "cordoned": (view(CORDONED, hold=FOUR, n1=8), [("n1", FOUR), CORDONED]),
    "cordoned, no other node": (view(CORDONED, hold=FOUR, n1=0), []),
    "hold ended": (view(OWN, n1=0), [OWN]),
}


@pytest.mark.parametrize("seen, expected", PLACES.values(), ids=PLACES)
def test_missing_placeholders_are_created_and_useless_ones_deleted(seen, expected):
    assert placeholders.plan(seen) == [
        DeletePlaceholder(each) if isinstance(each, Pod) else CreatePlaceholder(R, *each)
        for each in expected
    ]


def test_reservations_do_not_get_the_same_capacity():
    holds = {name: Hold("rome", FOUR) for name in ("a", "b")}
    seen = replace(view(n1=6, n2=2), holds=holds)
    created = [one for one in placeholders.plan(seen) if isinstance(one, CreatePlaceholder)]
    assert sum((one.amounts for one in created), NOTHING) == amounts(8, 32)
    assert sum((one.amounts for one in created if one.node == "n1"), NOTHING) == amounts(6, 24)


# -- hand over

SMALL, LARGE = placeholder("n1", amounts(2, 8)), placeholder("n2", FOUR)
PARTS = placeholder("n1", amounts(2, 8)), placeholder("n1", amounts(3, 12))
POD, SECOND, UNGATED = borrowed(FOUR, gated=True), borrowed(FOUR, gated=True), borrowed(FOUR)
THREE, TALL = borrowed(amounts(3, 8), gated=True), borrowed(amounts(4, 4), gated=True)
LARGER, NOWHERE = borrowed(amounts(5, 16), gated=True), borrowed(amounts(5, 4), gated=True)
OF_OTHERS = borrowed(FOUR, gated=True, on="rsv-rome-2"), borrowed(FOUR, gated=True, origin="paris")
NOMINATED = borrowed(FOUR, gated=True, nominated_node="n1")
UNUSED = borrowed(FOUR, is_unschedulable=True)
WAITING = view(PENDING, POD, hold=FOUR, n1=4)
HAND_OVERS = {
    "rest is held": (
        view(SMALL, LARGE, THREE, hold=amounts(6, 24), n1=0, n2=0),
        [HandOver(R, "n2", THREE, (LARGE,), amounts(1, 8))],
    ),
    "several placeholders of a node": (
        view(*PARTS, TALL, hold=amounts(5, 20), n1=0),
        [HandOver(R, "n1", TALL, PARTS[::-1], amounts(1, 16))],
    ),
    "free capacity completes it": (
        view(OWN, LARGER, hold=FOUR, n1=1),
        [HandOver(R, "n1", LARGER, (OWN,), NOTHING)],
    ),
    "two pods, one placeholder": (
        view(OWN, POD, SECOND, hold=FOUR, n1=0),
        [HandOver(R, "n1", POD, (OWN,), NOTHING), ReleasePod(SECOND, R)],
    ),
    "fits on no node": (
        view(OWN, LARGE, NOWHERE, hold=amounts(8, 32), n1=0, n2=0),
        [ReleasePod(NOWHERE, R)],
    ),
    "capacity is under way": (WAITING, []),
    "waits too long": (replace(WAITING, overdue={POD.id}), [ReleasePod(POD, R)]),
    "of another reservation": (
        view(OWN, OF_OTHERS[0], hold=FOUR, n1=0),
        [ReleasePod(OF_OTHERS[0], "")],
    ),
    "of another requester": (
        view(OWN, OF_OTHERS[1], hold=FOUR, n1=0),
        [ReleasePod(OF_OTHERS[1], "")],
    ),
    "interrupted before the deletion": (
        view(OWN, NOMINATED, hold=FOUR, n1=0),
        [HandOver(R, "n1", NOMINATED, (OWN,), NOTHING)],
    ),
    "interrupted after the deletion": (
        view(NOMINATED, hold=FOUR, n1=4),
        [HandOver(R, "n1", NOMINATED, (), NOTHING)],
    ),
    "nominated is not held twice": (
        view(borrowed(FOUR, nominated_node="n1"), hold=FOUR, n1=4),
        [],
    ),
    "unused capacity is held again": (
        replace(view(UNUSED, hold=FOUR, n1=4), handed_over={UNUSED.id}),
        [CreatePlaceholder(R, "n1", FOUR)],
    ),
    "and not handed over again": (
        replace(view(OWN, UNUSED, hold=FOUR, n1=0), handed_over={UNUSED.id}),
        [],
    ),
    "without gates": (
        view(OWN, UNGATED, hold=FOUR, n1=0),
        [HandOver(R, "n1", UNGATED, (OWN,), NOTHING)],
    ),
}


@pytest.mark.parametrize("seen, expected", HAND_OVERS.values(), ids=HAND_OVERS)
def test_pod_of_the_requester_gets_the_capacity_that_is_held_for_it(seen, expected):
    assert placeholders.plan(seen) == expected


# -- take back, shrink

LEAVING, LEAVING_ELSEWHERE = (
    borrowed(FOUR, "n1", is_deleting=True),
    borrowed(amounts(1, 4), "n2", is_deleting=True),
)
GATED = placeholder("n1", FOUR, gated=True)
THREE_PARTS = tuple(placeholder("n1", amounts(1, 4)) for _ in range(3))
TWO_HOLDS = {R: Hold("rome", FOUR), "a": Hold("rome", amounts(2, 8))}
TAKE_BACKS = {
    "before the pod is gone": (
        view(LEAVING, hold=FOUR, n1=0),
        [CreatePlaceholder(R, "n1", FOUR, is_gated=True)],
    ),
    "waits for the pod": (view(LEAVING, GATED, hold=FOUR, n1=0), []),
    "when the pod is gone": (view(GATED, hold=FOUR, n1=4), [UngatePlaceholder(GATED)]),
    "capacity is lost": (view(GATED, hold=FOUR, n1=0), [DeletePlaceholder(GATED)]),
    "others do not get it": (
        replace(view(LEAVING, GATED, n1=2, n2=2), holds=TWO_HOLDS),
        [CreatePlaceholder("a", "n2", amounts(2, 8))],
    ),
    "pod runs elsewhere": (
        view(OWN, borrowed(amounts(1, 4), "n2"), hold=FOUR, n1=0, n2=0),
        [HandOver(R, "n1", None, (OWN,), amounts(3, 12))],
    ),
    "pod uses all elsewhere": (
        view(OWN, borrowed(FOUR, "n2"), hold=FOUR, n1=0),
        [DeletePlaceholder(OWN)],
    ),
    "many are merged": (
        view(*THREE_PARTS, hold=amounts(3, 12), n1=0),
        [HandOver(R, "n1", None, THREE_PARTS, amounts(3, 12))],
    ),
    "not while a pod leaves": (
        view(*THREE_PARTS, LEAVING_ELSEWHERE, hold=amounts(3, 12), n1=0),
        [],
    ),
}


@pytest.mark.parametrize("seen, expected", TAKE_BACKS.values(), ids=TAKE_BACKS)
def test_capacity_is_taken_back_and_the_hold_shrinks(seen, expected):
    assert placeholders.plan(seen) == expected


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
