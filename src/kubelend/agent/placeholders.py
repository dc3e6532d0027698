"""Plans the placeholders of holds: pods that keep capacity on nodes until offloaded pods get it. Pure.

Holds, pods and the free capacity of nodes go in, actions come out. A hold of which offloaded pods use
nothing has placeholders of its whole size, on as few nodes as possible. Room is handed over to a
offloaded pod in an order in which no other pod can take it (ADR 0027), and taken back when that pod
is deleted. The plan depends only on what is observed, so it continues whatever was interrupted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from fractions import Fraction
from typing import Final, NamedTuple

import msgspec

from kubelend.core.inventory import Hold
from kubelend.core.pod_requests import Pod, PodScheduling
from kubelend.core.resources import NOTHING, Resources

MAX_PIECES: Final = 2
"""Placeholders of a reservation on one node. More are merged, but not each time a pod comes and goes."""

FreeCapacity = dict[str, Resources]
"""Free amounts by node; only nodes on which ordinary pods can be scheduled."""


class HoldView(msgspec.Struct, frozen=True):
    """What is observed of the cluster."""

    holds: Mapping[str, Hold]
    pods: Sequence[Pod]
    """Placeholders and offloaded pods: those with `scheduling`."""
    capacity: Mapping[str, Resources]
    """What no pod takes, by node."""
    avoided: Set[tuple[str, str]] = frozenset()
    """Reservations and nodes where a placeholder was created only just."""
    overdue: Set[str] = frozenset()
    """Gated pods, by ID, that have waited too long for held capacity."""
    handed_over: Set[str] = frozenset()
    """Pods, by ID, that got capacity once. If they did not use it, they cannot."""


class CreatePlaceholder(NamedTuple):
    """Create a placeholder. A gated one waits for a pod that is being deleted on that node."""

    reservation: str
    node: str
    amounts: Resources
    is_gated: bool = False


class DeletePlaceholder(NamedTuple):
    """Delete a placeholder that is no longer needed."""

    pod: Pod


class UngatePlaceholder(NamedTuple):
    """Let the scheduler have a placeholder: the capacity that it waited for is free."""

    pod: Pod


class HandOver(NamedTuple):
    """Give the capacity of placeholders to an offloaded pod, or shrink them if there is none."""

    reservation: str
    node: str
    pod: Pod | None
    placeholders: tuple[Pod, ...]
    remainder: Resources
    """The size of a new placeholder for what the pod does not take."""


class ReleasePod(NamedTuple):
    """Remove the gate of a pod that gets no held capacity; the scheduler decides."""

    pod: Pod
    reservation: str
    """Empty if nothing is held for the pod."""


PlaceholderAction = (
    CreatePlaceholder | DeletePlaceholder | UngatePlaceholder | HandOver | ReleasePod
)


def plan(view: HoldView) -> list[PlaceholderAction]:
    """The actions that are missing, in order. None if nothing has to be done."""
    capacity = _schedulable_capacity(view)
    actions = list(_withdrawals(view))
    waiting = list(_ungate(view, capacity, actions))
    for pod in waiting:  # nobody else gets what they wait for
        _subtract(capacity, _node_of(pod), pod.requests)
    for reservation in sorted(view.holds):
        actions += _HoldPlan(view, reservation, capacity).actions()
    return actions


def _schedulable_capacity(view: HoldView) -> FreeCapacity:
    """The capacity that is left when the pods have their nodes that the scheduler is about to bind."""
    capacity = dict(view.capacity)
    for pod in view.pods:
        if _is_in_transit(pod) and not _is_gated_placeholder(pod):
            _subtract(capacity, _node_of(pod), pod.requests)
    return capacity


def _withdrawals(view: HoldView) -> Iterator[PlaceholderAction]:
    """What is left of holds that have ended."""
    for pod in view.pods:
        if reservation_of(pod, view.holds) in view.holds:
            continue
        if pod.placeholder_for and not _state(pod).is_deleting:
            yield DeletePlaceholder(pod)
        elif not pod.placeholder_for and _state(pod).is_gated:
            yield ReleasePod(pod, "")


def _ungate(
    view: HoldView, capacity: FreeCapacity, actions: list[PlaceholderAction]
) -> Iterator[Pod]:
    """Ungates placeholders whose capacity is free; yields those that still wait."""
    gated = filter(_is_gated_placeholder, view.pods)
    for pod in sorted(gated, key=lambda one: (one.placeholder_for, one.id)):
        node = _node_of(pod)
        if pod.placeholder_for not in view.holds:
            continue
        if node in capacity and pod.requests.fits_in(capacity[node]):
            actions.append(UngatePlaceholder(pod))
            _subtract(capacity, node, pod.requests)
        elif any(_frees_capacity(other, pod, view) for other in view.pods):
            yield pod
        else:
            actions.append(DeletePlaceholder(pod))


def _frees_capacity(other: Pod, waiting: Pod, view: HoldView) -> bool:
    """Whether a pod's capacity is meant for this placeholder: it is deleted, or being handed over."""
    if _node_of(other) != _node_of(waiting) or other.id == waiting.id:
        return False
    if other.placeholder_for:
        return other.placeholder_for == waiting.placeholder_for and bool(other.node)
    is_own = reservation_of(other, view.holds) == waiting.placeholder_for
    return is_own and _state(other).is_deleting


class _HoldPlan:
    """The plan of one hold; takes what it uses from the common capacity."""

    def __init__(self, view: HoldView, reservation: str, capacity: FreeCapacity) -> None:
        self._view = view
        self._reservation = reservation
        self._capacity = capacity
        own = [pod for pod in view.pods if reservation_of(pod, view.holds) == reservation]
        live = [pod for pod in own if not _state(pod).is_deleting]
        self._placeholders = [pod for pod in live if pod.placeholder_for]
        self._offloaded = [pod for pod in live if not pod.placeholder_for]
        self._terminating = [
            pod for pod in own if _state(pod).is_deleting and pod.node and not pod.placeholder_for
        ]
        self._used = sum((one.requests for one in self._offloaded if _node_of(one)), NOTHING)
        self._effective = [pod for pod in self._placeholders if self._counts(pod)]
        """Those that hold something, or will."""
        self._remainders = NOTHING
        self._missing = NOTHING

    def actions(self) -> Iterator[PlaceholderAction]:
        yield from self._hand_overs()
        needed = (self._view.holds[self._reservation].resources - self._used).clamped()
        effective = sum((pod.requests for pod in self._effective), self._remainders)
        self._missing = (needed - effective).clamped()
        yield from self._reclaim()
        yield from self._add()
        if not self._missing:
            yield from (
                DeletePlaceholder(pod) for pod in self._placeholders if not self._counts(pod)
            )
        surplus = (effective - needed).clamped()
        yield from self._shrink(surplus)
        if not surplus and self._is_settled():
            yield from self._merge()

    def _counts(self, pod: Pod) -> bool:
        """A bound placeholder holds as long as its node can run pods."""
        if pod.node:
            return pod.node in self._view.capacity
        return not _state(pod).is_unschedulable

    # -- hand over

    def _hand_overs(self) -> Iterator[PlaceholderAction]:
        for pod in sorted(self._offloaded, key=lambda one: one.id):
            state = _state(pod)
            if pod.node or not (state.is_gated or self._may_be_nominated(pod)):
                continue
            if action := self._hand_over(pod):
                yield action
            elif state.is_gated and (self._is_settled() or pod.id in self._view.overdue):
                yield ReleasePod(pod, self._reservation)

    def _may_be_nominated(self, pod: Pod) -> bool:
        """Without a gate, as on servers that have no policy for it, a pod gets capacity once."""
        return not _state(pod).nominated_node and pod.id not in self._view.handed_over

    def _is_settled(self) -> bool:
        """Whether nothing is under way that could make capacity for a pod."""
        return not self._terminating and all(pod.node for pod in self._effective)

    def _hand_over(self, pod: Pod) -> HandOver | None:
        nominated = _state(pod).nominated_node
        if nominated:
            _subtract(self._capacity, nominated, NOTHING - pod.requests)
        nodes = (
            [nominated] if nominated else sorted({one.node for one in self._effective if one.node})
        )
        choices = [choice for node in nodes if (choice := self._choice(pod, node)) is not None]
        if not choices or not pod.requests:
            return None
        best = min(choices, key=lambda one: (one.remainder.cpu, one.remainder.memory, one.node))
        self._apply(best, pod, is_new=not nominated)
        return best

    def _choice(self, pod: Pod, node: str) -> HandOver | None:
        """How the pod gets capacity on a node; None if it does not fit there."""
        if node not in self._capacity:
            return None
        there = [one for one in self._effective if one.node == node]
        freed, given = self._capacity[node], NOTHING
        if _state(pod).nominated_node and pod.requests.fits_in(freed):
            return HandOver(self._reservation, node, pod, (), NOTHING)
        chosen = _smallest_set(there, pod.requests)
        for one in chosen:
            freed, given = freed + one.requests, given + one.requests
        if not chosen or not pod.requests.fits_in(freed):
            return None
        remainder = (given - pod.requests).clamped()
        return HandOver(self._reservation, node, pod, tuple(chosen), remainder)

    def _apply(self, choice: HandOver, pod: Pod, *, is_new: bool) -> None:
        for one in choice.placeholders:
            self._effective.remove(one)
            self._placeholders.remove(one)
            _subtract(self._capacity, choice.node, NOTHING - one.requests)
        _subtract(self._capacity, choice.node, pod.requests + choice.remainder)
        self._remainders += choice.remainder
        if is_new:
            self._used += pod.requests

    # -- grow and shrink

    def _reclaim(self) -> Iterator[PlaceholderAction]:
        """Placeholders for the capacity of pods that are being deleted."""
        terminating: FreeCapacity = {}
        for pod in self._terminating:
            terminating[pod.node] = terminating.get(pod.node, NOTHING) + pod.requests
        for pod in filter(_is_gated_placeholder, self._effective):
            if _node_of(pod) in terminating:
                _subtract(terminating, _node_of(pod), pod.requests)
        for node in sorted(terminating.keys() & self._capacity.keys()):
            if piece := _elementwise_min(self._missing, terminating[node].clamped()):
                self._missing -= piece
                yield CreatePlaceholder(self._reservation, node, piece, is_gated=True)

    def _add(self) -> Iterator[PlaceholderAction]:
        stuck = {(self._reservation, _node_of(one)) for one in self._placeholders if not one.node}
        avoided = self._view.avoided | stuck
        capacity = {
            node: free
            for node, free in self._capacity.items()
            if (self._reservation, node) not in avoided
        }
        for node, piece in place(self._missing, capacity):
            _subtract(self._capacity, node, piece)
            self._missing -= piece
            yield CreatePlaceholder(self._reservation, node, piece)

    def _shrink(self, surplus: Resources) -> Iterator[PlaceholderAction]:
        """Pending placeholders go first, then small ones; at last one is replaced by a smaller one."""
        for pod in sorted(self._effective, key=lambda one: (bool(one.node), _size(one.requests))):
            if pod.requests and pod.requests.fits_in(surplus):
                surplus -= pod.requests
                self._effective.remove(pod)
                yield DeletePlaceholder(pod)
        for pod in self._effective:
            remainder = (pod.requests - surplus.clamped()).clamped()
            if pod.node and remainder != pod.requests:
                yield HandOver(self._reservation, pod.node, None, (pod,), remainder)
                return

    def _merge(self) -> Iterator[PlaceholderAction]:
        """Replaces the placeholders of a node by one: each takes a slot of the node."""
        for node in sorted({pod.node for pod in self._effective}):
            there = tuple(pod for pod in self._effective if pod.node == node)
            if len(there) > MAX_PIECES:
                total = sum((pod.requests for pod in there), NOTHING)
                yield HandOver(self._reservation, node, None, there, total)


# -- placement


def place(wanted: Resources, capacity: Mapping[str, Resources]) -> list[tuple[str, Resources]]:
    """Divides an amount into pieces that fit on nodes, as few as possible; what fits nowhere is left.

    A piece has CPU, memory and storage in the proportion of what is wanted, so that pods can use it. Only
    if that leaves something over, what is left of each resource is placed wherever it is free.
    """
    left, pieces = dict(capacity), dict[str, Resources]()
    for cut in (_proportional_piece, _elementwise_min):
        while wanted and left:
            node, piece = _best_piece(wanted, left, cut)
            if not piece:
                break
            pieces[node] = pieces.get(node, NOTHING) + piece
            left[node] -= piece
            wanted -= piece
    return sorted(pieces.items())


def _best_piece(
    wanted: Resources, capacity: FreeCapacity, cut: Callable[[Resources, Resources], Resources]
) -> tuple[str, Resources]:
    """The piece with most devices, then the largest; of equal ones that on the node with the least capacity.

    So devices get CPU and memory beside them, and other nodes stay whole.
    """
    pieces = {node: cut(wanted, free.clamped()) for node, free in capacity.items()}

    def preference(node: str) -> tuple[object, ...]:
        shares = {
            name: Fraction(pieces[node].amount(name), amount) for name, amount in wanted.items()
        }
        devices = sum(share for name, share in shares.items() if name not in _STEPS)
        is_whole = pieces[node] == wanted
        return not is_whole, -devices, -sum(shares.values()), _size(capacity[node]), node

    best = min(pieces, key=preference)
    return best, pieces[best]


def _proportional_piece(wanted: Resources, free: Resources) -> Resources:
    shares = [
        Fraction(max(free.amount(name), 0), wanted.amount(name))
        for name in _STEPS
        if wanted.amount(name)
    ]
    share = min([Fraction(1), *shares])
    amounts = {
        name: _share_of(name, amount, share) if name in _STEPS else min(amount, free.amount(name))
        for name, amount in wanted.items()
    }
    return Resources.of(amounts) if share else NOTHING


def _share_of(name: str, amount: int, share: Fraction) -> int:
    """In whole steps, so that people can read it; the last piece has what is left."""
    part = int(amount * share)
    return part - part % _STEPS[name] if share < 1 and part > _STEPS[name] else part


_STEPS: Final = {"cpu": 1, "memory": 2**20, "storage": 2**20}
"""The resources that can be divided; others are devices."""


def _elementwise_min(one: Resources, other: Resources) -> Resources:
    return Resources.of({name: min(n, other.amount(name)) for name, n in one.items()})


def _smallest_set(placeholders: Iterable[Pod], wanted: Resources) -> list[Pod]:
    """The smallest one that is large enough, else large ones until they are enough together, or all."""
    ordered = sorted(placeholders, key=lambda pod: (_size(pod.requests), pod.id))
    for pod in ordered:
        if wanted.fits_in(pod.requests):
            return [pod]
    chosen, total = list[Pod](), NOTHING
    for pod in reversed(ordered):
        if not wanted.fits_in(total):
            chosen.append(pod)
            total += pod.requests
    return chosen


def _size(amounts: Resources) -> tuple[int, int, int]:
    """For order only: devices first, because they are scarce."""
    return amounts.gpu + sum(amounts.extended.values()), amounts.cpu, amounts.memory


# -- pods


def reservation_of(pod: Pod, holds: Mapping[str, Hold]) -> str:
    """The held reservation of a placeholder or an offloaded pod; else empty."""
    if pod.placeholder_for or pod.offloaded_from is None:
        return pod.placeholder_for
    origin, reservation = pod.offloaded_from
    hold = holds.get(reservation)
    return reservation if hold is not None and hold.is_of(origin) else ""


def _state(pod: Pod) -> PodScheduling:
    return pod.scheduling or PodScheduling("", "")


def _node_of(pod: Pod) -> str:
    """Where the pod is, or is about to be."""
    required = _state(pod).required_node if pod.placeholder_for else ""
    return pod.node or _state(pod).nominated_node or required


def _is_in_transit(pod: Pod) -> bool:
    """Whether the scheduler is about to bind the pod to a certain node."""
    state = _state(pod)
    is_lost = state.is_unschedulable and not state.nominated_node
    return not pod.node and not state.is_deleting and bool(_node_of(pod)) and not is_lost


def _is_gated_placeholder(pod: Pod) -> bool:
    state = _state(pod)
    return bool(pod.placeholder_for) and state.is_gated and not state.is_deleting


def _subtract(capacity: FreeCapacity, node: str, amounts: Resources) -> None:
    if node in capacity:
        capacity[node] -= amounts


# -- the condition Held


class HeldState(NamedTuple):
    """How much of a hold is kept by placeholders and offloaded pods together."""

    status: str
    """Unknown while the scheduler has not decided on new placeholders."""
    reason: str
    message: str


HELD: Final = "Held"
PARTIALLY_HELD: Final = "PartiallyHeld"
HOLDING: Final = "Holding"


def held_state(view: HoldView, reservation: str) -> HeldState:
    """A pod that is being deleted holds its capacity until it is gone."""
    reserved = view.holds[reservation].resources
    pods = [pod for pod in view.pods if reservation_of(pod, view.holds) == reservation]
    pieces: FreeCapacity = {}
    used = coming = NOTHING
    for pod in pods:
        if not _holds_capacity(pod, view):
            coming += pod.requests if _is_in_transit(pod) else NOTHING
        elif pod.placeholder_for:
            pieces[_node_of(pod)] = pieces.get(_node_of(pod), NOTHING) + pod.requests
        else:
            used += pod.requests
    held = _elementwise_min(reserved, sum(pieces.values(), used))
    if held == reserved:
        return HeldState("True", HELD, f"{held.describe()} held{_pieces_text(pieces, used)}")
    amount = f"{held.describe()} of {reserved.describe()}"
    message = f"{amount} held{_pieces_text(pieces, used)}"
    if reserved.fits_in(held + coming):
        return HeldState("Unknown", HOLDING, message)
    return HeldState("False", PARTIALLY_HELD, message)


def _holds_capacity(pod: Pod, view: HoldView) -> bool:
    state = _state(pod)
    if not pod.placeholder_for:
        return bool(_node_of(pod))
    is_nominated = bool(state.nominated_node) and not state.is_gated
    return not state.is_deleting and (pod.node in view.capacity or is_nominated)


def _pieces_text(pieces: FreeCapacity, used: Resources) -> str:
    using = f"; the requester's pods use {used.describe()}" if used else ""
    if not pieces:
        return f"{using}; no capacity for further pods"
    largest = max(pieces.values(), key=lambda one: (one.cpu, one.memory))
    where = "1 node" if len(pieces) == 1 else f"{len(pieces)} nodes"
    return (
        f"{using}; capacity for further pods on {where}, for one pod at most {largest.describe()}"
    )
