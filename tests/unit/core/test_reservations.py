"""The life of a reservation: phases, commands of requester and provider, keys, moves and counts."""

import pytest

import make
from kubelend.core import audit, commands, errors, transitions
from kubelend.core.events import (
    Acknowledged,
    Activated,
    Failed,
    FailoverBlocked,
    HoldReported,
    Nominated,
    Placed,
    ProviderRecovered,
    Released,
    Renewed,
    RetentionExpired,
)
from kubelend.core.lifecycle import ALLOWED_TRANSITIONS, FINAL, Phase, Reason
from kubelend.core.models import ClusterId, HoldReport, Reservation, ReservationId

LATER = make.T0 + make.MINUTE
END = LATER + make.HOUR
ID = ReservationId("rsv-1")

EVENTS = {
    "Nominated": Nominated(LATER, ID, ClusterId("a")),
    "Placed": Placed(LATER, ID, ClusterId("b"), END, Reason.LOCKED),
    "FailoverBlocked": FailoverBlocked(LATER, ID, "no provider fits"),
    "ProviderRecovered": ProviderRecovered(LATER, ID),
    "Acknowledged": Acknowledged(LATER, ID),
    "HoldReported": HoldReported(LATER, ID, HoldReport(True, "Held")),
    "Activated": Activated(LATER, ID),
    "Renewed": Renewed(LATER, ID, END),
    "Released": Released(LATER, ID, Reason.BY_REQUESTER, "given back"),
    "Failed": Failed(LATER, ID, Reason.REFUSED, "nobody wants it"),
}


def reservation(phase=Phase.RESERVED, **fields):
    return make.reservation("rsv-1", phase=phase, **fields)


def test_phases_and_reasons_keep_their_names():
    assert " ".join(Phase) == "Pending Reserved Active Released Failed"
    assert " ".join(Reason) == (
        "Waiting Locked Moved InUse ProviderUnreachable ReleasedByRequester ReleasedByAdmin Deleted"
        " Expired Drained WaitTimedOut ProviderRefused"
    )


def test_which_phase_may_follow():
    assert {
        phase.value: " ".join(sorted(after)) for phase, after in ALLOWED_TRANSITIONS.items()
    } == {
        "Pending": "Failed Pending Released Reserved",
        "Reserved": "Active Failed Released Reserved",
        "Active": "Active Failed Released Reserved",
        "Released": "",
        "Failed": "",
    }


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("phase", sorted(FINAL))
def test_nothing_happens_to_what_is_finished(phase, event):
    with pytest.raises(errors.WrongPhase, match=f"rsv-1 is {phase}") as refused:
        transitions.apply_reservation_event(reservation(phase), EVENTS[event], 7)
    assert refused.value.hint == "the reservation is finished; request a new one"


def test_pending_cannot_become_active():
    with pytest.raises(errors.WrongPhase, match="is Pending and cannot become Active") as no:
        transitions.apply_reservation_event(reservation(Phase.PENDING), EVENTS["Activated"], 7)
    assert no.value.hint == "allowed next phases: Failed, Released, Reserved"


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


@pytest.fixture
def runner():
    return make.runner(a="cpu=4,memory=8Gi", b="cpu=2,memory=4Gi")


def finish(runner, how):
    """A reservation that is over, in one of the ways it can be."""
    held = runner.reserve("cpu=1,memory=1Gi", pinned="a")
    if how == "Released":
        runner.release(held)
    else:
        runner.refuse(held, "a")
    assert runner[held].phase == how
    return held


def test_report_is_of_one_provider_and_kept_until_the_next_one(runner):
    held = runner.reserve("cpu=1,memory=1Gi", pinned="a")
    report = HoldReport(is_held=False, reason="PartiallyHeld", message="half of it")
    runner.acknowledge(held, "a", report)
    acknowledged = runner[held]
    assert (acknowledged.held, acknowledged.acknowledged_at) == (report, make.T0)
    runner.pass_time(make.MINUTE)
    for repeated in (report, None):
        runner.acknowledge(held, "a", repeated)
    assert runner[held] == acknowledged
    other = runner.reserve("cpu=1,memory=1Gi")
    runner.acknowledge(other, str(runner[other].target), report)
    runner.refuse(other, str(runner[other].target))
    assert (runner[other].phase, runner[other].held) == ("Reserved", None), "of the next provider"


def test_reserved_at_once_with_target_end_and_text_of_the_contract(runner):
    held = runner[runner.reserve("cpu=3,memory=1Gi", duration=2 * make.HOUR)]
    assert (held.phase, held.reason, held.target) == ("Reserved", "Locked", "a")
    assert held.message == "Resources locked in cluster a"
    assert (held.created_at, held.reserved_at) == (make.T0, make.T0)
    assert held.expires_at == make.T0 + 2 * make.HOUR


def test_unknown_reservations_and_clusters_are_not_found(runner):
    unknown = ReservationId("rsv-unknown")
    calls = [
        lambda: runner.release(unknown),
        lambda: runner.activate(unknown),
        lambda: runner.renew(unknown, make.HOUR),
        lambda: runner.acknowledge(unknown, "a"),
        lambda: runner.refuse(unknown, "a"),
        lambda: runner.cordon("unknown"),
        lambda: runner.uncordon("unknown"),
        lambda: runner.drain("unknown"),
        lambda: runner.remove("unknown"),
    ]
    for call in calls:
        with pytest.raises(errors.NotFound):
            call()


def test_activation_once_or_twice_is_the_same(runner):
    held = runner.reserve("cpu=1,memory=1Gi")
    for _ in range(2):
        runner.activate(held)
        active = runner[held]
        assert (active.phase, active.reason, active.activated_at) == ("Active", "InUse", make.T0)
        assert active.message == "Resources in use in cluster a"
        runner.pass_time(make.MINUTE)


@pytest.mark.parametrize("phase", ["Pending", "Released", "Failed"])
def test_only_a_live_one_is_activated_and_renewed(runner, phase):
    waits = {"wait": make.HOUR}
    held = runner.reserve("cpu=9", **waits) if phase == "Pending" else finish(runner, phase)
    before = make.state(runner.ledger)
    for command in (runner.activate, lambda held: runner.renew(held, make.HOUR)):
        with pytest.raises(errors.WrongPhase, match=f"{held} is {phase}"):
            command(held)
    if phase != "Pending":
        runner.release(held)
    assert make.state(runner.ledger) == before


def test_renewal_counts_from_now_and_never_shortens(runner):
    held = runner.reserve("cpu=1,memory=1Gi", duration=make.HOUR)
    runner.pass_time(30 * make.MINUTE)
    for duration in (make.HOUR, make.MINUTE):
        runner.renew(held, duration)
        assert runner[held].expires_at == make.T0 + 90 * make.MINUTE
    assert runner.ledger.revision == runner[held].revision
    runner.pass_time(59 * make.MINUTE)
    runner.expire()
    assert runner[held].is_live
    runner.pass_time(make.MINUTE)
    runner.expire()
    assert runner[held].reason == "Expired"


@pytest.mark.parametrize(
    "reason, message",
    [
        (Reason.BY_REQUESTER, "Released by requester r"),
        (Reason.BY_ADMIN, "Released by an administrator"),
        (Reason.DELETED, "Released because its object was deleted"),
    ],
)
def test_release_says_who_and_is_idempotent(runner, reason, message):
    held = runner.reserve("cpu=1,memory=1Gi")
    runner.release(held, reason)
    released = runner[held]
    assert (released.phase, released.reason) == ("Released", reason)
    assert (released.message, released.finished_at) == (message, make.T0)
    runner.pass_time(make.MINUTE)
    runner.release(held, Reason.BY_ADMIN)
    assert runner[held] == released


def test_same_key_and_request_give_the_same_reservation_whatever_became_of_it(runner):
    runner.refused("cpu=3,memory=9Gi", key="k")  # which is not remembered
    first = runner.reserve("cpu=1,memory=1Gi", key="k")
    theirs = runner.reserve("cpu=1,memory=1Gi", requester="s", key="k")
    assert runner[theirs].requester == "s"
    waiter = runner.reserve("cpu=9,memory=1Gi", key="w", wait=make.HOUR)
    runner.max_waiting = 1
    before = make.state(runner.ledger)
    assert [runner.reserve("cpu=1,memory=1Gi", key="k") for _ in range(3)] == [first] * 3
    assert runner.reserve("cpu=9,memory=1Gi", key="w", wait=make.HOUR) == waiter, "in a full queue"
    assert make.state(runner.ledger) == before
    for change in (runner.activate, runner.release):
        change(first)
        runner.pass_time(make.MINUTE)
        assert runner.reserve("cpu=1,memory=1Gi", key="k") == first
    restored = make.CommandRunner(make.Recorder.restore(runner.kept()), runner.now)
    assert restored.reserve("cpu=1,memory=1Gi", key="k") == first


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
def test_key_that_comes_back_with_another_request_is_refused(runner, other):
    runner.reserve("cpu=1,memory=1Gi", key="k")
    before = make.state(runner.ledger)
    with pytest.raises(errors.KeyReused, match="'k' was used for another request"):
        runner.ask(**{"wanted": "cpu=1,memory=1Gi", "key": "k", **other})
    assert make.state(runner.ledger) == before


def test_placed_at_once_is_what_waiting_and_then_being_placed_would_give():
    request, name, target = make.request("cpu=1,memory=1Gi"), ReservationId("rsv-x"), ClusterId("a")
    for prices in (None, make.price_list("EUR", cpu="0.05")):
        pending = Reservation(name, request, make.T0)
        end = make.T0 + request.duration
        at_once = transitions.new_placed_reservation(name, request, target, prices, make.T0)
        placed = transitions.placed_event(pending, target, prices, end, Reason.LOCKED, make.T0)
        assert at_once == transitions.apply_reservation_event(pending, placed, 0)


@pytest.mark.parametrize("phase", ["Pending", "Reserved", "Active", "Released", "Failed"])
def test_retired_reservation_is_given_back_and_its_name_is_free(runner, phase):
    if phase in FINAL:
        held = finish(runner, phase)
    else:
        held = runner.reserve("cpu=9" if phase == "Pending" else "cpu=1", wait=make.HOUR)
    if phase == "Active":
        runner.activate(held)
    runner.retire(held)
    assert held not in runner.ledger.reservations
    assert runner.ledger.reserved("a") == make.resources("")
    assert audit.invariant_violations(runner.ledger) == []
    runner.retire(held)


@pytest.mark.parametrize("is_over", [False, True])
def test_who_takes_a_name_again_is_not_forgotten_in_place_of_who_had_it(runner, is_over):
    held = runner.reserve("cpu=1,memory=1Gi")
    runner.retire(held)
    runner.pass_time(make.MINUTE)
    runner.ask_as(held, make.request("cpu=1,memory=1Gi", duration=2 * make.RETENTION))
    if is_over:
        runner.release(held)
    runner.pass_time(make.RETENTION - make.SECOND)
    runner.expire()
    assert runner[held].is_live != is_over
    assert audit.invariant_violations(runner.ledger) == []


def test_withdrawn_offer_takes_nothing_new_and_its_loans_count_when_it_is_back():
    runner = make.runner(a="cpu=4,memory=8Gi")
    held = runner.reserve("cpu=3,memory=1Gi")
    runner.run(commands.withdraw_offer(runner.ledger, ClusterId("a"), runner.now))
    assert runner[held].target == "a"
    assert "a" not in runner.ledger.clusters
    assert runner.refused("cpu=1,memory=1Gi") == "no cluster has advertised yet"
    assert audit.invariant_violations(runner.ledger) == []
    runner.advertise("a", "cpu=4,memory=8Gi")
    assert runner.ledger.available(ClusterId("a")).cpu == 1000
    runner.refused("cpu=2,memory=1Gi")
    runner.run(commands.withdraw_offer(runner.ledger, ClusterId("nobody"), runner.now))


@pytest.fixture
def trio():
    return make.runner(a="cpu=8,memory=8Gi", b="cpu=4,memory=4Gi", c="cpu=2,memory=2Gi")


@pytest.mark.parametrize("command", ["acknowledge", "refuse"])
def test_only_its_provider_may_answer_and_only_for_what_it_holds(trio, command):
    answer = getattr(trio, command)
    held = trio.reserve("cpu=1,memory=1Gi", requester="r")
    waiter = trio.reserve("cpu=9,memory=1Gi", wait=make.HOUR)
    before = make.state(trio.ledger)
    for found, stranger in ((held, "b"), (held, "r"), (waiter, "a")):
        with pytest.raises(errors.Forbidden, match=f"{found} is not placed on {stranger}"):
            answer(found, stranger)
    assert make.state(trio.ledger) == before
    trio.release(held)
    with pytest.raises(errors.WrongPhase, match=f"{held} is Released; the reservation is finished"):
        answer(held, "a")


def test_refusal_moves_to_the_next_candidate(trio):
    held = trio.reserve("cpu=1,memory=1Gi", duration=make.HOUR)
    trio.acknowledge(held, "a")
    trio.pass_time(make.MINUTE)
    trio.refuse(held, "a", "full")
    moved = trio[held]
    assert (moved.phase, moved.reason, moved.target) == ("Reserved", "Moved", "b")
    assert moved.left == ("a",)
    assert moved.acknowledged_at is None
    assert moved.reserved_at == trio.now
    assert moved.expires_at == make.T0 + make.HOUR, "the promised end stays"
    assert not trio.reserved("a")
    assert trio.reserved("b") == make.resources("cpu=1,memory=1Gi")


def test_refused_by_all_it_fails_and_says_why(trio):
    held = trio.reserve("cpu=1,memory=1Gi")
    for name in "abc":
        trio.refuse(held, name, "no GPU driver")
    failed = trio[held]
    assert (failed.phase, failed.reason) == ("Failed", "ProviderRefused")
    assert failed.message == (
        "Refused by c: no GPU driver; then 0/3 clusters fit: 3 PreviousProvider"
    )
    assert failed.left == ("a", "b")
    assert not any(trio.reserved(name) for name in "abc")


def test_pinned_reservation_that_is_refused_fails(trio):
    held = trio.reserve("cpu=1,memory=1Gi", pinned="a")
    trio.refuse(held, "a", "")
    failed = trio[held]
    assert (failed.phase, failed.reason) == ("Failed", "ProviderRefused")
    assert failed.message == (
        "Refused by a: no reason given; then 0/3 clusters fit: 2 NotPinned, 1 PreviousProvider"
    )
    trio.refuse(held, "a")
    assert trio[held] == failed, "a refusal can be sent again"
    with pytest.raises(errors.Forbidden):
        trio.refuse(held, "b")


def test_what_is_in_use_cannot_be_refused(trio):
    held = trio.reserve("cpu=1,memory=1Gi")
    trio.activate(held)
    before = make.state(trio.ledger)
    with pytest.raises(errors.WrongPhase, match="is in use; drain the cluster instead"):
        trio.refuse(held, "a")
    assert make.state(trio.ledger) == before


def test_cordon_keeps_what_is_there_and_takes_nothing_new(trio):
    held = trio.reserve("cpu=1,memory=1Gi")
    assert trio.cordon("a", "old disks").cordon == "old disks"
    assert trio.cordon("a", "new disks").cordon == "new disks"
    assert trio[held].is_live
    assert trio.advertise("a", "cpu=8,memory=8Gi").cordon == "new disks"
    assert trio.target(trio.reserve("cpu=1,memory=1Gi")) == "b"
    revision = trio.ledger.revision
    trio.cordon("a", "new disks")
    trio.uncordon("b")
    assert trio.ledger.revision == revision, "said again"
    assert trio.uncordon("a").cordon is None
    assert trio.target(trio.reserve("cpu=1,memory=1Gi")) == "a"


def test_drain_moves_what_fits_elsewhere_and_releases_the_rest(trio):
    small, large = trio.reserve("cpu=3,memory=1Gi"), trio.reserve("cpu=5,memory=1Gi")
    trio.activate(small)
    assert {trio.target(small), trio.target(large)} == {"a"}
    assert trio.drain("a", "old") == [small, large]
    moved, lost = trio[small], trio[large]
    assert (moved.phase, moved.reason, moved.target) == ("Reserved", "Moved", "b")
    assert moved.activated_at is None
    assert (lost.phase, lost.reason) == ("Released", "Drained")
    assert lost.message == (
        "Cluster a was drained: old; then 0/3 clusters fit: 2 InsufficientCPU, 1 PreviousProvider"
    )
    assert not trio.reserved("a")
    assert trio.ledger.clusters["a"].cordon == "old"
    revision = trio.ledger.revision
    assert trio.drain("a", "old") == []
    assert trio.ledger.revision == revision


def test_cluster_that_still_lends_is_not_removed(trio):
    held = trio.reserve("cpu=1,memory=1Gi")
    before = make.state(trio.ledger)
    with pytest.raises(errors.Conflict, match="a still lends 1 reservation; drain the cluster"):
        trio.remove("a")
    assert make.state(trio.ledger) == before
    trio.drain("a")
    trio.remove("a")
    assert "a" not in trio.ledger.clusters
    assert trio.target(held) == "b"


def test_borrower_may_be_removed_while_it_borrows(trio):
    """Whether it advertises says nothing about what it was promised."""
    held = trio.reserve("cpu=1,memory=1Gi", requester="c")
    trio.remove("c")
    assert trio[held].is_live
    trio.release(held)
    assert not trio.reserved("a")
