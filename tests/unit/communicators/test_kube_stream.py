"""What of a mailbox was told before, and what is news."""

import make
from kubelend.communicators.kubernetes_calls import RevisionTracker
from kubelend.wire import bodies

QUANTITIES = bodies.Quantities("1", "1Gi")


def told(revision, id="rsv-1", role="provider"):
    status = bodies.ReservationStatus("Reserved", "")
    found = bodies.Reservation(id, "a", "b", QUANTITIES, status, make.T0, revision=revision)
    return bodies.Instruction(revision, role, "Hold", "", found)


def test_each_revision_is_news_once():
    diary = RevisionTracker()
    assert [diary.advance(told(number)) for number in (5, 5, 4, 6)] == [True, False, False, True]


def test_another_reservation_or_side_is_not_hidden_by_a_newer_one():
    diary = RevisionTracker()
    assert diary.advance(told(9))
    assert diary.advance(told(3, "rsv-2"))
    assert diary.advance(told(3, role="requester"))


def test_after_a_new_beginning_all_is_news():
    diary = RevisionTracker()
    diary.advance(told(9))
    diary.complete_to = 9
    diary.reset()
    assert diary.complete_to < 0
    assert diary.advance(told(1))
