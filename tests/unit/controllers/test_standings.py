"""Who may not be spoken for any more."""

import pytest

import make
from kubelend.controllers import standings
from kubelend.core.errors import Revoked
from kubelend.core.members import Member, Standing
from kubelend.core.models import ClusterId
from kubelend.core.registry import Registry
from kubelend.core.roles import Role


def registry(standing, role=Role.CLUSTER):
    return Registry([Member(role, "a", standing, make.T0, reason="stolen")])


def test_revoked_cluster_is_refused_with_the_reason():
    with pytest.raises(Revoked, match="cluster a was revoked: stolen"):
        standings.check(registry(Standing.REVOKED), ClusterId("a"))


@pytest.mark.parametrize(
    "known",
    [
        pytest.param(Registry(), id="never heard of"),
        pytest.param(registry(Standing.ACCEPTED), id="accepted"),
        pytest.param(registry(Standing.REVOKED, Role.ADMIN), id="a person of that name"),
    ],
)
def test_others_are_not(known):
    standings.check(known, ClusterId("a"))
    with pytest.raises(Revoked):
        standings.check(registry(Standing.REVOKED), ClusterId("a"))
