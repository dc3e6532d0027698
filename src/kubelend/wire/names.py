"""Object names derived from IDs, which need not be valid Kubernetes names.

Used by the Kubernetes store and by both sides of a cluster namespace (`wire.cluster_namespaces`).
"""

from __future__ import annotations

import re
from hashlib import sha256
from typing import Final


def safe(id: str) -> str:
    """The ID itself where it can be a name. One that looks as if it were hashed is hashed too,
    so that no two names ever meet.
    """
    if len(id) <= _LONGEST and _DNS.fullmatch(id) and not id.startswith(_HASHED):
        return id
    return _HASHED + sha256(id.encode(errors="surrogatepass")).hexdigest()[:40]


_HASHED: Final = "hashed-"
_DNS: Final = re.compile(
    r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*", re.ASCII
)
_LONGEST: Final = 240
"""Kubernetes takes 253; the rest is for what is put around it."""
