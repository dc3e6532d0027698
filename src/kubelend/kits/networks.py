"""Who counts as one neighbour: limits of strangers are by network, for addresses are cheap."""

from __future__ import annotations

import ipaddress
from functools import lru_cache


@lru_cache(maxsize=4096)
def network(remote: str) -> str:
    """An address, or the 64 bits of IPv6 within which anybody can have them all."""
    try:
        address = ipaddress.ip_address(remote.partition("%")[0])
    except ValueError:
        return remote
    if address.version == 4:
        return remote
    return str(ipaddress.ip_network((int(address), 64), strict=False))
