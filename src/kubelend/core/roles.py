"""Roles of callers. The values are API: certificates, tokens, tables and the audit log contain them."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    """Role of a caller or member."""

    CLUSTER = "cluster"  # lends and borrows under its own name
    VIEWER = "viewer"  # a user with read access to everything
    ADMIN = "admin"  # a user with write access to everything
    PROXY = "proxy"  # terminates TLS and forwards client certificates; has no access itself
