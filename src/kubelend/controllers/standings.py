"""Checks that the cluster an object names is not revoked. Pure.

Who may write into the broker's namespace may write for any cluster, except a revoked one.
"""

from __future__ import annotations

from kubelend.core.errors import Revoked
from kubelend.core.members import MembershipStatus, member_id
from kubelend.core.models import ClusterId
from kubelend.core.registry import MemberIndex
from kubelend.core.roles import Role


def check_not_revoked(members: MemberIndex, cluster: ClusterId) -> None:
    """`Revoked` if an administrator has revoked the cluster."""
    member = members.members.get(member_id(Role.CLUSTER, cluster))
    if member is not None and member.standing is MembershipStatus.REVOKED:
        raise Revoked(
            f"cluster {cluster} was revoked: {member.reason or 'no reason given'}",
            hint="ask an administrator",
        )
