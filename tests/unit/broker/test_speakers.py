"""One agent speaks for a cluster: who is refused, for how long, and when the place is free again."""

from contextlib import ExitStack
from datetime import timedelta

import pytest

import make
from clocks import Clock
from kubelend.broker.agent_sessions import MAX_INSTANCE_LENGTH, RECONNECT_GRACE, AgentSessions
from kubelend.broker.streams import Subscription
from kubelend.core.errors import IdentityInUse
from kubelend.core.models import ClusterId

BERLIN, PARIS = ClusterId("berlin"), ClusterId("paris")
TIMEOUT = timedelta(seconds=90)


class Street:
    """Speakers, and a clock to move."""

    def __init__(self):
        self.clock = Clock()
        self.speakers = AgentSessions(self.clock, TIMEOUT)

    def speak(self, instance, cluster=BERLIN, origin="from 10.0.0.7"):
        self.speakers.claim(cluster, instance, origin)

    def is_refused(self, instance, cluster=BERLIN):
        try:
            self.speak(instance, cluster)
        except IdentityInUse:
            return True
        return False

    def stream(self, instance, feed=None):
        feed = feed or Subscription(BERLIN, 0)
        return self.speakers.hold_open(BERLIN, instance, "from 10.0.0.7", feed)


@pytest.fixture
def street():
    return Street()


def test_second_agent_hears_who_speaks_since_when_and_what_to_do(street):
    street.speak("one")
    street.clock.pass_time(27 * make.SECOND)
    street.speak("one")
    street.clock.pass_time(3 * make.SECOND)
    with pytest.raises(IdentityInUse) as refused:
        street.speak("two", origin="from 10.0.0.8")
    assert str(refused.value) == (
        "another agent is active for berlin since 12:00:00 UTC (from 10.0.0.7, last seen 3 s ago);"
        " stop it, or issue a separate certificate for this cluster"
    )


def test_the_day_is_told_once_it_is_another(street):
    street.speak("one")
    street.clock.pass_time(24 * make.HOUR)
    street.speak("one")
    with pytest.raises(IdentityInUse, match="since 2026-01-01 12:00:00 UTC"):
        street.speak("two")


def test_address_is_the_one_it_called_from_last(street):
    street.speak("one")
    street.speak("one", origin="through envoy")
    with pytest.raises(IdentityInUse, match=r"\(through envoy, last seen 0 s ago\)"):
        street.speak("two")


def test_each_cluster_has_a_speaker_of_its_own(street):
    street.speak("one", BERLIN)
    street.speak("two", PARIS)
    assert street.is_refused("two", BERLIN)
    assert street.is_refused("one", PARIS)


def test_agent_that_is_refused_takes_nothing(street):
    street.speak("one")
    for _ in range(10):
        street.clock.pass_time(8 * make.SECOND)
        assert street.is_refused("two")
    street.speak("one")


def test_silence_frees_the_place_in_its_moment(street):
    street.speak("one")
    street.clock.pass_time(TIMEOUT - make.MOMENT)
    assert street.is_refused("two")
    street.clock.pass_time(make.MOMENT)
    street.speak("two")
    assert street.is_refused("one")


def test_question_is_a_sign_of_life_of_who_speaks_and_of_nobody_else(street):
    street.speak("one")
    street.clock.pass_time(TIMEOUT / 2)
    street.speakers.touch(BERLIN, "one")
    street.speakers.touch(BERLIN, "two")
    street.speakers.touch(PARIS, "one")
    street.clock.pass_time(TIMEOUT / 2)
    assert street.is_refused("two")
    street.clock.pass_time(TIMEOUT / 2)
    street.speakers.touch(BERLIN, "two")
    street.speak("two")
    street.speak("three", PARIS)


def test_end_of_the_last_stream_frees_the_place_after_the_grace(street):
    with ExitStack() as outer:
        outer.enter_context(street.stream("one"))
        with street.stream("one"):
            assert street.is_refused("two")
        street.clock.pass_time(RECONNECT_GRACE)
        assert street.is_refused("two"), "the other stream is open"
    street.clock.pass_time(RECONNECT_GRACE - make.MOMENT)
    assert street.is_refused("two")
    street.clock.pass_time(make.MOMENT)
    street.speak("two")
    assert street.is_refused("one")


def test_stream_that_breaks_frees_the_place_too(street):
    with pytest.raises(ConnectionResetError), street.stream("one"):
        raise ConnectionResetError
    street.clock.pass_time(RECONNECT_GRACE)
    street.speak("two")


def test_agent_that_opens_another_stream_keeps_its_place_from_one_that_waits(street):
    """As it does for its new certificate: the old stream is closed first."""
    for _ in range(5):
        with street.stream("one"):
            street.clock.pass_time(make.MINUTE)
        for _ in range(2):
            street.clock.pass_time(RECONNECT_GRACE / 3)
            assert street.is_refused("two")
    with street.stream("one"):
        street.clock.pass_time(RECONNECT_GRACE)
        assert street.is_refused("two"), "it came back"


def test_during_the_grace_nobody_is_told_to_stop_what_may_have_ended(street):
    with street.stream("one"):
        pass
    with pytest.raises(IdentityInUse) as refused:
        street.speak("two")
    assert str(refused.value) == (
        "another agent is active for berlin since 12:00:00 UTC (from 10.0.0.7, last seen 0 s ago);"
        " its stream has just ended; try again in a moment"
    )


def test_grace_makes_nobody_wait_longer_than_silence(street):
    with street.stream("one"):
        street.clock.pass_time(TIMEOUT - make.MOMENT)
    assert street.is_refused("two")
    street.clock.pass_time(make.MOMENT)
    street.speak("two")


def test_clock_that_goes_back_ends_the_grace(street):
    with street.stream("one"):
        pass
    street.clock.pass_time(-make.HOUR)
    street.speak("two")


def test_agent_that_speaks_again_after_its_stream_has_its_place_and_its_age(street):
    with street.stream("one"):
        street.clock.pass_time(make.MINUTE)
    street.speak("one")
    street.clock.pass_time(RECONNECT_GRACE)
    with pytest.raises(IdentityInUse, match="since 12:00:00 UTC"):
        street.speak("two")


def test_open_stream_is_no_sign_of_life_and_ends_with_the_place(street):
    """A host that lost its power closes nothing."""
    old = Subscription(BERLIN, 0)
    with street.stream("one", old):
        street.clock.pass_time(TIMEOUT)
        feeds = [old, Subscription(BERLIN, 0)]
        assert not old.closed
        with street.stream("two", feeds[1]):
            assert [feed.closed for feed in feeds] == [True, False]
            assert street.is_refused("one")
    street.clock.pass_time(RECONNECT_GRACE)
    assert not street.is_refused("three")


def test_late_end_of_an_old_stream_takes_nothing_from_who_speaks_now(street):
    with ExitStack() as stack:
        stack.enter_context(street.stream("one"))
        street.clock.pass_time(TIMEOUT)
        street.speak("two")
        stack.close()
        assert street.is_refused("one")


def test_refused_stream_is_not_begun(street):
    street.speak("one")
    feed = Subscription(BERLIN, 0)
    with pytest.raises(IdentityInUse), street.stream("two", feed):
        pytest.fail("it has begun")
    assert not feed.closed


def test_clock_that_goes_back_makes_nobody_silent(street):
    street.speak("one")
    street.clock.pass_time(-make.HOUR)
    with pytest.raises(IdentityInUse, match="last seen 0 s ago"):
        street.speak("two")


def test_of_a_long_name_the_beginning_counts(street):
    street.speak("x" * MAX_INSTANCE_LENGTH + "one")
    street.clock.pass_time(TIMEOUT / 2)
    street.speakers.touch(BERLIN, "x" * MAX_INSTANCE_LENGTH + "two")
    street.clock.pass_time(TIMEOUT / 2)
    assert street.is_refused("y")
