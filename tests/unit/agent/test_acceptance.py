"""A provider refuses what its policy or its free capacity does not allow, in words for a person."""

import pytest

import make
from kubelend.agent import holds as agent_holds
from kubelend.agent.holds import Capacity, HoldRequest
from kubelend.core.inventory import Hold

FREE = "cpu=8,memory=16Gi,gpu=2"
NIGHTLY = "Mon-Fri 18:00-08:00"
NOON = make.T0  # a Thursday


def refusal(wanted="cpu=4,memory=8Gi", *, free=FREE, lent=(), at=NOON, requester="r", **policy):
    holds = [Hold(whom, make.resources(amounts)) for whom, amounts in lent]
    room = None if free is None else make.resources(free)
    means = Capacity(make.policy(**policy) if policy else None, room, holds)
    return agent_holds.refusal_reason(HoldRequest(requester, make.resources(wanted), at), means)


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"wanted": FREE},
        {"allow": ["team-*", "r"]},
        {"deny": ["team-*"]},
        {"keep_back": "cpu=4,memory=8Gi"},
        {"keep_back": "gpu=2"},
        {"max_lent": "cpu=4"},
        {"max_lent": "cpu=6", "lent": [("x", "cpu=2,memory=1Gi")]},
        {"max_lent": "gpu=0"},
        {"max_lent": "gpu=1", "lent": [("x", "gpu=2")]},
        {"max_per_requester": "cpu=4", "lent": [("x", "cpu=4,memory=8Gi")]},
        {"hours": [NIGHTLY], "at": NOON + 6 * make.HOUR},
        {"free": None, "wanted": "cpu=100,memory=1Ti", "keep_back": "cpu=8"},
    ],
    ids=str,
)
def test_it_accepts(case):
    assert refusal(**case) == ""


@pytest.mark.parametrize(
    "case, reason",
    [
        (
            {"wanted": "cpu=9,memory=8Gi"},
            "requested 9 CPU / 8Gi Memory, but only 8 CPU / 16Gi Memory is free",
        ),
        (
            {"wanted": "cpu=1,memory=1Gi,example.com/fpga=1"},
            "requested 1 CPU / 1Gi Memory / 1 example.com/fpga, "
            "but only 8 CPU / 16Gi Memory is free",
        ),
        (
            {"keep_back": "cpu=5"},
            "requested 4 CPU / 8Gi Memory, but of 8 CPU / 16Gi Memory free "
            "this cluster keeps back 5 CPU / 0 Memory",
        ),
        (
            {"max_lent": "cpu=5", "lent": [("x", "cpu=2,memory=1Gi")]},
            "requested 4 cpu, but this cluster lends at most 5, of which 2 is lent",
        ),
        (
            {"max_lent": "memory=0"},
            "requested 8Gi memory, but this cluster lends at most 0, of which 0 is lent",
        ),
        (
            {"max_per_requester": "cpu=5", "lent": [("r", "cpu=2,memory=1Gi")]},
            "requested 4 cpu, but this cluster lends at most 5 to r, of which 2 is lent",
        ),
        ({"deny": ["r"]}, "this cluster does not lend to r"),
        ({"deny": ["r"], "allow": ["r"]}, "this cluster does not lend to r"),
        ({"allow": ["team-*"]}, "r is not in this cluster's list of allowed requesters"),
        ({"hours": [NIGHTLY]}, "outside this cluster's lending hours: Mon-Fri 18:00-08:00"),
        ({"free": None, "deny": ["*"]}, "this cluster does not lend to r"),
        (
            {"free": None, "max_lent": "cpu=3"},
            "requested 4 cpu, but this cluster lends at most 3, of which 0 is lent",
        ),
    ],
    ids=str,
)
def test_it_refuses(case, reason):
    assert refusal(**case) == reason


def test_what_is_promised_beyond_what_is_there_shows_as_nothing_free():
    free = make.resources("cpu=1,memory=8Gi") - make.resources("cpu=2")
    means = Capacity(None, free, [])
    question = HoldRequest("r", make.resources("cpu=1,memory=1Gi"), NOON)
    assert agent_holds.refusal_reason(question, means) == (
        "requested 1 CPU / 1Gi Memory, but only 0 CPU / 8Gi Memory is free"
    )
