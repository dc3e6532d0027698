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

SLICE_RESOURCE = "resourceslices.authentication.liqo.io"
NODE_RESOURCE = "nodes"
FOREIGN_CLUSTER_RESOURCE = "foreignclusters.core.liqo.io"

LIQO_NAMES = {"gpu": "nvidia.com/gpu", "storage": "ephemeral-storage"}
"""Kubernetes' names of the resources that Kubelend names differently."""


class LiqoCondition(msgspec.Struct, frozen=True):
    """Of a slice or a node."""

    type: str
    status: str
    reason: str = ""
    message: str = ""


class LiqoMetadata(msgspec.Struct, frozen=True, rename="camel"):
    """The fields that are read here."""

    name: str = ""
    deletion_timestamp: str | None = None


class LiqoStatus(msgspec.Struct, frozen=True):
    """Of a slice or a node."""

    conditions: list[LiqoCondition] = []
    resources: dict[str, str] = {}
    """Of a slice: what was granted."""
    allocatable: dict[str, str] = {}
    """Of a node."""


class LiqoObject(msgspec.Struct, frozen=True):
    """A slice, a node, or a list of them."""

    kind: str = ""
    metadata: LiqoMetadata = LiqoMetadata()
    status: LiqoStatus = LiqoStatus()
    items: Sequence[LiqoObject] = ()


def parse_objects(output: bytes) -> Sequence[LiqoObject]:
    """The output of `kubectl get -o json`: nothing, one object or a list."""
    if not output.strip():
        return ()
    try:
        found = msgspec.json.decode(output, type=LiqoObject)
    except msgspec.MsgspecError as problem:
        raise UnexpectedAnswer(f"cannot decode the output of kubectl: {problem}") from None
    return found.items if found.kind.endswith("List") else (found,)


def existing_names(found: Iterable[LiqoObject]) -> set[str]:
    """The names of objects that are not being deleted."""
    return {one.metadata.name for one in found if one.metadata.deletion_timestamp is None}


def liqo_quantities(wanted: Resources) -> dict[str, str]:
    """Quantities by Kubernetes' resource names."""
    return {LIQO_NAMES.get(name, name): text for name, text in wanted.quantities().items()}


def slice_readiness(found: Iterable[LiqoObject], peer: Peer) -> Readiness:
    """Whether all of the reserved resources can be used."""
    known = {one.kind: one for one in found}
    granted, node = known.get("ResourceSlice"), known.get("Node")
    problem = _not_granted(granted, peer) or _not_usable(node, peer)
    if problem:
        return Readiness(is_ready=False, reason=problem)
    what = peer.resources.describe()
    return Readiness(is_ready=True, reason=f"node {peer.reservation} offers {what}")


def _not_granted(found: LiqoObject | None, peer: Peer) -> str:
    if found is None:
        return f"ResourceSlice {peer.reservation} not found yet"
    if found.metadata.deletion_timestamp is not None:
        return f"ResourceSlice {peer.reservation} is being deleted"
    for kind in ("Authentication", "Resources"):
        condition = _find_condition(found, kind)
        if condition is None:
            return (
                f"ResourceSlice {peer.reservation}: {peer.cluster} has not set condition {kind} yet"
            )
        if condition.status != "Accepted":
            return f"ResourceSlice {peer.reservation}: {kind} not accepted: {_condition_text(condition)}"
    return _shortfall_message("granted", found.status.resources, peer)


def _not_usable(node: LiqoObject | None, peer: Peer) -> str:
    if node is None:
        return f"virtual node {peer.reservation} not found yet"
    condition = _find_condition(node, "Ready")
    if condition is None or condition.status != "True":
        why = "it has no condition Ready" if condition is None else _condition_text(condition)
        return f"virtual node {peer.reservation} not ready: {why}"
    return _shortfall_message("offered by the virtual node", node.status.allocatable, peer)


def _shortfall_message(how: str, texts: dict[str, str], peer: Peer) -> str:
    """What is missing of the reserved resources; empty if nothing is."""
    try:
        there = resources.parse_offered(
            {_KUBELEND_NAMES.get(name, name): text for name, text in texts.items()}
        )
    except InvalidInput as problem:
        return f"invalid quantity in what is {how}: {problem.message}"
    missing = peer.resources.shortfall(there)
    return f"{missing.describe()} less is {how} than reserved" if missing else ""


_KUBELEND_NAMES = {liqo: ours for ours, liqo in LIQO_NAMES.items()}


def _find_condition(found: LiqoObject, kind: str) -> LiqoCondition | None:
    # Liqo may list several conditions of one type; the last is the latest.
    return next((one for one in reversed(found.status.conditions) if one.type == kind), None)


def _condition_text(condition: LiqoCondition) -> str:
    return condition.message or condition.reason or condition.status
