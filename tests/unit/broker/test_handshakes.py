"""Handshakes between the two clusters of a reservation: only between them, only for a while."""

from datetime import timedelta

import pytest

import make
from kubelend.broker import handshakes
from kubelend.broker.handshakes import HandshakeRelay
from kubelend.broker.streams import StreamHub
from kubelend.core.errors import Forbidden, InvalidInput, WrongPhase
from kubelend.core.lifecycle import Phase
from kubelend.core.models import ClusterId
from kubelend.wire.bodies import Handshake

R, A, B = map(ClusterId, "rab")
START, NONCE = Handshake("liqo-r"), Handshake("liqo-a", nonce="n")


def placed(id="rsv-1", target="a", phase=Phase.RESERVED):
    asked = make.request(requester="r")
    return make.reservation(id, asked, target=target and ClusterId(target), phase=phase)


@pytest.fixture
def hub():
    return StreamHub()


@pytest.fixture
def relay(hub, clock):
    return HandshakeRelay(hub, clock)


@pytest.fixture
def reservation():
    return placed()


def test_other_side_is_notified_until_it_has_got_the_handshake(relay, hub, reservation):
    """It may not have listened the first time."""
    feed = hub.open(A, 0)
    for _ in range(2):
        relay.exchange(reservation, R, START)
        assert feed.take_handshakes() == [reservation.id]
    assert relay.exchange(reservation, A, NONCE) == START
    assert relay.exchange(reservation, R, START) == NONCE
    assert feed.take_handshakes() == []


def test_only_requester_and_current_provider_take_part(relay, reservation):
    with pytest.raises(Forbidden, match="rsv-1 is not placed on b"):
        relay.exchange(reservation, B, NONCE)


@pytest.mark.parametrize("phase", [Phase.PENDING, Phase.RELEASED, Phase.FAILED])
def test_only_live_reservations_have_handshakes(relay, phase):
    target = None if phase is Phase.PENDING else "a"
    with pytest.raises(WrongPhase, match=f"rsv-1 is {phase}"):
        relay.exchange(placed(target=target, phase=phase), R, START)


def test_texts_are_plain_because_the_other_side_shows_them(relay, reservation):
    with pytest.raises(InvalidInput, match=r"error: .* contains a control"):
        relay.exchange(reservation, R, Handshake("liqo-r", error="\x84"))


def test_moved_reservation_starts_over_with_its_new_provider(relay, reservation):
    relay.exchange(reservation, A, NONCE)
    assert relay.exchange(placed(target="b"), R, START) is None


def test_handshake_expires(relay, clock, reservation):
    relay.exchange(reservation, A, NONCE)
    clock.pass_time(handshakes.LIFETIME - timedelta(seconds=1))
    assert relay.exchange(reservation, R, START) == NONCE
    clock.pass_time(timedelta(seconds=1))
    assert relay.exchange(reservation, R, START) is None


def test_number_of_handshakes_is_bounded(relay, monkeypatch, reservation):
    monkeypatch.setattr(handshakes, "MAX_HANDSHAKES", 2)
    relay.exchange(reservation, A, NONCE)
    for number in range(2):
        relay.exchange(placed(f"rsv-{number}x"), A, NONCE)
    assert relay.exchange(reservation, R, START) is None
