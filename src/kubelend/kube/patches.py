"""The smallest change that makes one JSON object of another, as a merge patch (RFC 7386).

The agent's `sources.kube_objects` and the broker's store send these instead of whole objects: fields that
this version does not know, and what others have written beside ours, are left alone by them.
"""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]


def difference(before: Json, after: Json) -> Json:
    """Empty if they are equal. Lists are replaced as a whole, and what is null is taken away."""
    change: Json = dict.fromkeys(name for name in before if name not in after)
    for name, value in after.items():
        known = before.get(name)
        if isinstance(value, dict) and isinstance(known, dict):
            if inner := difference(known, value):
                change[name] = inner
        elif name not in before or known != value:
            change[name] = value
    return change
