"""A reservation whose provider refuses or is drained finds the next one, and never returns."""

import pytest

import make
from kubelend.core import errors


@pytest.fixture
def desk():
    return make.desk(a="cpu=8,memory=8Gi", b="cpu=4,memory=4Gi", c="cpu=2,memory=2Gi")


def refused_everywhere(desk, held):
    """The providers in the order in which each of them refused."""
    tried = []
    while desk[held].is_live:
        tried.append(desk.target(held))
        desk.refuse(held, tried[-1], "no GPU driver")
    return tried


# -- the provider's answer


def test_acknowledgement_is_dated_once(desk):
    held = desk.reserve("cpu=1,memory=1Gi")
    desk.acknowledge(held, "a")
    desk.pass_time(make.MINUTE)
    desk.acknowledge(held, "a")
    assert desk[held].acknowledged_at == make.T0
    assert desk[held].phase == "Reserved"


@pytest.mark.parametrize("command", ["acknowledge", "refuse"])
def test_only_its_provider_may_answer(desk, command):
    held = desk.reserve("cpu=1,memory=1Gi", requester="r")
    before = make.state(desk.ledger)
    for stranger in ("b", "r"):
        with pytest.raises(errors.Forbidden, match=f"{held} is not placed on {stranger}"):
            getattr(desk, command)(held, stranger)
    assert make.state(desk.ledger) == before


@pytest.mark.parametrize("command", ["acknowledge", "refuse"])
def test_what_is_over_is_not_answered(desk, command):
    held = desk.reserve("cpu=1,memory=1Gi")
    desk.release(held)
    with pytest.raises(errors.WrongPhase, match=f"{held} is Released; the reservation is finished"):
        getattr(desk, command)(held, "a")


def test_refusal_that_failed_it_can_be_said_again(desk):
    held = desk.reserve("cpu=1,memory=1Gi", pinned="a")
    desk.refuse(held, "a")
    failed = desk[held]
    assert (failed.phase, failed.reason) == ("Failed", "ProviderRefused")
    desk.refuse(held, "a")
    assert desk[held] == failed
    with pytest.raises(errors.Forbidden):
        desk.refuse(held, "b")


def test_nobody_answers_for_a_request_that_waits(desk):
    waiter = desk.reserve("cpu=9,memory=1Gi", wait=make.HOUR)
    with pytest.raises(errors.Forbidden):
        desk.acknowledge(waiter, "a")


def test_refusal_moves_to_the_next_candidate(desk):
    held = desk.reserve("cpu=1,memory=1Gi", duration=make.HOUR)
    desk.acknowledge(held, "a")
    desk.pass_time(make.MINUTE)
    desk.refuse(held, "a", "full")
    moved = desk[held]
    assert (moved.phase, moved.reason, moved.target) == ("Reserved", "Moved", "b")
    assert moved.left == ("a",)
    assert moved.acknowledged_at is None
    assert moved.reserved_at == desk.now
    assert moved.expires_at == make.T0 + make.HOUR, "the promised end stays"
    assert not desk.reserved("a")
    assert desk.reserved("b") == make.resources("cpu=1,memory=1Gi")


def test_refused_by_all_it_fails_and_says_why(desk):
    held = desk.reserve("cpu=1,memory=1Gi")
    assert refused_everywhere(desk, held) == ["a", "b", "c"]
    failed = desk[held]
    assert (failed.phase, failed.reason) == ("Failed", "ProviderRefused")
    assert failed.message == ("Refused by c: no GPU driver; then 0/3 clusters fit: 3 LeftBefore")
    assert failed.left == ("a", "b")
    assert not any(desk.reserved(name) for name in "abc")


def test_it_never_returns_to_who_refused_even_if_they_are_the_best(desk):
    held = desk.reserve("cpu=1,memory=1Gi")
    desk.refuse(held, "a")
    desk.advertise("a", "cpu=64,memory=64Gi")
    desk.refuse(held, "b")
    assert desk.target(held) == "c"


def test_pinned_reservation_that_is_refused_fails(desk):
    held = desk.reserve("cpu=1,memory=1Gi", pinned="a")
    desk.refuse(held, "a", "")
    assert desk[held].message == (
        "Refused by a: no reason given; then 0/3 clusters fit: 2 NotPinned, 1 LeftBefore"
    )


def test_what_is_in_use_cannot_be_refused(desk):
    held = desk.reserve("cpu=1,memory=1Gi")
    desk.activate(held)
    before = make.state(desk.ledger)
    with pytest.raises(errors.WrongPhase, match="is in use; drain the cluster instead"):
        desk.refuse(held, "a")
    assert make.state(desk.ledger) == before


# -- the administrator


def test_cordon_keeps_what_is_there_and_takes_nothing_new(desk):
    held = desk.reserve("cpu=1,memory=1Gi")
    assert desk.cordon("a", "new disks").cordon == "new disks"
    assert desk[held].is_live
    assert desk.target(desk.reserve("cpu=1,memory=1Gi")) == "b"
    assert desk.uncordon("a").cordon is None
    assert desk.target(desk.reserve("cpu=1,memory=1Gi")) == "a"


def test_saying_it_again_changes_nothing(desk):
    desk.uncordon("a")
    desk.cordon("b", "why")
    revision = desk.ledger.revision
    desk.uncordon("a")
    desk.cordon("b", "why")
    assert desk.ledger.revision == revision
    assert desk.cordon("b", "another reason").cordon == "another reason"


def test_drain_moves_what_fits_elsewhere_and_releases_the_rest(desk):
    small, large = desk.reserve("cpu=3,memory=1Gi"), desk.reserve("cpu=5,memory=1Gi")
    desk.activate(small)
    assert {desk.target(small), desk.target(large)} == {"a"}
    assert desk.drain("a", "old") == [small, large]
    moved, lost = desk[small], desk[large]
    assert (moved.phase, moved.reason, moved.target) == ("Reserved", "Moved", "b")
    assert moved.activated_at is None
    assert (lost.phase, lost.reason) == ("Released", "Drained")
    assert lost.message == (
        "Cluster a was drained: old; then 0/3 clusters fit: 2 InsufficientCPU, 1 LeftBefore"
    )
    assert not desk.reserved("a")
    assert desk.ledger.clusters["a"].cordon == "old"


def test_drain_does_not_promise_the_same_capacity_to_two(desk):
    held = [desk.reserve("cpu=3,memory=1Gi", pinned=None) for _ in range(2)]
    assert [desk.target(one) for one in held] == ["a", "a"]
    desk.drain("a")
    assert [desk[one].phase for one in held] == ["Reserved", "Released"]


def test_drained_cluster_can_be_drained_again(desk):
    desk.drain("a")
    revision = desk.ledger.revision
    assert desk.drain("a") == []
    assert desk.ledger.revision == revision


def test_cluster_that_still_lends_is_not_removed(desk):
    held = desk.reserve("cpu=1,memory=1Gi")
    before = make.state(desk.ledger)
    with pytest.raises(
        errors.Conflict, match="a still lends 1 reservation; drain the cluster first"
    ):
        desk.remove("a")
    assert make.state(desk.ledger) == before
    desk.drain("a")
    desk.remove("a")
    assert "a" not in desk.ledger.clusters
    assert desk.target(held) == "b"


def test_borrower_may_be_removed_while_it_borrows(desk):
    """Whether it advertises says nothing about what it was promised."""
    held = desk.reserve("cpu=1,memory=1Gi", requester="c")
    desk.remove("c")
    assert desk[held].is_live
    desk.release(held)
    assert not desk.reserved("a")


def test_reservation_survives_the_removal_of_a_cluster_that_it_left(desk):
    held = desk.reserve("cpu=1,memory=1Gi")
    desk.refuse(held, "a")
    desk.remove("a")
    desk.release(held)
    desk.pass_time(make.RETENTION)
    desk.expire()
    assert held not in desk.ledger.reservations
