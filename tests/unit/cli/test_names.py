"""A name may be written as `kind/name`, and errors name the flag that was typed."""

import pytest

from kubelend.cli import calls, members, options, request_flags
from kubelend.core.errors import InvalidInput, InvalidQuantity


@pytest.mark.parametrize(
    "text, kinds, name",
    [
        ("berlin", ["cluster"], "berlin"),
        ("cluster/berlin", ["cluster"], "berlin"),
        ("clusters/berlin", ["cluster"], "berlin"),
        ("rsv/rsv-1", ["reservation"], "rsv-1"),
        ("reservation/team/lend-1", ["reservation"], "team/lend-1"),
        ("team/lend-1", ["reservation"], "team/lend-1"),
        ("quota/team-a", ["cluster", "quota"], "team-a"),
        ("cluster/team-a", ["cluster", "quota"], "team-a"),
        ("", ["cluster"], ""),
    ],
)
def test_the_kind_is_taken_off(text, kinds, name):
    assert options.parse_name(text, *kinds) == name


@pytest.mark.parametrize(
    "text, problem", [("cluster/berlin", "is a cluster, not a res"), ("rsv/", "has no name")]
)
def test_another_kind_is_refused(text, problem):
    with pytest.raises(InvalidInput, match=problem):
        options.parse_name(text, "reservation")


@pytest.mark.parametrize(
    "text, role, member",
    [
        ("berlin", None, "cluster/berlin"),
        ("bob", members.Role.VIEWER, "viewer/bob"),
        ("admin/alice", None, "admin/alice"),
        ("admin/alice", members.Role.ADMIN, "admin/alice"),
        ("member/berlin", None, "cluster/berlin"),
        ("member/admin/alice", None, "admin/alice"),
        ("Bob; rm -rf /", members.Role.VIEWER, "viewer/Bob; rm -rf /"),
    ],
)
def test_a_member_is_named_by_role_and_name(text, role, member):
    assert str(members.member(text, role)) == member


def test_two_roles_for_one_member_are_refused():
    with pytest.raises(InvalidInput, match="'admin/alice' is no viewer"):
        members.member("admin/alice", members.Role.VIEWER)


@pytest.mark.parametrize(
    "message, shown",
    [
        ("requestedResources.cpu: 'x' is no", "--cpu: 'x' is no"),
        ("requestedResources.extended.example.com/fpga: 'x'", "--resource example.com/fpga: 'x'"),
        ("extended.fpga: is no extended resource", "--resource fpga: is no extended resource"),
        ("spec.requestedCPU: is wrong", "--cpu: is wrong"),
        ("duration: 900h is more", "--for: 900h is more"),
        ("weights.price: 2000 is not", "--weight price: 2000 is not"),
        ("constraints.maxPricePerHour: 'x'", "--max-price: 'x'"),
        ("body: Expected `int` - at `$.priority`", "--priority: Expected `int`"),
        ("durations: unknown", "durations: unknown"),
        ("no colon here", "no colon here"),
    ],
)
def test_an_error_of_the_broker_names_the_flag(message, shown):
    with pytest.raises(InvalidQuantity) as caught, calls.naming_flags(request_flags.FIELDS):
        raise InvalidQuantity(message, hint="do this")
    assert (caught.value.message, caught.value.hint) == (shown, "do this")
