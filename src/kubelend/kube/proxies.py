"""Proxy settings from the environment, interpreted as Go does.

Python's standard library does not support networks in NO_PROXY, which clusters use to exclude their own
services.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from urllib.parse import urlsplit


def proxy_for(url: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return the proxy URL for a server; empty if there is none."""
    parts = urlsplit(url)
    proxy = _variable_in_any_case(environment, f"{parts.scheme}_proxy")
    if not proxy or _is_excluded(
        parts.hostname or "", _variable_in_any_case(environment, "no_proxy")
    ):
        return ""
    return proxy if "://" in proxy else f"http://{proxy}"


def _variable_in_any_case(environment: Mapping[str, str], name: str) -> str:
    return environment.get(name.upper()) or environment.get(name) or ""


def _is_excluded(host: str, excepted: str) -> bool:
    if host == "localhost" or _is_loopback(host):
        return True
    return any(
        _no_proxy_matches(one.strip().lower(), host) for one in excepted.split(",") if one.strip()
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _no_proxy_matches(rule: str, host: str) -> bool:
    if rule == "*":
        return True
    if "/" in rule:
        try:
            return ipaddress.ip_address(host) in ipaddress.ip_network(rule, strict=False)
        except ValueError:
            return False
    name = rule.removeprefix("*").removeprefix(".")
    return host.endswith(f".{name}") or (host == name and not rule.startswith("."))
