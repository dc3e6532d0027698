"""The work of a cluster, as far as lending needs to know it."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from kubelend.core.resources import NOTHING, Resources


class Guest(NamedTuple):
    """Whose pod it really is: one that another cluster runs here."""

    origin: str
    """The consumer's cluster ID: `offloading.liqo.io/origin`."""
    virtual_node: str
    """Its virtual node, which is named after its resource slice: `offloading.liqo.io/nodename`."""


class Pod(msgspec.Struct, frozen=True, gc=False):
    """One pod. Sources make it of what Kubernetes says; only these fields are kept."""

    id: str
    """Its UID: a pod that is made anew under its old name is another one."""
    node: str = ""
    """Empty while it is not scheduled."""
    requests: Resources = NOTHING
    """By the scheduler's rules, see `core.requests`."""
    is_finished: bool = False
    guest: Guest | None = None
