"""Base of partially decoded Kubernetes objects."""

from __future__ import annotations

import msgspec


class PartialObject(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Some fields of an object; unknown fields are ignored."""
