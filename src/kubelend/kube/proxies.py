"""Which proxy the environment names for a server, read as Go programs read it. `kube.access` asks.

Python's own reading knows no networks in NO_PROXY, and it is by one of them that clusters keep their own
services from the proxy.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from urllib.parse import urlsplit


def for_server(url: str, environment: Mapping[str, str] = os.environ) -> str:
    """The proxy's URL, or nothing if there is to be none."""
    parts = urlsplit(url)
    proxy = _either(environment, f"{parts.scheme}_proxy")
    if not proxy or _is_excepted(parts.hostname or "", _either(environment, "no_proxy")):
        return ""
    return proxy if "://" in proxy else f"http://{proxy}"


def _either(environment: Mapping[str, str], name: str) -> str:
    return environment.get(name.upper()) or environment.get(name) or ""


def _is_excepted(host: str, excepted: str) -> bool:
    if host == "localhost" or _is_loopback(host):
        return True
    return any(_covers(one.strip().lower(), host) for one in excepted.split(",") if one.strip())


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _covers(rule: str, host: str) -> bool:
    if rule == "*":
        return True
    if "/" in rule:
        try:
            return ipaddress.ip_address(host) in ipaddress.ip_network(rule, strict=False)
        except ValueError:
            return False
    name = rule.removeprefix("*").removeprefix(".")
    return host.endswith(f".{name}") or (host == name and not rule.startswith("."))
