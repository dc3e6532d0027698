"""JSON merge patches (RFC 7386).

Patches are sent instead of whole objects, so that fields unknown to this version and fields of other
writers stay.
"""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]


def merge_patch(before: Json, after: Json) -> Json:
    """Return the merge patch from `before` to `after`; empty if they are equal. Lists are replaced as a
    whole.
    """
    change: Json = dict.fromkeys(name for name in before if name not in after)
    for name, value in after.items():
        known = before.get(name)
        if isinstance(value, dict) and isinstance(known, dict):
            if inner := merge_patch(known, value):
                change[name] = inner
        elif name not in before or known != value:
            change[name] = value
    return change
