"""What Liqo's objects say of one reservation: whether its slice is granted, and its virtual node usable.

The signals that count, by Liqo v1.2.0: the slice's two conditions and what it grants, then the node itself.
Exit statuses of liqoctl and the conditions of a VirtualNode are no such signals: both come too early.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from kubelend.agent.ports import Peer, Readiness
from kubelend.core import resources
from kubelend.core.errors import InvalidInput, UnexpectedAnswer
from kubelend.core.resources import Resources

SLICES = "resourceslices.authentication.liqo.io"
NODES = "nodes"
CLUSTERS = "foreignclusters.core.liqo.io"

LIQO_NAMES = {"gpu": "nvidia.com/gpu", "storage": "ephemeral-storage"}
"""What Kubernetes calls the resources for which we have names of our own."""


class Condition(msgspec.Struct, frozen=True):
    """Of a slice or of a node."""

    type: str
    status: str
    reason: str = ""
    message: str = ""


class Metadata(msgspec.Struct, frozen=True, rename="camel"):
    """As far as it matters here."""

    name: str = ""
    deletion_timestamp: str | None = None


class Status(msgspec.Struct, frozen=True):
    """Of a slice or of a node."""

    conditions: list[Condition] = []
    resources: dict[str, str] = {}
    """Of a slice: what was granted."""
    allocatable: dict[str, str] = {}
    """Of a node."""


class Object(msgspec.Struct, frozen=True):
    """A slice, a node, or a list of such."""

    kind: str = ""
    metadata: Metadata = Metadata()
    status: Status = Status()
    items: Sequence[Object] = ()


def read(output: bytes) -> Sequence[Object]:
    """What `kubectl get -o json` found: nothing, one object or a list."""
    if not output.strip():
        return ()
    try:
        found = msgspec.json.decode(output, type=Object)
    except msgspec.MsgspecError as problem:
        raise UnexpectedAnswer(f"what kubectl says cannot be read: {problem}") from None
    return found.items if found.kind.endswith("List") else (found,)


def present(found: Iterable[Object]) -> set[str]:
    """The names of those that are not on their way out."""
    return {one.metadata.name for one in found if one.metadata.deletion_timestamp is None}


def amounts(wanted: Resources) -> dict[str, str]:
    """Quantities by Kubernetes' names."""
    return {LIQO_NAMES.get(name, name): text for name, text in wanted.texts().items()}


def readiness(found: Iterable[Object], peer: Peer) -> Readiness:
    """Whether all of the reservation can be used."""
    known = {one.kind: one for one in found}
    granted, node = known.get("ResourceSlice"), known.get("Node")
    problem = _not_granted(granted, peer) or _not_usable(node, peer)
    if problem:
        return Readiness(is_ready=False, reason=problem)
    what = peer.resources.describe()
    return Readiness(is_ready=True, reason=f"node {peer.reservation} offers {what}")


def _not_granted(found: Object | None, peer: Peer) -> str:
    if found is None:
        return f"there is no resource slice {peer.reservation} yet"
    if found.metadata.deletion_timestamp is not None:
        return f"the resource slice {peer.reservation} is on its way out"
    for kind in ("Authentication", "Resources"):
        condition = _condition(found, kind)
        if condition is None:
            return f"{peer.cluster} has not answered for the slice's {kind.lower()} yet"
        if condition.status != "Accepted":
            return f"{peer.cluster} does not accept the slice's {kind.lower()}: {_why(condition)}"
    return _less("granted", found.status.resources, peer)


def _not_usable(node: Object | None, peer: Peer) -> str:
    if node is None:
        return f"there is no virtual node {peer.reservation} yet"
    condition = _condition(node, "Ready")
    if condition is None or condition.status != "True":
        why = "it says nothing" if condition is None else _why(condition)
        return f"the virtual node {peer.reservation} is not ready: {why}"
    return _less("offered by the virtual node", node.status.allocatable, peer)


def _less(how: str, texts: dict[str, str], peer: Peer) -> str:
    """What is missing of what was reserved; empty if nothing is."""
    try:
        there = resources.offered({_OURS.get(name, name): text for name, text in texts.items()})
    except InvalidInput as problem:
        return f"what is {how} cannot be read: {problem.message}"
    missing = peer.resources.shortfall(there)
    return f"{missing.describe()} less is {how} than reserved" if missing else ""


_OURS = {liqo: ours for ours, liqo in LIQO_NAMES.items()}


def _condition(found: Object, kind: str) -> Condition | None:
    # A list of Liqo's may have several of one type; the last is the newest.
    return next((one for one in reversed(found.status.conditions) if one.type == kind), None)


def _why(condition: Condition) -> str:
    return condition.message or condition.reason or condition.status
