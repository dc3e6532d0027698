"""What each side has to do follows from the reservation alone."""

import pytest

import make
from kubelend.broker import streams
from kubelend.broker.streams import Action, Side
from kubelend.core.lifecycle import Phase

AMOUNTS = "cpu=500m,memory=256Mi,gpu=2"


def reservation(phase=Phase.RESERVED, *, target="a", left=()):
    return make.reservation(
        "rsv-1", make.request(AMOUNTS, "r"), phase=phase, target=target, left=left, message="Why"
    )


def told(cluster, found):
    return [(i.side, i.action, i.message) for i in streams.instructions_for(cluster, found)]


USE = (Side.REQUESTER, Action.USE, "Use a for 500m CPU / 256Mi Memory / 2 GPU")
HOLD = (Side.PROVIDER, Action.HOLD, "Hold 500m CPU / 256Mi Memory / 2 GPU for requester r")
WITHDRAW = (
    Side.PROVIDER,
    Action.WITHDRAW,
    "Release 500m CPU / 256Mi Memory / 2 GPU held for requester r",
)
STOP = (Side.REQUESTER, Action.STOP, "Why")


@pytest.mark.parametrize(
    "phase, requester, provider",
    [
        (Phase.RESERVED, USE, HOLD),
        (Phase.ACTIVE, USE, HOLD),
        (Phase.RELEASED, STOP, WITHDRAW),
        (Phase.FAILED, STOP, WITHDRAW),
    ],
)
def test_both_sides_are_told_their_part(phase, requester, provider):
    assert told("r", reservation(phase)) == [requester]
    assert told("a", reservation(phase)) == [provider]


def test_requester_of_a_waiting_one_is_told_to_wait():
    waiting = reservation(Phase.PENDING, target=None)
    assert told("r", waiting) == [(Side.REQUESTER, Action.WAIT, "Why")]


@pytest.mark.parametrize("phase", [Phase.RESERVED, Phase.ACTIVE, Phase.FAILED])
def test_provider_that_was_left_is_told_to_withdraw(phase):
    assert told("b", reservation(phase, left=("b", "c"))) == [WITHDRAW]


def test_whom_it_does_not_concern_is_told_nothing():
    assert told("stranger", reservation()) == []


def test_concerned_are_requester_provider_and_those_before():
    assert streams.clusters_of(reservation()) == {"r", "a"}
    assert streams.clusters_of(reservation(left=("b", "c"))) == {"r", "a", "b", "c"}
    assert streams.clusters_of(reservation(Phase.PENDING, target=None)) == {"r"}


def test_everyone_concerned_has_an_instruction():
    found = reservation(left=("b",))
    assert all(told(cluster, found) for cluster in streams.clusters_of(found))


def test_words_are_api():
    assert [side.value for side in Side] == ["requester", "provider"]
    assert [action.value for action in Action] == ["Wait", "Use", "Stop", "Hold", "Withdraw"]
