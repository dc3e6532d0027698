"""Names of new reservations: valid as Kubernetes object names, and never the same twice."""

from __future__ import annotations

import re
import secrets

from kubelend.core.models import ClusterId, ReservationId

_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"
_RANDOM_LENGTH = 13
"""65 random bits: in a billion reservations the chance of one collision is below one in thirty."""

_MAX_NAME = 63 - len("rsv-") - len("-") - _RANDOM_LENGTH
_NOT_IN_A_LABEL = re.compile(r"[^a-z0-9]+")


def new_reservation_id(requester: ClusterId) -> ReservationId:
    """`rsv-<requester>-<random>`, a DNS label whatever the requester is called."""
    bits = secrets.randbits(5 * _RANDOM_LENGTH)
    random = "".join(_ALPHABET[bits >> 5 * place & 31] for place in range(_RANDOM_LENGTH))
    return ReservationId(f"rsv-{_label(requester)}-{random}")


def _label(requester: ClusterId) -> str:
    label = _NOT_IN_A_LABEL.sub("-", requester.lower()).strip("-")[:_MAX_NAME].strip("-")
    return label or "cluster"
