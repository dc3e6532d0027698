"""What holds of two policies is the stricter of both, in every point."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import make
from kubelend.core import errors, lending
from kubelend.core.lending import NO_POLICY, Access


@pytest.mark.parametrize(
    "names, name, expected",
    [
        (("team-a",), "team-a", True),
        (("team-a",), "team-ab", False),
        (("team-*",), "team-", True),
        (("team-*",), "my-team-a", False),
        (("team-?", "x"), "team-b", True),
        (("team-[ab]",), "team-c", False),
        (("team-[!ab]",), "team-c", True),
        (("TEAM-*",), "team-a", False),
        (("edge[1]",), "edge[1]", True),
        (("edge[1]",), "edge1", True),
        (("a.b",), "axb", False),
        ((), "a", False),
        (("*",), "any name\nat all", True),
    ],
)
def test_names_are_patterns_of_the_shell(names, name, expected):
    assert lending.matches_any(name, names) is expected


@pytest.mark.parametrize("name", ["", " ", "a\nb", "\x1b[2J"])
def test_what_names_no_cluster_is_refused(name):
    with pytest.raises(
        errors.InvalidInput, match=r"deny: .* is not a cluster name or pattern; write a name such"
    ):
        lending.check_name_patterns(("team-*", name), "deny")


def test_pattern_that_would_take_for_ever_does_not():
    hostile = ("*a" * 60 + "b",)
    assert not lending.matches_any("a" * 64, hostile)


def test_nothing_limited_is_no_policy():
    assert lending.effective_policy(None, None) is None
    assert lending.effective_policy(NO_POLICY, NO_POLICY) is None
    assert lending.effective_policy(None, NO_POLICY) is None


def test_the_stricter_of_both_holds_in_every_point():
    own = make.policy(
        allow=["team-*"],
        deny=["team-x"],
        keep_back="cpu=4,memory=1Gi",
        max_lent="cpu=10",
        max_per_requester="cpu=2,gpu=0",
        hours=["08:00-18:00"],
    )
    admins = make.policy(
        allow=["team-a", "other"],
        deny=["team-y"],
        keep_back="cpu=2,memory=8Gi",
        max_lent="cpu=8,gpu=1",
        max_per_requester="cpu=5",
        hours=["12:00-20:00"],
    )
    for found in (lending.effective_policy(own, admins), lending.effective_policy(admins, own)):
        assert found is not None
        assert found.access.deny == ("team-x", "team-y")
        assert [found.access.allows(name) for name in ("team-a", "team-b", "other")] == [
            True,
            False,
            False,
        ]
        assert found.keep_back == make.resources("cpu=4,memory=8Gi")
        assert found.max_lent == {"cpu": 8000, "gpu": 1}
        assert found.max_per_requester == {"cpu": 2000, "gpu": 0}
        assert sorted(found.hours) == [("08:00-18:00",), ("12:00-20:00",)]


def test_the_same_list_twice_counts_once():
    one = make.policy(allow=["a"], hours=["08:00-18:00"])
    found = lending.effective_policy(one, one)
    assert found is not None
    assert (found.access, found.hours) == (Access((("a",),)), (("08:00-18:00",),))


@pytest.mark.parametrize(
    "available, reserved, lendable",
    [
        ("cpu=8,memory=8Gi,gpu=2", "", "cpu=6,memory=8Gi"),
        ("cpu=8,memory=8Gi", "cpu=5", "cpu=5,memory=8Gi"),
        ("cpu=8,memory=8Gi", "cpu=11", "memory=8Gi"),
        ("cpu=1,memory=8Gi", "", "memory=8Gi"),
        ("", "", ""),
    ],
)
def test_lendable_is_without_what_is_kept_back_and_within_the_cap(available, reserved, lendable):
    holds = lending.effective_policy(make.policy(keep_back="cpu=2", max_lent="cpu=10,gpu=0"), None)
    assert holds is not None
    found = holds.lendable(make.resources(available), make.resources(reserved))
    assert found == make.resources(lendable)


amounts = st.integers(0, 9)


@given(amounts, amounts, amounts, amounts, amounts, amounts)
def test_lendable_of_both_is_the_smaller_of_each(free, lent, one_back, other_back, one, other):
    policies = [
        make.policy(keep_back=f"cpu={back}", max_lent=f"cpu={cap}")
        for back, cap in ((one_back, one), (other_back, other))
    ]
    both = lending.effective_policy(*policies)
    each = [lending.effective_policy(policy, None) for policy in policies]
    available, reserved = make.resources(f"cpu={free}"), make.resources(f"cpu={lent}")
    assert both is not None
    assert both.lendable(available, reserved).cpu == min(
        holds.lendable(available, reserved).cpu for holds in each if holds is not None
    )
