"""Reads Liqo's objects: whether the slice of a reservation is granted, and its virtual node ready.

What counts, as of Liqo v1.2.0: the two conditions of the slice and what it grants, then the node
itself. Exit codes of liqoctl and the conditions of a VirtualNode come too early to be used.
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
"""Kubernetes' names of the resources that Kubelend names differently."""


class Condition(msgspec.Struct, frozen=True):
    """Of a slice or a node."""

    type: str
    status: str
    reason: str = ""
    message: str = ""


class Metadata(msgspec.Struct, frozen=True, rename="camel"):
    """The fields that are read here."""

    name: str = ""
    deletion_timestamp: str | None = None


class Status(msgspec.Struct, frozen=True):
    """Of a slice or a node."""

    conditions: list[Condition] = []
    resources: dict[str, str] = {}
    """Of a slice: what was granted."""
    allocatable: dict[str, str] = {}
    """Of a node."""


class Object(msgspec.Struct, frozen=True):
    """A slice, a node, or a list of them."""

    kind: str = ""
    metadata: Metadata = Metadata()
    status: Status = Status()
    items: Sequence[Object] = ()


def read(output: bytes) -> Sequence[Object]:
    """The output of `kubectl get -o json`: nothing, one object or a list."""
    if not output.strip():
        return ()
    try:
        found = msgspec.json.decode(output, type=Object)
    except msgspec.MsgspecError as problem:
        raise UnexpectedAnswer(f"cannot decode the output of kubectl: {problem}") from None
    return found.items if found.kind.endswith("List") else (found,)


def present(found: Iterable[Object]) -> set[str]:
    """The names of objects that are not being deleted."""
    return {one.metadata.name for one in found if one.metadata.deletion_timestamp is None}


def amounts(wanted: Resources) -> dict[str, str]:
    """Quantities by Kubernetes' resource names."""
    return {LIQO_NAMES.get(name, name): text for name, text in wanted.texts().items()}


def readiness(found: Iterable[Object], peer: Peer) -> Readiness:
    """Whether all of the reserved resources can be used."""
    known = {one.kind: one for one in found}
    granted, node = known.get("ResourceSlice"), known.get("Node")
    problem = _not_granted(granted, peer) or _not_usable(node, peer)
    if problem:
        return Readiness(is_ready=False, reason=problem)
    what = peer.resources.describe()
    return Readiness(is_ready=True, reason=f"node {peer.reservation} offers {what}")


def _not_granted(found: Object | None, peer: Peer) -> str:
    if found is None:
        return f"ResourceSlice {peer.reservation} not found yet"
    if found.metadata.deletion_timestamp is not None:
        return f"ResourceSlice {peer.reservation} is being deleted"
    for kind in ("Authentication", "Resources"):
        condition = _condition(found, kind)
        if condition is None:
            return (
                f"ResourceSlice {peer.reservation}: {peer.cluster} has not set condition {kind} yet"
            )
        if condition.status != "Accepted":
            return f"ResourceSlice {peer.reservation}: {kind} not accepted: {_why(condition)}"
    return _less("granted", found.status.resources, peer)


def _not_usable(node: Object | None, peer: Peer) -> str:
    if node is None:
        return f"virtual node {peer.reservation} not found yet"
    condition = _condition(node, "Ready")
    if condition is None or condition.status != "True":
        why = "it has no condition Ready" if condition is None else _why(condition)
        return f"virtual node {peer.reservation} not ready: {why}"
    return _less("offered by the virtual node", node.status.allocatable, peer)


def _less(how: str, texts: dict[str, str], peer: Peer) -> str:
    """What is missing of the reserved resources; empty if nothing is."""
    try:
        there = resources.offered({_OURS.get(name, name): text for name, text in texts.items()})
    except InvalidInput as problem:
        return f"invalid quantity in what is {how}: {problem.message}"
    missing = peer.resources.shortfall(there)
    return f"{missing.describe()} less is {how} than reserved" if missing else ""


_OURS = {liqo: ours for ours, liqo in LIQO_NAMES.items()}


def _condition(found: Object, kind: str) -> Condition | None:
    # Liqo may list several conditions of one type; the last is the latest.
    return next((one for one in reversed(found.status.conditions) if one.type == kind), None)


def _why(condition: Condition) -> str:
    return condition.message or condition.reason or condition.status
