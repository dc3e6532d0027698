"""A refusal that is repeated is told in full a few times, and counted after that: none is lost."""

from msgspec.structs import replace

import make
from kubelend.broker.floods import IN_FULL, WINDOW, Floods
from kubelend.core.journal import Actor, Entry

REFUSED = Entry(
    make.T0,
    Actor("mallory", "cluster", "192.0.2.9"),
    "reserve",
    "",
    code="RateLimited",
    message="m",
)


def test_first_ones_are_told_and_the_rest_is_counted():
    floods = Floods()
    assert [floods.admit(REFUSED) for _ in range(IN_FULL + 3)] == [True] * IN_FULL + [False] * 3
    assert floods.over(make.T0) == []
    (summary,) = floods.over(make.T0 + WINDOW)
    assert summary.message == "3 more within 60 s, the last: m"
    assert (summary.at, summary.actor, summary.code) == (
        make.T0 + WINDOW,
        REFUSED.actor,
        "RateLimited",
    )


def test_window_that_was_not_full_leaves_nothing_to_tell_and_a_new_one_begins():
    floods = Floods()
    assert floods.admit(REFUSED)
    assert floods.over(make.T0 + WINDOW) == []
    later = replace(REFUSED, at=make.T0 + WINDOW)
    assert all(floods.admit(later) for _ in range(IN_FULL))
    assert not floods.admit(later)


def test_others_are_not_silenced_by_a_flood():
    floods = Floods()
    for _ in range(IN_FULL + 1):
        floods.admit(REFUSED)
    assert floods.admit(replace(REFUSED, actor=Actor("berlin", "cluster")))
    assert floods.admit(replace(REFUSED, code="Forbidden"))
    assert floods.admit(replace(REFUSED, action="renew"))
