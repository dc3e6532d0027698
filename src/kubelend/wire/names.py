"""Object names derived from IDs, which need not be valid Kubernetes names.

Used by the Kubernetes store and by both sides of a cluster namespace (`wire.cluster_namespaces`).
"""

from __future__ import annotations

import re
from hashlib import sha256
from typing import Final


def object_name(id: str) -> str:
    """Return the ID if it is a valid object name, else a hash of it.

    IDs that start with the hash prefix are hashed too, so that two IDs never map to the same name.
    """
    if (
        len(id) <= _MAX_NAME_LENGTH
        and _DNS_SUBDOMAIN.fullmatch(id)
        and not id.startswith(_HASH_PREFIX)
    ):
        return id
    return _HASH_PREFIX + sha256(id.encode(errors="surrogatepass")).hexdigest()[:40]


_HASH_PREFIX: Final = "hashed-"
_DNS_SUBDOMAIN: Final = re.compile(
    r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*", re.ASCII
)
_MAX_NAME_LENGTH: Final = 240
"""Kubernetes allows 253 characters; the rest is for prefixes and suffixes."""
