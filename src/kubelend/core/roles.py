"""What a caller is. The values are API: certificates, tokens, tables and the journal show them."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    """As what somebody calls, joins and is written down."""

    CLUSTER = "cluster"  # lends and borrows in its own name
    VIEWER = "viewer"  # a person who reads everything
    ADMIN = "admin"  # a person who changes everything
    PROXY = "proxy"  # ends TLS for others and passes their certificates on; may do nothing itself
