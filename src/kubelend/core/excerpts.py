"""The common shape of what is read of Kubernetes' own objects; `nodes` and `requests` say of which."""

from __future__ import annotations

import msgspec


class Excerpt(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Some fields of an object, or of a part of one; the others are passed over."""
