"""Keys for rate limits of unauthenticated clients."""

from __future__ import annotations

import ipaddress
from functools import lru_cache


@lru_cache(maxsize=4096)
def rate_limit_key(remote: str) -> str:
    """Return the IPv4 address, or the /64 network of an IPv6 address, because one client usually has all of
    it.
    """
    try:
        address = ipaddress.ip_address(remote.partition("%")[0])
    except ValueError:
        return remote
    if address.version == 4:
        return remote
    return str(ipaddress.ip_network((int(address), 64), strict=False))
