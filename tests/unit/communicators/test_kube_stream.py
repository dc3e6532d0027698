"""Which instructions of a cluster namespace are new."""

import make
from kubelend.communicators.kubernetes_calls import RevisionTracker
from kubelend.wire import bodies

QUANTITIES = bodies.Quantities("1", "1Gi")


def instruction(revision, id="rsv-1", role="provider"):
    status = bodies.ReservationStatus("Reserved", "")
    found = bodies.Reservation(id, "a", "b", QUANTITIES, status, make.T0, revision=revision)
    return bodies.Instruction(revision, role, "Hold", "", found)


def test_each_revision_is_news_once():
    tracker = RevisionTracker()
    assert [tracker.advance(instruction(number)) for number in (5, 5, 4, 6)] == [
        True,
        False,
        False,
        True,
    ]


def test_another_reservation_or_side_is_not_hidden_by_a_newer_one():
    tracker = RevisionTracker()
    assert tracker.advance(instruction(9))
    assert tracker.advance(instruction(3, "rsv-2"))
    assert tracker.advance(instruction(3, role="requester"))


def test_after_a_new_beginning_all_is_news():
    tracker = RevisionTracker()
    tracker.advance(instruction(9))
    tracker.complete_to = 9
    tracker.reset()
    assert tracker.complete_to < 0
    assert tracker.advance(instruction(1))
