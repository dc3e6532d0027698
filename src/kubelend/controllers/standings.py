"""Whether a cluster in whose name an object speaks may still do so. Both controllers ask. Pure.

Whoever may write into the broker's namespace may speak for any cluster, but not for one that was put out.
"""

from __future__ import annotations

from kubelend.core.errors import Revoked
from kubelend.core.members import Standing, member_id
from kubelend.core.models import ClusterId
from kubelend.core.registry import Registry
from kubelend.core.roles import Role


def check(registry: Registry, cluster: ClusterId) -> None:
    """`Revoked` if an administrator has put it out."""
    member = registry.members.get(member_id(Role.CLUSTER, cluster))
    if member is not None and member.standing is Standing.REVOKED:
        raise Revoked(
            f"cluster {cluster} was revoked: {member.reason or 'no reason given'}",
            hint="ask an administrator",
        )
