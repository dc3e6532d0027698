"""Names of new reservations: valid as Kubernetes object names, and unique."""

from __future__ import annotations

import re
from functools import lru_cache
from random import Random

from kubelend.core.models import ClusterId, ReservationId

_RANDOM_BITS = 64
"""The probability of any collision in a billion reservations is below 1/30."""

_MAX_NAME = 63 - len("rsv-") - len("-") - _RANDOM_BITS // 4
_NOT_IN_A_LABEL = re.compile(r"[^a-z0-9]+")

_random = Random()  # noqa: S311 - names are not secret


def new_reservation_id(requester: ClusterId) -> ReservationId:
    """Returns `rsv-<requester>-<random>`, which is a DNS label for any requester name."""
    return ReservationId(f"rsv-{_label(requester)}-{_random.getrandbits(_RANDOM_BITS):016x}")


@lru_cache(maxsize=4096)
def _label(requester: ClusterId) -> str:
    label = _NOT_IN_A_LABEL.sub("-", requester.lower()).strip("-")[:_MAX_NAME].strip("-")
    return label or "cluster"
