"""Names of new reservations: valid as Kubernetes object names, and unique."""

from __future__ import annotations

import re
from functools import lru_cache
from random import Random

from kubelend.core.models import ClusterId, ReservationId

_ID_RANDOM_BITS = 64
"""The probability of any collision in a billion reservations is below 1/30."""

_MAX_REQUESTER_LENGTH = 63 - len("rsv-") - len("-") - _ID_RANDOM_BITS // 4
_INVALID_IN_LABEL = re.compile(r"[^a-z0-9]+")

_random = Random()  # noqa: S311 - names are not secret


def new_reservation_id(requester: ClusterId) -> ReservationId:
    """Returns `rsv-<requester>-<random>`, which is a DNS label for any requester name."""
    return ReservationId(f"rsv-{_dns_label(requester)}-{_random.getrandbits(_ID_RANDOM_BITS):016x}")


@lru_cache(maxsize=4096)
def _dns_label(requester: ClusterId) -> str:
    label = (
        _INVALID_IN_LABEL.sub("-", requester.lower()).strip("-")[:_MAX_REQUESTER_LENGTH].strip("-")
    )
    return label or "cluster"
