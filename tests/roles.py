"""Which role may call which route: written out by hand, so that the routes can be held against it.

The words are those of docs/routes.md. A new route needs its row here before any walk over all of them passes.
"""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """A word for each role."""

    cluster: str
    viewer: str
    admin: str


TABLE = {
    #                          cluster      viewer  admin
    "publish":             Row("yes",       "no",   "no"),
    "get_advertisement":   Row("its own",   "yes",  "yes"),
    "reserve":             Row("yes",       "no",   "no"),
    "list_reservations":   Row("yes",       "yes",  "yes"),
    "get_reservation":     Row("its own",   "yes",  "yes"),
    "grant":               Row("its own",   "no",   "no"),
    "release":             Row("requester", "no",   "yes"),
    "activate":            Row("requester", "no",   "yes"),
    "renew":               Row("requester", "no",   "yes"),
    "explain_reservation": Row("its own",   "yes",  "yes"),
    "explain":             Row("yes",       "no",   "no"),
    "instructions":        Row("yes",       "no",   "no"),
    "stream":              Row("yes",       "no",   "no"),
    "acknowledge":         Row("provider",  "no",   "no"),
    "refuse":              Row("provider",  "no",   "no"),
    "exchange_handshake":  Row("its own",   "no",   "no"),
    "list_clusters":       Row("no",        "yes",  "yes"),
    "get_cluster":         Row("its own",   "yes",  "yes"),
    "cordon":              Row("no",        "no",   "yes"),
    "uncordon":            Row("no",        "no",   "yes"),
    "drain":               Row("no",        "no",   "yes"),
    "remove_cluster":      Row("no",        "no",   "yes"),
    "list_policies":       Row("no",        "yes",  "yes"),
    "get_policy":          Row("its own",   "yes",  "yes"),
    "set_policy":          Row("no",        "no",   "yes"),
    "clear_policy":        Row("no",        "no",   "yes"),
    "list_quotas":         Row("no",        "yes",  "yes"),
    "get_quota":           Row("its own",   "yes",  "yes"),
    "set_quota":           Row("no",        "no",   "yes"),
    "clear_quota":         Row("no",        "no",   "yes"),
    "create_token":        Row("no",        "no",   "yes"),
    "list_tokens":         Row("no",        "no",   "yes"),
    "delete_token":        Row("no",        "no",   "yes"),
    "list_members":        Row("no",        "yes",  "yes"),
    "approve_member":       Row("no",        "no",   "yes"),
    "deny_member":       Row("no",        "no",   "yes"),
    "revoke_member":       Row("no",        "no",   "yes"),
    "remove_member":       Row("no",        "no",   "yes"),
    "renew_certificate":   Row("yes",       "yes",  "yes"),
    "audit_log":           Row("no",        "yes",  "yes"),
    "version":             Row("yes",       "yes",  "yes"),
    "grant_keys":          Row("yes",       "yes",  "yes"),
    "openapi":             Row("yes",       "yes",  "yes"),
    "healthz":             Row("yes",       "yes",  "yes"),
    "readyz":              Row("yes",       "yes",  "yes"),
}  # fmt: skip


def row_of(route: str) -> Row:
    assert route in TABLE, f"{route} is new: say in tests/roles.py who may call it"
    return TABLE[route]
