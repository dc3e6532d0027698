"""Texts that others get to see, on a terminal or in a log: they stay on their line, and steer nothing.

Whoever takes a free text out of a body asks here. The same is published as `patterns.PLAIN`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from kubelend.core.errors import InvalidInput
from kubelend.wire import patterns


def is_plain(text: str) -> bool:
    """Whether there is neither a control character nor a line break in it."""
    # Printable is a little less, and told at once: it is asked for every advertisement.
    return text.isprintable() or _STEERING.search(text) is None


def checked(text: str, where: str) -> str:
    """The text, if it is plain; errors name the field."""
    if is_plain(text):
        return text
    raise InvalidInput(
        f"{where}: {text[:40]!r} has a control character or a line break",
        hint="write plain text in one line",
    )


def check_labels(labels: Mapping[str, str], where: str) -> None:
    """The same for all names and values."""
    for name, value in labels.items():
        checked(value, f"{where}.{checked(name, where)}")


def in_one_line(text: str) -> str:
    """The text with a space for all that is not plain: for what must not be refused because of how it is
    written.
    """
    return text if is_plain(text) else _STEERING.sub(" ", text).strip()


_STEERING: Final = re.compile(f"[{patterns.STEERING}]+")
