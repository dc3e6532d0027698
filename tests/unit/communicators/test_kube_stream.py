"""What of a mailbox was told before, and what is news."""

import make
from kubelend.communicators.kube_stream import Diary
from kubelend.wire import bodies

QUANTITIES = bodies.Quantities("1", "1Gi")


def told(revision, id="rsv-1", role="provider"):
    status = bodies.ReservationStatus("Reserved", "")
    found = bodies.Reservation(id, "a", "b", QUANTITIES, status, make.T0, revision=revision)
    return bodies.Instruction(revision, role, "Hold", "", found)


def test_each_revision_is_news_once():
    diary = Diary()
    assert [diary.note(told(number)) for number in (5, 5, 4, 6)] == [True, False, False, True]


def test_another_reservation_or_side_is_not_hidden_by_a_newer_one():
    diary = Diary()
    assert diary.note(told(9))
    assert diary.note(told(3, "rsv-2"))
    assert diary.note(told(3, role="requester"))


def test_after_a_new_beginning_all_is_news():
    diary = Diary()
    diary.note(told(9))
    diary.seen = 9
    diary.begin()
    assert diary.seen < 0
    assert diary.note(told(1))
