"""What callers can make the ledger do: the rules of each command, and that a refused one changes nothing."""

import pytest

import make
from kubelend.core import audit, commands, errors, transitions
from kubelend.core.lifecycle import Reason
from kubelend.core.models import ClusterId, Reservation, ReservationId


@pytest.fixture
def desk():
    return make.desk(a="cpu=4,memory=8Gi", b="cpu=2,memory=4Gi")


def finish(desk, how):
    """A reservation that is over, in one of the ways it can be."""
    held = desk.reserve("cpu=1,memory=1Gi", pinned="a")
    if how == "Released":
        desk.release(held)
    else:
        desk.refuse(held, "a")
    assert desk[held].phase == how
    return held


def test_reserved_at_once_with_target_end_and_text_of_the_contract(desk):
    held = desk[desk.reserve("cpu=3,memory=1Gi", duration=2 * make.HOUR)]
    assert (held.phase, held.reason, held.target) == ("Reserved", "Locked", "a")
    assert held.message == "Resources locked in cluster a"
    assert (held.created_at, held.reserved_at) == (make.T0, make.T0)
    assert held.expires_at == make.T0 + 2 * make.HOUR


def test_no_fit_without_waiting_leaves_no_trace(desk):
    before = make.state(desk.ledger)
    assert desk.refused("cpu=5,memory=1Gi") == "0/2 clusters fit: 2 InsufficientCPU"
    assert make.state(desk.ledger) == before


def test_second_candidate_serves_when_the_best_is_full(desk):
    assert desk.target(desk.reserve("cpu=4,memory=1Gi")) == "a"
    assert desk.target(desk.reserve("cpu=2,memory=1Gi")) == "b"


def test_pinned_cluster_is_used_or_nothing(desk):
    assert desk.target(desk.reserve("cpu=1,memory=1Gi", pinned="b")) == "b"
    assert desk.refused("cpu=3,memory=1Gi", pinned="b") == (
        "0/2 clusters fit: 1 InsufficientCPU, 1 NotPinned"
    )


def test_every_commanding_word_about_an_unknown_reservation_is_not_found(desk):
    unknown = ReservationId("rsv-unknown")
    for command in (desk.release, desk.activate):
        with pytest.raises(errors.NotFound):
            command(unknown)
    with pytest.raises(errors.NotFound):
        desk.renew(unknown, make.HOUR)
    for command in (desk.acknowledge, desk.refuse):
        with pytest.raises(errors.NotFound):
            command(unknown, "a")


def test_every_command_to_an_unknown_cluster_is_not_found(desk):
    for command in (desk.cordon, desk.uncordon, desk.drain, desk.remove):
        with pytest.raises(errors.NotFound):
            command("unknown")


# -- activate, renew, release


def test_activation_once_or_twice_is_the_same(desk):
    held = desk.reserve("cpu=1,memory=1Gi")
    desk.activate(held)
    active = desk[held]
    assert (active.phase, active.reason, active.activated_at) == ("Active", "InUse", make.T0)
    desk.pass_time(make.MINUTE)
    desk.activate(held)
    assert desk[held] == active


@pytest.mark.parametrize("phase", ["Pending", "Released", "Failed"])
def test_only_a_reserved_one_becomes_active(desk, phase):
    held = (
        desk.reserve("cpu=9,memory=1Gi", wait=make.HOUR)
        if phase == "Pending"
        else finish(desk, phase)
    )
    revision = desk.ledger.revision
    with pytest.raises(errors.WrongPhase, match=f"{held} is {phase}"):
        desk.activate(held)
    assert desk.ledger.revision == revision


@pytest.mark.parametrize("active", [False, True], ids=["reserved", "active"])
def test_renewal_counts_from_now(desk, active):
    held = desk.reserve("cpu=1,memory=1Gi", duration=make.HOUR)
    if active:
        desk.activate(held)
    desk.pass_time(30 * make.MINUTE)
    desk.renew(held, make.HOUR)
    assert desk[held].expires_at == make.T0 + 90 * make.MINUTE
    desk.pass_time(59 * make.MINUTE)
    desk.expire()
    assert desk[held].is_live
    desk.pass_time(make.MINUTE)
    desk.expire()
    assert desk[held].reason == "Expired"


def test_renewal_never_shortens(desk):
    held = desk.reserve("cpu=1,memory=1Gi", duration=2 * make.HOUR)
    revision = desk.ledger.revision
    desk.renew(held, make.MINUTE)
    assert desk[held].expires_at == make.T0 + 2 * make.HOUR
    assert desk.ledger.revision == revision


@pytest.mark.parametrize("phase", ["Pending", "Released", "Failed"])
def test_only_a_live_one_is_renewed(desk, phase):
    held = (
        desk.reserve("cpu=9,memory=1Gi", wait=make.HOUR)
        if phase == "Pending"
        else finish(desk, phase)
    )
    revision = desk.ledger.revision
    with pytest.raises(errors.WrongPhase, match=f"{held} is {phase}"):
        desk.renew(held, make.HOUR)
    assert desk.ledger.revision == revision


@pytest.mark.parametrize(
    "reason, message",
    [
        (Reason.BY_REQUESTER, "Released by requester r"),
        (Reason.BY_ADMIN, "Released by an administrator"),
        (Reason.DELETED, "Released because its object was deleted"),
    ],
)
def test_release_says_who_and_is_idempotent(desk, reason, message):
    held = desk.reserve("cpu=1,memory=1Gi")
    desk.release(held, reason)
    released = desk[held]
    assert (released.phase, released.reason) == ("Released", reason)
    assert (released.message, released.finished_at) == (message, make.T0)
    desk.pass_time(make.MINUTE)
    desk.release(held, Reason.BY_ADMIN)
    assert desk[held] == released


def test_release_of_what_failed_changes_nothing(desk):
    failed = finish(desk, "Failed")
    before = make.state(desk.ledger)
    desk.release(failed)
    assert make.state(desk.ledger) == before


# -- idempotency keys


def test_same_key_and_request_give_the_same_reservation(desk):
    first = desk.reserve("cpu=1,memory=1Gi", key="k")
    before = make.state(desk.ledger)
    assert [desk.reserve("cpu=1,memory=1Gi", key="k") for _ in range(3)] == [first] * 3
    assert make.state(desk.ledger) == before


def test_same_key_gives_the_same_reservation_whatever_became_of_it(desk):
    first = desk.reserve("cpu=1,memory=1Gi", key="k")
    for change in (desk.activate, desk.release):
        change(first)
        desk.pass_time(make.MINUTE)
        assert desk.reserve("cpu=1,memory=1Gi", key="k") == first


def test_same_key_gives_the_same_waiter_even_when_the_queue_is_full(desk):
    first = desk.reserve("cpu=4,memory=8Gi", key="k", wait=make.HOUR)
    second = desk.reserve("cpu=4,memory=8Gi", key="l", wait=make.HOUR)
    desk.max_waiting = 1
    assert desk.reserve("cpu=4,memory=8Gi", key="k", wait=make.HOUR) == first
    assert desk.reserve("cpu=4,memory=8Gi", key="l", wait=make.HOUR) == second


@pytest.mark.parametrize(
    "other",
    [
        {"wanted": "cpu=2,memory=1Gi"},
        {"duration": 2 * make.HOUR},
        {"priority": 1},
        {"policy": "cost"},
        {"pinned": "a"},
        {"wait": make.MINUTE},
    ],
    ids=str,
)
def test_key_that_comes_back_with_another_request_is_refused(desk, other):
    desk.reserve("cpu=1,memory=1Gi", key="k")
    before = make.state(desk.ledger)
    with pytest.raises(errors.KeyReused, match="'k' was used for another request"):
        desk.ask(**{"wanted": "cpu=1,memory=1Gi", "key": "k", **other})
    assert make.state(desk.ledger) == before


def test_keys_are_the_requesters_own(desk):
    mine = desk.reserve("cpu=1,memory=1Gi", requester="r", key="k")
    theirs = desk.reserve("cpu=2,memory=1Gi", requester="s", key="k")
    assert mine != theirs
    assert desk[theirs].requester == "s"


def test_no_is_not_remembered_under_the_key(desk):
    desk.refused("cpu=9,memory=1Gi", key="k")
    desk.advertise("c", "cpu=9,memory=9Gi")
    assert desk.target(desk.reserve("cpu=9,memory=1Gi", key="k")) == "c"


def test_restored_ledger_knows_the_keys(desk):
    first = desk.reserve("cpu=1,memory=1Gi", key="k")
    restored = make.Desk(make.Recorder.restore(desk.kept()), desk.now)
    assert restored.reserve("cpu=1,memory=1Gi", key="k") == first


def test_placed_at_once_is_what_waiting_and_then_being_placed_would_give():
    request, name, target = make.request("cpu=1,memory=1Gi"), ReservationId("rsv-x"), ClusterId("a")
    for prices in (None, make.price_list("EUR", cpu="0.05")):
        pending = Reservation(name, request, make.T0)
        end = make.T0 + request.duration
        at_once = transitions.new_placed_reservation(name, request, target, prices, make.T0)
        placed = transitions.placed_event(pending, target, prices, end, Reason.LOCKED, make.T0)
        assert at_once == transitions.apply_reservation_event(pending, placed, 0)


@pytest.mark.parametrize("phase", ["Pending", "Reserved", "Active", "Released", "Failed"])
def test_retired_reservation_is_given_back_and_its_name_is_free(desk, phase):
    match phase:
        case "Pending":
            held = desk.reserve("cpu=9,memory=1Gi", wait=make.HOUR)
        case "Reserved" | "Active":
            held = desk.reserve("cpu=1,memory=1Gi")
            if phase == "Active":
                desk.activate(held)
        case _:
            held = finish(desk, phase)
    desk.retire(held)
    assert held not in desk.ledger.reservations
    assert desk.ledger.reserved("a") == make.resources("")
    assert audit.invariant_violations(desk.ledger) == []
    desk.retire(held)


@pytest.mark.parametrize("is_over", [False, True])
def test_who_takes_a_name_again_is_not_forgotten_in_place_of_who_had_it(desk, is_over):
    held = desk.reserve("cpu=1,memory=1Gi")
    desk.retire(held)
    desk.pass_time(make.MINUTE)
    desk.ask_as(held, make.request("cpu=1,memory=1Gi", duration=2 * make.RETENTION))
    if is_over:
        desk.release(held)
    desk.pass_time(make.RETENTION - make.SECOND)
    desk.expire()
    assert desk[held].is_live != is_over
    assert audit.invariant_violations(desk.ledger) == []


def test_withdrawn_offer_takes_nothing_new_and_its_loans_count_when_it_is_back():
    desk = make.desk(a="cpu=4,memory=8Gi")
    held = desk.reserve("cpu=3,memory=1Gi")
    desk.run(commands.withdraw_offer(desk.ledger, ClusterId("a"), desk.now))
    assert desk[held].target == "a"
    assert "a" not in desk.ledger.clusters
    assert desk.refused("cpu=1,memory=1Gi") == "no cluster has advertised yet"
    assert audit.invariant_violations(desk.ledger) == []
    desk.advertise("a", "cpu=4,memory=8Gi")
    assert desk.ledger.available(ClusterId("a")).cpu == 1000
    desk.refused("cpu=2,memory=1Gi")
    desk.run(commands.withdraw_offer(desk.ledger, ClusterId("nobody"), desk.now))
