"""Relays the handshakes with which the two clusters of a reservation peer.

A handshake is in memory only: agents send theirs again until the peering is established, so nothing is lost
with the process that another attempt would not bring back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Final, NamedTuple

import msgspec

from kubelend.broker.streams import StreamHub
from kubelend.core.errors import Forbidden, WrongPhase
from kubelend.core.models import ClusterId, Reservation, ReservationId
from kubelend.wire import validation
from kubelend.wire.bodies import Handshake

LIFETIME: Final = timedelta(minutes=10)
MAX_HANDSHAKES: Final = 4096
"""Of all clusters; the oldest is dropped. Each is at most some tens of kilobytes."""


class _Sent(NamedTuple):
    handshake: Handshake
    expires_at: datetime
    is_read: bool = False
    """Whether the other side has got it."""


class HandshakeRelay:
    """The latest handshake of each side of a reservation."""

    def __init__(self, streams: StreamHub, clock: Callable[[], datetime]) -> None:
        self._streams = streams
        self._clock = clock
        self._sent: OrderedDict[tuple[ReservationId, ClusterId], _Sent] = OrderedDict()

    def exchange(
        self, reservation: Reservation, sender: ClusterId, handshake: Handshake
    ) -> Handshake | None:
        """Stores the sender's handshake, notifies the other side, and returns the other's.

        Notifies until the other side has got it: it may not have listened the first time.
        """
        _check_plain(handshake)
        receiver = _other_side(reservation, sender)
        now, key = self._clock(), (reservation.id, sender)
        known = self._find(key, now)
        is_read = known is not None and known.handshake == handshake and known.is_read
        self._sent[key] = _Sent(handshake, now + LIFETIME, is_read)
        self._sent.move_to_end(key)
        self._evict(now)
        if not is_read:
            self._streams.notify_handshake(receiver, reservation.id)
        return self._read((reservation.id, receiver), now)

    def _read(self, key: tuple[ReservationId, ClusterId], now: datetime) -> Handshake | None:
        found = self._find(key, now)
        if found is None:
            return None
        self._sent[key] = found._replace(is_read=True)
        return found.handshake

    def _find(self, key: tuple[ReservationId, ClusterId], now: datetime) -> _Sent | None:
        found = self._sent.get(key)
        return found if found is not None and found.expires_at > now else None

    def _evict(self, now: datetime) -> None:
        """The oldest are first, because all have the same lifetime."""
        while self._sent:
            oldest = next(iter(self._sent.values()))
            if oldest.expires_at > now and len(self._sent) <= MAX_HANDSHAKES:
                return
            self._sent.popitem(last=False)


def _check_plain(handshake: Handshake) -> None:
    """The other side shows these texts to its users."""
    for name, text in msgspec.to_builtins(handshake).items():
        validation.check_plain(text, name)


def _other_side(reservation: Reservation, sender: ClusterId) -> ClusterId:
    """`Forbidden` for other clusters, also for a previous provider of the reservation."""
    if not reservation.is_live or reservation.target is None:
        raise WrongPhase(
            f"{reservation.id} is {reservation.phase}",
            hint="only the clusters of a Reserved or Active reservation peer",
        )
    if sender == reservation.requester:
        return reservation.target
    if sender == reservation.target:
        return reservation.requester
    raise Forbidden(f"{reservation.id} is not placed on {sender}")
