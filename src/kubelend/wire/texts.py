"""Validation of input: free texts must be plain single lines, and msgspec errors become readable.

Texts from clients end up on terminals and in logs, where a control character could move the cursor or forge
a line. The same rule is published as the pattern `PLAIN`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from kubelend.core.errors import InvalidInput
from kubelend.wire import patterns


def is_plain(text: str) -> bool:
    """Whether the text has neither control characters nor line breaks."""
    # `isprintable` accepts slightly less but is much faster, and this runs for every advertisement.
    return text.isprintable() or _CONTROL_CHARACTERS.search(text) is None


def check_plain(text: str, where: str) -> str:
    """Return the text if it is plain; otherwise raise an error that names the field."""
    if is_plain(text):
        return text
    raise InvalidInput(
        f"{where}: {text[:40]!r} contains a control character or a line break",
        hint="use plain text in a single line",
    )


def check_labels(labels: Mapping[str, str], where: str) -> None:
    """Check all keys and values of a label map."""
    for name, value in labels.items():
        check_plain(value, f"{where}.{check_plain(name, where)}")


def to_single_line(text: str) -> str:
    """Replace everything that is not plain by spaces, for texts that must not be rejected."""
    return text if is_plain(text) else _CONTROL_CHARACTERS.sub(" ", text).strip()


_CONTROL_CHARACTERS: Final = re.compile(f"[{patterns.CONTROL_CHARACTERS}]+")
