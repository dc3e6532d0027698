"""Each limit of a provider, alone and together: who is refused, why, and what would help."""

import pytest

import make
from kubelend.core import columns, decision, explanations, filters
from kubelend.core.decision import Placement
from kubelend.core.models import ClusterId

OFFER = "cpu=10,memory=10Gi,gpu=2"


def desk_with(**fields):
    """One provider whose administrator says this of it."""
    desk = make.desk(a=OFFER)
    desk.limit("a", **fields)
    return desk


def rejections(desk, wanted="cpu=1,memory=1Gi", cluster="a", **fields):
    """All that speaks against a cluster; that the decision agrees is checked."""
    question, fleet = desk.question(wanted, **fields), desk.ledger.fleet
    row = fleet.find_row(ClusterId(cluster))
    found = [
        str(rejection) for rejection, mask in filters.filter_masks(question, fleet) if not mask[row]
    ]
    assert bool(filters.feasible_clusters(question, fleet)[row]) == (not found)
    return found


def suggestion(desk, wanted="cpu=1,memory=1Gi", **fields):
    found = explanations.explain_placement(
        desk.question(wanted, **fields), desk.ledger.fleet, 5
    ).suggestion
    return None if found is None else found.text


# -- to whom


@pytest.mark.parametrize(
    "policy, refused",
    [
        ({"allow": ["r"]}, []),
        ({"allow": ["x", "[q-s]"]}, []),
        ({"allow": ["team-*"]}, ["RequesterNotAllowed"]),
        ({"deny": ["r*"]}, ["RequesterDenied"]),
        ({"deny": ["team-*"]}, []),
        ({"allow": ["r"], "deny": ["r"]}, ["RequesterDenied"]),
        ({"allow": ["x"], "deny": ["r"]}, ["RequesterNotAllowed", "RequesterDenied"]),
    ],
    ids=str,
)
def test_lists_say_to_whom(policy, refused):
    desk = desk_with(**policy)
    assert rejections(desk) == refused
    assert suggestion(desk) is None, "no other request would help"
    own = make.Desk()
    own.advertise("a", OFFER, policy=make.policy(**policy))
    assert rejections(own) == refused


def test_what_is_advertised_and_what_is_set_hold_both():
    desk = make.Desk()
    desk.advertise("a", OFFER, policy=make.policy(allow=["r", "s"]))
    desk.limit("a", allow=["s", "t"])
    assert [rejections(desk, requester=name) for name in "rst"] == [
        ["RequesterNotAllowed"],
        [],
        ["RequesterNotAllowed"],
    ]


def test_list_that_changes_is_seen_at_once():
    desk = desk_with(allow=["r"])
    assert rejections(desk) == []
    desk.limit("a", allow=["s"])
    assert rejections(desk) == ["RequesterNotAllowed"]
    desk.advertise("0")
    assert rejections(desk) == ["RequesterNotAllowed"]
    assert rejections(desk, cluster="0") == []
    desk.remove("0")
    assert rejections(desk) == ["RequesterNotAllowed"]
    desk.limit("a", make.policy())
    assert rejections(desk) == []
    assert desk.ledger.fleet.policy_columns is None, (
        "a fleet without policies pays nothing for them"
    )


def test_requesters_who_ask_do_not_fill_the_memory():
    desk = desk_with(deny=["r7"])
    names = [f"r{number}" for number in range(3 * columns.MAX_REQUESTER_MASKS)]
    assert [name for name in names if rejections(desk, requester=name)] == ["r7"]
    assert desk.ledger.fleet.policy_columns is not None
    assert len(desk.ledger.fleet.policy_columns._requester_masks) <= columns.MAX_REQUESTER_MASKS  # noqa: SLF001 - its size


# -- how much


@pytest.mark.parametrize(
    "policy, lent, wanted, refused, helps",
    [
        ({"keep_back": "cpu=4"}, "", "cpu=6", [], None),
        (
            {"keep_back": "cpu=4"},
            "",
            "cpu=7",
            ["KeptBack"],
            "a fits if you request 1 cpu less",
        ),
        (
            {"keep_back": "cpu=4"},
            "cpu=2",
            "cpu=6",
            ["KeptBack"],
            "a fits if you request 2 cpu less, or wait until reservations there end",
        ),
        ({"keep_back": "cpu=4"}, "", "cpu=11", ["InsufficientCPU"], "a fits if you request 5 cpu less"),
        ({"keep_back": "cpu=40"}, "", "cpu=1", ["KeptBack"], None),
        ({"max_lent": "cpu=3"}, "", "cpu=3", [], None),
        (
            {"max_lent": "cpu=3"},
            "cpu=1",
            "cpu=3",
            ["LendingCapReached"],
            "a fits if you request 1 cpu less, or wait until reservations there end",
        ),
        ({"max_lent": "gpu=0"}, "", "cpu=1,gpu=1", ["LendingCapReached"], "a fits if you request 1 gpu less"),
        ({"max_lent": "gpu=0"}, "", "cpu=10", [], None),
        ({"max_per_requester": "cpu=3"}, "", "cpu=3", [], None),
        (
            {"max_per_requester": "cpu=3"},
            "cpu=2",
            "cpu=3",
            ["RequesterCapReached"],
            "a fits if you request 2 cpu less, or wait until reservations there end",
        ),
        (
            {"max_per_requester": "cpu=3"},
            "",
            "cpu=4",
            ["RequesterCapReached"],
            "a fits if you request 1 cpu less",
        ),
        ({"max_per_requester": "cpu=0"}, "", "cpu=1", ["RequesterCapReached"], None),
        (
            {"keep_back": "cpu=4", "max_lent": "cpu=5", "max_per_requester": "cpu=6"},
            "",
            "cpu=7",
            ["KeptBack", "LendingCapReached", "RequesterCapReached"],
            "a fits if you request 2 cpu less",
        ),
    ],
    ids=str,
)  # fmt: skip
def test_amounts_are_bounded_and_an_exact_fit_fits(policy, lent, wanted, refused, helps):
    desk = desk_with(**policy)
    if lent:
        desk.reserve(lent)
    assert rejections(desk, wanted) == refused
    assert suggestion(desk, wanted) == helps


def test_share_of_one_requester_is_not_anothers():
    desk = desk_with(max_per_requester="cpu=3")
    held = desk.reserve("cpu=3")
    assert rejections(desk, "cpu=1") == ["RequesterCapReached"]
    assert rejections(desk, "cpu=3", requester="s") == []
    desk.release(held)
    assert rejections(desk, "cpu=3") == []


def test_share_counts_what_was_lent_before_it_was_set():
    desk = make.desk(a=OFFER)
    desk.reserve("cpu=3")
    desk.limit("a", max_per_requester="cpu=4")
    assert rejections(desk, "cpu=2") == ["RequesterCapReached"]
    assert rejections(desk, "cpu=1") == []


def test_available_stays_what_is_there_and_what_is_held_stays_held():
    desk = make.desk(a=OFFER)
    held = desk.reserve("cpu=8")
    desk.limit("a", keep_back="cpu=9", max_lent="cpu=1", deny=["r"])
    assert desk[held].is_live
    assert desk.available("a").cpu == 2000


def test_score_is_that_of_what_is_there():
    """What is kept back is headroom too: the contract's selection knows no policies."""
    desk = make.desk(a="cpu=10,memory=10Gi", b="cpu=10,memory=10Gi")
    desk.limit("a", keep_back="cpu=5,memory=5Gi")
    answer = decision.decide_placement(desk.question("cpu=1,memory=1Gi"), desk.ledger.fleet)
    assert answer == Placement(ClusterId("a"), 0.9)


def test_extended_resources_are_bounded_too_and_come_and_go():
    desk = make.desk(a="cpu=4,example.com/fpga=4")
    desk.limit("a", keep_back="example.com/fpga=1", max_lent="example.com/fpga=2")
    assert rejections(desk, "cpu=1,example.com/fpga=2") == []
    assert rejections(desk, "cpu=1,example.com/fpga=3") == ["LendingCapReached"]
    assert rejections(desk, "cpu=1,example.com/fpga=4") == ["KeptBack", "LendingCapReached"]
    desk.advertise("a", "cpu=4")
    assert rejections(desk, "cpu=1,example.com/fpga=1") == ["InsufficientExtendedResource"]
    desk.advertise("b", "cpu=4,example.com/fpga=4")
    assert rejections(desk, "cpu=1,example.com/fpga=4", cluster="b") == []
    assert rejections(desk, "cpu=1,example.com/fpga=1") == ["InsufficientExtendedResource"]


def test_every_limit_keeps_its_own_row_when_clusters_come_and_go():
    desk = make.Desk()
    for number in range(100):
        name = f"c{number:03}"
        desk.advertise(name, OFFER, policy=make.policy(max_lent=f"cpu={number % 7}"))
    for number in range(0, 100, 3):
        desk.remove(f"c{number:03}")
    caps = [number % 7 for number in range(100) if number % 3]
    free = desk.ledger.fleet.free("cpu")
    assert free is not None
    assert free.tolist() == [1000 * cap for cap in caps]
    left = desk.ledger.fleet.available("cpu")
    assert left is not None
    assert set(left.tolist()) == {10_000}


# -- when


def test_hours_bound_when_new_reservations_start_and_not_those_that_run():
    desk = desk_with(hours=["12:00-12:05"])
    held = desk.reserve("cpu=1,memory=1Gi")
    desk.pass_time(5 * make.MINUTE)
    assert rejections(desk) == ["OutsideOpeningHours"]
    assert suggestion(desk) == "a fits if you wait until it opens at 2026-01-02T12:00Z"
    assert desk[held].is_live
    desk.renew(held, make.HOUR)


def test_nothing_is_moved_to_a_cluster_that_is_closed():
    desk = desk_with(hours=["13:00-14:00"])
    desk.advertise("b", "cpu=1,memory=1Gi")
    held = desk.reserve("cpu=1,memory=1Gi")
    assert desk.target(held) == "b"
    desk.drain("b")
    assert desk[held].message.endswith("then 0/2 clusters fit: 1 LeftBefore, 1 OutsideOpeningHours")


def test_hours_that_never_meet_have_no_remedy_but_another_cluster_may():
    desk = desk_with(hours=["13:00-14:00"])
    desk.advertise("a", OFFER, policy=make.policy(hours=["15:00-16:00"]))
    assert suggestion(desk) is None
    desk.advertise("b", "cpu=1,memory=1Gi")
    assert suggestion(desk, "cpu=2,memory=1Gi") == "b fits if you request 1 cpu less"


def test_advertisement_neither_opens_nor_closes_a_cluster():
    """It is written into a mask that is kept from one opening to the next."""
    desk = make.desk(a=OFFER, b=OFFER)
    desk.limit("a", hours=["13:00-14:00"])
    desk.limit("b", hours=["11:00-13:00"])
    for _ in range(3):
        assert (rejections(desk), rejections(desk, cluster="b")) == (["OutsideOpeningHours"], [])
        desk.pass_time(make.MINUTE)
        desk.advertise("a", OFFER)
        desk.advertise("b", OFFER)
    desk.pass_time(57 * make.MINUTE)
    desk.advertise("a", OFFER)
    desk.advertise("b", OFFER)
    assert (rejections(desk), rejections(desk, cluster="b")) == ([], ["OutsideOpeningHours"])
