"""When something is next to be looked at, though nothing happens."""

import make
from kubelend.controllers.alarms import Alarm

SOON, LATER = make.T0 + make.SECOND, make.T0 + make.MINUTE


def test_alarm_rings_at_the_earliest_moment_until_it_is_turned_off():
    alarm = Alarm()
    assert not alarm.rings(LATER)
    for at in (LATER, SOON, LATER):
        alarm.set(at)
    assert [alarm.rings(now) for now in (make.T0, SOON, LATER)] == [False, True, True]
    alarm.turn_off()
    assert not alarm.rings(LATER)


def test_alarm_is_set_for_what_is_to_come_and_for_nothing_else():
    alarm = Alarm()
    assert not alarm.is_over(None, SOON)
    assert alarm.is_over(SOON, SOON)
    assert not alarm.rings(LATER)
    assert not alarm.is_over(LATER, SOON)
    assert [alarm.rings(now) for now in (SOON, LATER)] == [False, True]
