"""Who stays and who goes when a listener has as many connections as it keeps."""

import pytest

from kubelend.transports.listener import (
    ConnectionLimit,
    ConnectionLimits,
    ConnectionSlot,
    ConnectionTable,
)


class FakeConnection:
    """A connection that notes its end."""

    def __init__(self):
        self.is_idle = True
        self.has_descriptor = True
        self.is_dropped = False

    def drop(self):
        self.is_dropped = True
        self.has_descriptor = False


class Watch:
    def __init__(self):
        self.open = 0
        self.away = []

    def opened(self):
        self.open += 1

    def closed(self):
        self.open -= 1

    def connection_rejected(self, limit, remote, caller):
        self.away.append((limit, remote, caller))

    def handshake_rejected(self, remote, reason):
        raise AssertionError("nobody shakes hands here")


@pytest.fixture
def watch():
    return Watch()


def arrive(books, remote="1.1.1.1"):
    place = ConnectionSlot(remote, FakeConnection())
    assert books.add(place)
    return place


def enter(books, caller="a", remote="1.1.1.1"):
    place = arrive(books, remote)
    assert books.authenticated(place, caller, FakeConnection())
    return place


def begin(books, place):
    place.holder.is_idle = False
    books.work(place)


def end(books, place):
    place.holder.is_idle = True
    books.mark_idle(place)


def gone(*places):
    return [place.holder.is_dropped for place in places]


def test_oldest_unfinished_handshake_of_an_address_goes_for_a_newer(watch):
    books = ConnectionTable(ConnectionLimits(100, 10, 2), watch)
    other = arrive(books, "2.2.2.2")
    places = [arrive(books) for _ in range(4)]
    assert gone(*places, other) == [True, True, False, False, False]
    assert watch.away == [(ConnectionLimit.HANDSHAKES, "1.1.1.1", None)] * 2
    assert watch.open == 3


def test_finished_handshakes_do_not_count_as_unfinished(watch):
    books = ConnectionTable(ConnectionLimits(100, 10, 1), watch)
    places = [enter(books, f"caller-{number}") for number in range(5)]
    assert gone(*places) == [False] * 5


def test_full_house_lets_an_unfinished_handshake_go_before_anybody_known(watch):
    books = ConnectionTable(ConnectionLimits(3, 10, 10), watch)
    known = enter(books, "a")
    first, second = arrive(books, "2.2.2.2"), arrive(books, "3.3.3.3")
    new = arrive(books)
    assert gone(known, first, second, new) == [False, True, False, False]
    assert watch.away == [(ConnectionLimit.CONNECTIONS, "2.2.2.2", None)]
    assert watch.open == 3


def test_full_house_lets_the_longest_idle_go(watch):
    books = ConnectionTable(ConnectionLimits(3, 10, 10), watch)
    a, b, c = (enter(books, name) for name in "abc")
    for place in (a, c, b):
        begin(books, place)
        end(books, place)
    enter(books, "d")
    enter(books, "e")
    assert gone(a, b, c) == [True, False, True]
    assert [caller for _, _, caller in watch.away] == ["a", "c"]


def test_connection_with_a_call_in_progress_stays_however_long_it_lasts(watch):
    books = ConnectionTable(ConnectionLimits(2, 10, 10), watch)
    busy, idle = enter(books, "a"), enter(books, "b")
    begin(books, busy)
    enter(books, "c")
    assert gone(busy, idle) == [False, True]


def test_request_that_has_just_come_counts_as_one_in_progress(watch):
    """Between its last byte and its call the connection is still in the books as resting."""
    books = ConnectionTable(ConnectionLimits(2, 10, 10), watch)
    about_to, idle = enter(books, "a"), enter(books, "b")
    about_to.holder.is_idle = False
    enter(books, "c")
    assert gone(about_to, idle) == [False, True]


def test_newcomer_is_refused_when_all_are_at_work(watch):
    books = ConnectionTable(ConnectionLimits(2, 10, 10), watch)
    places = [enter(books, name) for name in "ab"]
    for place in places:
        begin(books, place)
    assert books.add(ConnectionSlot("9.9.9.9", FakeConnection())) is False
    assert gone(*places) == [False, False]
    assert watch.away == [(ConnectionLimit.CONNECTIONS, "9.9.9.9", None)]
    assert watch.open == 2
    end(books, places[1])
    arrive(books)
    assert gone(*places) == [False, True]


def test_caller_with_too_many_loses_one_of_its_own_that_rests(watch):
    books = ConnectionTable(ConnectionLimits(100, 2, 10), watch)
    other, first, second = enter(books, "b"), enter(books, "a"), enter(books, "a")
    begin(books, first)
    third = enter(books, "a")
    assert gone(other, first, second, third) == [False, False, True, False]
    assert watch.away == [(ConnectionLimit.CALLER, "1.1.1.1", "a")]


def test_caller_with_too_many_at_work_is_refused_and_nobody_else(watch):
    books = ConnectionTable(ConnectionLimits(100, 2, 10), watch)
    for place in (enter(books, "a"), enter(books, "a")):
        begin(books, place)
    third = arrive(books)
    assert books.authenticated(third, "a", FakeConnection()) is False
    assert watch.away == [(ConnectionLimit.CALLER, "1.1.1.1", "a")]
    assert watch.open == 2
    enter(books, "b")


def test_one_connection_for_each_caller_is_possible(watch):
    books = ConnectionTable(ConnectionLimits(100, 1, 10), watch)
    places = [enter(books, "a") for _ in range(3)]
    assert gone(*places) == [True, True, False]
    assert watch.open == 1


def test_those_without_a_caller_are_not_counted_together(watch):
    books = ConnectionTable(ConnectionLimits(100, 1, 10), watch)
    places = [enter(books, None) for _ in range(5)]
    assert gone(*places) == [False] * 5


def test_who_left_counts_no_longer_and_may_leave_again(watch):
    books = ConnectionTable(ConnectionLimits(1, 1, 1), watch)
    for _ in range(3):
        place = enter(books, "a")
        books.remove(place)
        books.remove(place)
        arrival = arrive(books)
        books.remove(arrival)
    assert watch.open == 0
    assert watch.away == []


def test_call_that_ends_after_its_connection_does_not_bring_it_back(watch):
    books = ConnectionTable(ConnectionLimits(1, 10, 10), watch)
    place = enter(books, "a")
    begin(books, place)
    books.remove(place)
    end(books, place)
    new = enter(books, "b")
    begin(books, new)
    assert books.add(ConnectionSlot("9.9.9.9", FakeConnection())) is False
    assert gone(place) == [False]


def test_whoever_needs_a_file_gets_the_one_that_made_room(watch):
    books = ConnectionTable(ConnectionLimits(), watch)
    assert books.close_one(ConnectionLimit.FILES) is None
    known, unknown = enter(books), arrive(books)
    assert books.close_one(ConnectionLimit.FILES) is unknown
    assert books.close_one(ConnectionLimit.FILES) is known
    assert [limit for limit, _, _ in watch.away] == [ConnectionLimit.FILES] * 2


def test_end_lets_go_of_unfinished_handshakes_only(watch):
    books = ConnectionTable(ConnectionLimits(), watch)
    known, unknown = enter(books), arrive(books)
    books.close_handshakes()
    assert gone(known, unknown) == [False, True]
    assert watch.open == 1
