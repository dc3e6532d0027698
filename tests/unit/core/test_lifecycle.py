"""The phases and reasons are API: their names and what may follow what are pinned here."""

import pytest

import make
from kubelend.core import errors, transitions
from kubelend.core.events import (
    Acknowledged,
    Activated,
    Failed,
    FailoverBlocked,
    Nominated,
    Placed,
    ProviderRecovered,
    Released,
    Renewed,
    RetentionExpired,
)
from kubelend.core.lifecycle import FINAL, LIVE, Phase, Reason, is_allowed_transition
from kubelend.core.models import ClusterId, ReservationId

LATER = make.T0 + make.MINUTE
END = LATER + make.HOUR
ID = ReservationId("rsv-1")

EVENTS = {
    "Nominated": Nominated(LATER, ID, ClusterId("a")),
    "Placed": Placed(LATER, ID, ClusterId("b"), END, Reason.LOCKED),
    "FailoverBlocked": FailoverBlocked(LATER, ID, "no provider fits"),
    "ProviderRecovered": ProviderRecovered(LATER, ID),
    "Acknowledged": Acknowledged(LATER, ID),
    "Activated": Activated(LATER, ID),
    "Renewed": Renewed(LATER, ID, END),
    "Released": Released(LATER, ID, Reason.BY_REQUESTER, "given back"),
    "Failed": Failed(LATER, ID, Reason.REFUSED, "nobody wants it"),
}


def reservation(phase=Phase.RESERVED, **fields):
    return make.reservation("rsv-1", phase=phase, **fields)


def test_phases_have_the_names_of_the_contract():
    assert [str(phase) for phase in Phase] == [
        "Pending",
        "Reserved",
        "Active",
        "Released",
        "Failed",
    ]


def test_reasons_keep_their_names():
    assert {str(reason) for reason in Reason} == {
        "Waiting",
        "Locked",
        "Moved",
        "InUse",
        "ProviderSilent",
        "ReleasedByRequester",
        "ReleasedByAdmin",
        "Deleted",
        "Expired",
        "Drained",
        "WaitTimedOut",
        "ProviderRefused",
    }


def test_only_reserved_and_active_hold_capacity():
    assert {Phase.RESERVED, Phase.ACTIVE} == LIVE
    assert {Phase.RELEASED, Phase.FAILED} == FINAL


@pytest.mark.parametrize("phase", Phase)
def test_which_phase_may_follow(phase):
    followers = {
        Phase.PENDING: "Pending Reserved Released Failed",
        Phase.RESERVED: "Reserved Active Released Failed",
        Phase.ACTIVE: "Active Reserved Released Failed",
        Phase.RELEASED: "",
        Phase.FAILED: "",
    }
    assert {to for to in Phase if is_allowed_transition(phase, to)} == set(followers[phase].split())


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("phase", sorted(FINAL))
def test_nothing_happens_to_what_is_finished(phase, event):
    with pytest.raises(errors.WrongPhase, match=f"rsv-1 is {phase}"):
        transitions.apply_reservation_event(reservation(phase), EVENTS[event], 7)


def test_pending_cannot_become_active():
    with pytest.raises(errors.WrongPhase, match="is Pending and cannot become Active") as no:
        transitions.apply_reservation_event(reservation(Phase.PENDING), EVENTS["Activated"], 7)
    assert no.value.hint == "allowed next phases: Failed, Released, Reserved"


@pytest.mark.parametrize("phase", [Phase.RELEASED, Phase.FAILED])
def test_what_is_over_is_refused_with_what_to_do_instead(phase):
    with pytest.raises(errors.WrongPhase, match="the reservation is finished; request a new one"):
        transitions.check_transition(reservation(phase), Phase.ACTIVE)


def test_every_event_stamps_its_revision():
    for event in EVENTS.values():
        assert transitions.apply_reservation_event(reservation(), event, 7).revision == 7


def test_placing_records_target_times_and_the_text_of_the_contract():
    waiter = reservation(Phase.PENDING, nominated_cluster=ClusterId("a"))
    placed = transitions.apply_reservation_event(waiter, EVENTS["Placed"], 7)
    assert (placed.phase, placed.reason, placed.target) == ("Reserved", "Locked", "b")
    assert placed.message == "Resources locked in cluster b"
    assert (placed.reserved_at, placed.expires_at) == (LATER, END)
    assert placed.nominated_cluster is None
    assert placed.left == ()


def test_moving_remembers_where_it_was_and_starts_anew():
    held = reservation(
        Phase.ACTIVE,
        target=ClusterId("a"),
        left=(ClusterId("z"),),
        acknowledged_at=make.T0,
        activated_at=make.T0,
    )
    moved = transitions.apply_reservation_event(held, EVENTS["Placed"], 7)
    assert (moved.phase, moved.target, moved.left) == ("Reserved", "b", ("z", "a"))
    assert moved.acknowledged_at is None
    assert moved.activated_at is None


def test_activation_and_acknowledgement_are_dated():
    held = reservation(target=ClusterId("a"))
    active = transitions.apply_reservation_event(held, EVENTS["Activated"], 7)
    assert (active.phase, active.reason, active.activated_at) == ("Active", "InUse", LATER)
    assert active.message == "Resources in use in cluster a"
    assert (
        transitions.apply_reservation_event(held, EVENTS["Acknowledged"], 7).acknowledged_at
        == LATER
    )


@pytest.mark.parametrize(
    "event, phase, reason, message",
    [
        ("Released", "Released", "ReleasedByRequester", "given back"),
        ("Failed", "Failed", "ProviderRefused", "nobody wants it"),
    ],
)
def test_an_end_says_why_and_when(event, phase, reason, message):
    held = reservation(target=ClusterId("a"), expires_at=END)
    ended = transitions.apply_reservation_event(held, EVENTS[event], 7)
    assert (ended.phase, ended.reason, ended.message) == (phase, reason, message)
    assert ended.finished_at == LATER
    assert ended.target == "a"
    assert ended.deadline is None


def test_an_event_without_a_transition_is_a_mistake_of_ours():
    with pytest.raises(TypeError, match="no transition for RetentionExpired of rsv-1"):
        transitions.apply_reservation_event(reservation(), RetentionExpired(LATER, ID), 7)


@pytest.mark.parametrize(
    "phase, deadline",
    [("Pending", LATER), ("Reserved", END), ("Active", END), ("Released", None), ("Failed", None)],
)
def test_deadline_is_the_end_of_waiting_or_of_holding(phase, deadline):
    found = reservation(Phase(phase), wait_until=LATER, expires_at=END)
    assert found.deadline == deadline
