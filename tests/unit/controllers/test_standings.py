"""Who may not be spoken for any more."""

import pytest

import make
from kubelend.controllers import labels
from kubelend.core.errors import Revoked
from kubelend.core.indexes import MemberIndex
from kubelend.core.lifecycle import Role
from kubelend.core.members import Member, MembershipStatus
from kubelend.core.models import ClusterId


def registry(standing, role=Role.CLUSTER):
    return MemberIndex([Member(role, "a", standing, make.T0, reason="stolen")])


def test_revoked_cluster_is_refused_with_the_reason():
    with pytest.raises(Revoked, match="cluster a was revoked: stolen"):
        labels.check_not_revoked(registry(MembershipStatus.REVOKED), ClusterId("a"))


@pytest.mark.parametrize(
    "known",
    [
        pytest.param(MemberIndex(), id="never heard of"),
        pytest.param(registry(MembershipStatus.ACCEPTED), id="accepted"),
        pytest.param(registry(MembershipStatus.REVOKED, Role.ADMIN), id="a person of that name"),
    ],
)
def test_others_are_not(known):
    labels.check_not_revoked(known, ClusterId("a"))
    with pytest.raises(Revoked):
        labels.check_not_revoked(registry(MembershipStatus.REVOKED), ClusterId("a"))
