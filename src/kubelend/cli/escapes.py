"""What others have written, made harmless: no text of theirs moves a cursor or begins a line.

A cluster chooses its region, somebody else a reason, and not every broker or store has refused what ours
refuses today. Tables, sentences, notes and errors pass through here; see also `output`.
"""

from __future__ import annotations

import re

_CONTROL = re.compile(
    "[\x00-\x1f\x7f-\x9f"  # control characters, of which terminals obey the second range as well
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # change the direction of what follows
    "\u2028\u2029"  # end a line
    "\ud800-\udfff]"  # no characters at all, and cannot be printed
)
_CONTROL_BUT_NEWLINE = re.compile(_CONTROL.pattern.replace("\x00-\x1f", "\x00-\x09\x0b-\x1f"))


def sanitize_line(text: str) -> str:
    """One line, whatever is in it: what is not to be seen is written as `\\x1b` or `\\u202e`."""
    return _CONTROL.sub(_escaped_form, text)


def sanitize_lines(text: str) -> str:
    """The same for what was put together from several: its line ends are our own."""
    return _CONTROL_BUT_NEWLINE.sub(_escaped_form, text)


def sanitize_json(text: str) -> str:
    """The same for JSON, where such a character can only be within a string: the value stays as it is."""
    return _CONTROL_BUT_NEWLINE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _escaped_form(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")
