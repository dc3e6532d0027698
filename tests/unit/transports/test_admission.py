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


class Observer:
    def __init__(self):
        self.open = 0
        self.rejected = []

    def opened(self):
        self.open += 1

    def closed(self):
        self.open -= 1

    def connection_rejected(self, limit, remote, caller):
        self.rejected.append((limit, remote, caller))

    def handshake_rejected(self, remote, reason):
        raise AssertionError("nobody shakes hands here")


@pytest.fixture
def observer():
    return Observer()


def arrive(table, remote="1.1.1.1"):
    slot = ConnectionSlot(remote, FakeConnection())
    assert table.add(slot)
    return slot


def enter(table, caller="a", remote="1.1.1.1"):
    slot = arrive(table, remote)
    assert table.authenticated(slot, caller, FakeConnection())
    return slot


def begin_call(table, slot):
    slot.connection.is_idle = False
    table.mark_busy(slot)


def end_call(table, slot):
    slot.connection.is_idle = True
    table.mark_idle(slot)


def dropped(*slots):
    return [slot.connection.is_dropped for slot in slots]


def test_oldest_unfinished_handshake_of_an_address_goes_for_a_newer(observer):
    table = ConnectionTable(ConnectionLimits(100, 10, 2), observer)
    other = arrive(table, "2.2.2.2")
    slots = [arrive(table) for _ in range(4)]
    assert dropped(*slots, other) == [True, True, False, False, False]
    assert observer.rejected == [(ConnectionLimit.HANDSHAKES, "1.1.1.1", None)] * 2
    assert observer.open == 3


def test_finished_handshakes_do_not_count_as_unfinished(observer):
    table = ConnectionTable(ConnectionLimits(100, 10, 1), observer)
    slots = [enter(table, f"caller-{number}") for number in range(5)]
    assert dropped(*slots) == [False] * 5


def test_full_house_lets_an_unfinished_handshake_go_before_anybody_known(observer):
    table = ConnectionTable(ConnectionLimits(3, 10, 10), observer)
    known = enter(table, "a")
    first, second = arrive(table, "2.2.2.2"), arrive(table, "3.3.3.3")
    new = arrive(table)
    assert dropped(known, first, second, new) == [False, True, False, False]
    assert observer.rejected == [(ConnectionLimit.CONNECTIONS, "2.2.2.2", None)]
    assert observer.open == 3


def test_full_house_lets_the_longest_idle_go(observer):
    table = ConnectionTable(ConnectionLimits(3, 10, 10), observer)
    a, b, c = (enter(table, name) for name in "abc")
    for slot in (a, c, b):
        begin_call(table, slot)
        end_call(table, slot)
    enter(table, "d")
    enter(table, "e")
    assert dropped(a, b, c) == [True, False, True]
    assert [caller for _, _, caller in observer.rejected] == ["a", "c"]


def test_connection_with_a_call_in_progress_stays_however_long_it_lasts(observer):
    table = ConnectionTable(ConnectionLimits(2, 10, 10), observer)
    busy, idle = enter(table, "a"), enter(table, "b")
    begin_call(table, busy)
    enter(table, "c")
    assert dropped(busy, idle) == [False, True]


def test_request_that_has_just_come_counts_as_one_in_progress(observer):
    """Between its last byte and its call the connection is still in the table as idle."""
    table = ConnectionTable(ConnectionLimits(2, 10, 10), observer)
    about_to, idle = enter(table, "a"), enter(table, "b")
    about_to.connection.is_idle = False
    enter(table, "c")
    assert dropped(about_to, idle) == [False, True]


def test_newcomer_is_refused_when_all_are_at_work(observer):
    table = ConnectionTable(ConnectionLimits(2, 10, 10), observer)
    slots = [enter(table, name) for name in "ab"]
    for slot in slots:
        begin_call(table, slot)
    assert table.add(ConnectionSlot("9.9.9.9", FakeConnection())) is False
    assert dropped(*slots) == [False, False]
    assert observer.rejected == [(ConnectionLimit.CONNECTIONS, "9.9.9.9", None)]
    assert observer.open == 2
    end_call(table, slots[1])
    arrive(table)
    assert dropped(*slots) == [False, True]


def test_caller_with_too_many_loses_one_of_its_own_that_is_idle(observer):
    table = ConnectionTable(ConnectionLimits(100, 2, 10), observer)
    other, first, second = enter(table, "b"), enter(table, "a"), enter(table, "a")
    begin_call(table, first)
    third = enter(table, "a")
    assert dropped(other, first, second, third) == [False, False, True, False]
    assert observer.rejected == [(ConnectionLimit.CALLER, "1.1.1.1", "a")]


def test_caller_with_too_many_at_work_is_refused_and_nobody_else(observer):
    table = ConnectionTable(ConnectionLimits(100, 2, 10), observer)
    for slot in (enter(table, "a"), enter(table, "a")):
        begin_call(table, slot)
    third = arrive(table)
    assert table.authenticated(third, "a", FakeConnection()) is False
    assert observer.rejected == [(ConnectionLimit.CALLER, "1.1.1.1", "a")]
    assert observer.open == 2
    enter(table, "b")


def test_one_connection_for_each_caller_is_possible(observer):
    table = ConnectionTable(ConnectionLimits(100, 1, 10), observer)
    slots = [enter(table, "a") for _ in range(3)]
    assert dropped(*slots) == [True, True, False]
    assert observer.open == 1


def test_those_without_a_caller_are_not_counted_together(observer):
    table = ConnectionTable(ConnectionLimits(100, 1, 10), observer)
    slots = [enter(table, None) for _ in range(5)]
    assert dropped(*slots) == [False] * 5


def test_who_left_counts_no_longer_and_may_leave_again(observer):
    table = ConnectionTable(ConnectionLimits(1, 1, 1), observer)
    for _ in range(3):
        slot = enter(table, "a")
        table.remove(slot)
        table.remove(slot)
        arrival = arrive(table)
        table.remove(arrival)
    assert observer.open == 0
    assert observer.rejected == []


def test_call_that_ends_after_its_connection_does_not_bring_it_back(observer):
    table = ConnectionTable(ConnectionLimits(1, 10, 10), observer)
    slot = enter(table, "a")
    begin_call(table, slot)
    table.remove(slot)
    end_call(table, slot)
    new = enter(table, "b")
    begin_call(table, new)
    assert table.add(ConnectionSlot("9.9.9.9", FakeConnection())) is False
    assert dropped(slot) == [False]


def test_whoever_needs_a_file_gets_the_one_that_made_room(observer):
    table = ConnectionTable(ConnectionLimits(), observer)
    assert table.close_one(ConnectionLimit.FILES) is None
    known, unknown = enter(table), arrive(table)
    assert table.close_one(ConnectionLimit.FILES) is unknown
    assert table.close_one(ConnectionLimit.FILES) is known
    assert [limit for limit, _, _ in observer.rejected] == [ConnectionLimit.FILES] * 2


def test_end_lets_go_of_unfinished_handshakes_only(observer):
    table = ConnectionTable(ConnectionLimits(), observer)
    known, unknown = enter(table), arrive(table)
    table.close_handshakes()
    assert dropped(known, unknown) == [False, True]
    assert observer.open == 1
