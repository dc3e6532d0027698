"""Pods, projected to the fields needed for lending."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from kubelend.core.resources import NOTHING, Resources


class OffloadedFrom(NamedTuple):
    """The origin of a pod that another cluster offloaded here."""

    origin: str
    """The consumer's cluster ID: `offloading.liqo.io/origin`."""
    virtual_node: str
    """The consumer's virtual node, named after its ResourceSlice: `offloading.liqo.io/nodename`."""


class Pod(msgspec.Struct, frozen=True, gc=False):
    """The projection of a Pod."""

    id: str
    """The UID: a recreated pod with the same name is another pod."""
    node: str = ""
    """Empty until it is scheduled."""
    requests: Resources = NOTHING
    """Effective requests by the scheduler's rules."""
    is_finished: bool = False
    offloaded_from: OffloadedFrom | None = None
