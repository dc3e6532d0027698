"""What others have written, made harmless: no text of theirs moves a cursor or begins a line.

A cluster chooses its region, somebody else a reason, and not every broker or store has refused what ours
refuses today. Tables, sentences, notes and errors pass through here; see also `output`.
"""

from __future__ import annotations

import re

_ACTIVE = re.compile(
    "[\x00-\x1f\x7f-\x9f"  # control characters, of which terminals obey the second range as well
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # change the direction of what follows
    "\u2028\u2029"  # end a line
    "\ud800-\udfff]"  # no characters at all, and cannot be printed
)
_ACTIVE_BESIDE_LINES = re.compile(_ACTIVE.pattern.replace("\x00-\x1f", "\x00-\x09\x0b-\x1f"))


def line(text: str) -> str:
    """One line, whatever is in it: what is not to be seen is written as `\\x1b` or `\\u202e`."""
    return _ACTIVE.sub(_written_out, text)


def lines(text: str) -> str:
    """The same for what was put together from several: its line ends are our own."""
    return _ACTIVE_BESIDE_LINES.sub(_written_out, text)


def quoted(text: str) -> str:
    """The same for JSON, where such a character can only be within a string: the value stays as it is."""
    return _ACTIVE_BESIDE_LINES.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _written_out(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")
