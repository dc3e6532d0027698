"""The machines of a cluster, as far as lending needs to know them."""

from __future__ import annotations

import msgspec

from kubelend.core.resources import NOTHING, Resources


class Node(msgspec.Struct, frozen=True, gc=False):
    """One node. Sources make it of what Kubernetes says; only these fields are kept."""

    name: str
    capacity: Resources = NOTHING
    allocatable: Resources = NOTHING
    labels: dict[str, str] = {}
    is_ready: bool = True
    is_schedulable: bool = True
