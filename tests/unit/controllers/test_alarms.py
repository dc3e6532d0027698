"""When something is next to be looked at, though nothing happens."""

import make
from kubelend.controllers.reconciler import NextDue

SOON, LATER = make.T0 + make.SECOND, make.T0 + make.MINUTE


def test_alarm_rings_at_the_earliest_moment_until_it_is_turned_off():
    alarm = NextDue()
    assert not alarm.is_due(LATER)
    for at in (LATER, SOON, LATER):
        alarm.set(at)
    assert [alarm.is_due(now) for now in (make.T0, SOON, LATER)] == [False, True, True]
    alarm.clear()
    assert not alarm.is_due(LATER)


def test_alarm_is_set_for_what_is_to_come_and_for_nothing_else():
    alarm = NextDue()
    assert not alarm.has_passed(None, SOON)
    assert alarm.has_passed(SOON, SOON)
    assert not alarm.is_due(LATER)
    assert not alarm.has_passed(LATER, SOON)
    assert [alarm.is_due(now) for now in (SOON, LATER)] == [False, True]
