"""Of all that is received about a reservation the newest counts, and whoever listens hears of news only."""

import itertools

import pytest
from msgspec.structs import replace

import make
from kubelend.agent.reservation_cache import ReservationCache
from kubelend.core.lifecycle import Phase
from kubelend.wire import bodies


def body(id="rsv-1", *, revision=0, phase=Phase.RESERVED, message=""):
    return bodies.Reservation(
        id=id,
        requester_id="r",
        target_cluster_id="a",
        requested_resources=bodies.Quantities("1", "1Gi"),
        status=bodies.ReservationStatus(phase.value, message),
        created_at=make.T0,
        revision=revision,
    )


@pytest.fixture
def known():
    return ReservationCache()


@pytest.fixture
def changes(known):
    changes: list[str] = []
    known.subscribe(changes.append)
    return changes


def test_whatever_the_order_the_newest_word_stays():
    words = [body(revision=number, message=str(number)) for number in range(1, 5)]
    for order in itertools.permutations(words):
        known = ReservationCache()
        known.put_instructions(order)
        assert known.find("rsv-1") == words[-1]


def test_a_duplicate_is_no_news(known, changes):
    assert known.put(body(revision=3)) is True
    assert known.put(body(revision=3)) is False
    assert known.put(body(revision=2, phase=Phase.RELEASED)) is False
    assert changes == ["rsv-1"]


def test_a_broker_that_counts_no_revisions_is_believed_as_it_speaks(known, changes):
    for phase in [Phase.RESERVED, Phase.ACTIVE, Phase.RELEASED]:
        assert known.put(body(phase=phase)) is True
    assert known.put(body(phase=Phase.RELEASED)) is False
    assert changes == ["rsv-1"] * 3


def test_after_a_gap_the_answer_to_a_new_question_is_believed_though_it_seems_older(known, changes):
    known.put(body(revision=9, phase=Phase.ACTIVE))
    known.mark_gap()
    assert known.put(body(revision=4), known.sequence()) is True
    assert known.find("rsv-1") == body(revision=4)
    assert changes == ["rsv-1"] * 2


def test_without_a_gap_no_answer_takes_anything_back(known):
    known.put(body(revision=9))
    assert known.put(body(revision=4), known.sequence()) is False


def test_after_a_gap_an_answer_to_what_was_asked_before_takes_nothing_back(known):
    known.put(body(revision=4))
    asked_at = known.sequence()
    known.put(body(revision=9, phase=Phase.ACTIVE))
    known.mark_gap()
    assert known.put(body(revision=5), asked_at) is False
    assert known.put(body(revision=5)) is False
    assert known.find("rsv-1") == body(revision=9, phase=Phase.ACTIVE)


def test_what_was_heard_after_a_gap_has_an_order_again(known):
    known.mark_gap()
    known.put(body(revision=9))
    assert known.put(body(revision=5), known.sequence()) is False


def test_once_a_broker_that_began_anew_is_believed_its_own_order_counts(known):
    known.put(body(revision=100))
    known.mark_gap()
    asked_at = known.sequence()
    known.put(body(revision=5), asked_at)
    assert known.put(body(revision=4), asked_at) is False
    assert known.put(body(revision=6), asked_at) is True


def test_unheard_are_the_open_ones_without_a_word_since(known):
    known.put_instructions(
        [body("same"), body("silent"), body("over", phase=Phase.RELEASED), body("gone")]
    )
    since = known.sequence()
    known.put_instructions([body("same"), body("new")])
    known.remove("gone")
    assert known.not_updated_since(since) == ["silent"]


def test_contact_is_told_to_all_who_wait_for_it(known):
    calls: list[str] = []
    known.on_reconnect(lambda: calls.append("one"))
    known.on_reconnect(lambda: calls.append("two"))
    known.notify_reconnected()
    assert calls == ["one", "two"]


def test_listeners_find_the_news_when_they_are_told(known):
    found: list[object] = []
    known.subscribe(lambda name: found.append(known.find(name)))
    news = body(revision=1)
    known.put(news)
    known.remove("rsv-1")
    assert found == [news, None]


def test_every_listener_hears_of_every_reservation(known, changes):
    second: list[str] = []
    known.subscribe(second.append)
    known.put_instructions([body("rsv-1"), body("rsv-2")])
    assert changes == second == ["rsv-1", "rsv-2"]


def test_forgetting_what_is_not_known_is_no_news(known, changes):
    known.remove("rsv-1")
    assert changes == []


def test_what_was_forgotten_may_come_again(known, changes):
    known.put(body(revision=5))
    known.remove("rsv-1")
    assert known.find("rsv-1") is None
    assert known.put(body(revision=4)) is True
    assert changes == ["rsv-1"] * 3


def test_open_are_those_that_are_not_over(known):
    for phase in Phase:
        known.put(body(phase.value, phase=phase))
    assert {found.id for found in known.unfinished()} == {"Pending", "Reserved", "Active"}


def test_what_is_open_may_change_while_one_goes_through_it(known):
    known.put_instructions([body("rsv-1"), body("rsv-2")])
    for found in known.unfinished():
        known.remove(found.id)
        known.put(body(f"{found.id}-again"))
    assert {found.id for found in known.unfinished()} == {"rsv-1-again", "rsv-2-again"}


def test_each_reservation_has_its_own_order(known):
    known.put(body("rsv-1", revision=9))
    assert known.put(body("rsv-2", revision=1)) is True
    newer = replace(body("rsv-2"), revision=2)
    assert known.put(newer) is True
    assert known.find("rsv-2") == newer
