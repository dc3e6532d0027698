"""Pages that show what `kubectl` prints: taken apart, and held against what it prints now.

A block that begins with `$ kubectl` is a conversation: commands, each with what it printed. A block of YAML
is applied where it stands. What differs each time (ages, times, UIDs, versions) is not compared, and of a
line that ends with dots no more than what is before them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PROMPT = "$ "
_DOTS = " ..."
_CHANGING = (
    (re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z"), "TIME"),
    (re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"), "UUID"),
    (re.compile(r"Checksum: +[0-9a-f]{8}\b"), "Checksum: CRC"),
    # Amounts of CPU look like minutes, so an age has to have seconds.
    (re.compile(r"(?<!\S)(\d+m)?\d+s(?!\S)"), "AGE"),
    (re.compile(r"(Version|Revision|Generation): +\d+"), r"\1: COUNT"),
    (re.compile(r"(?<=\S) +"), " "),
    (re.compile(r"-{4,}"), "----"),
)


class Step(NamedTuple):
    """One thing that a reader does."""

    command: str
    printed: str = ""
    document: str = ""
    """What is handed to it."""

    @property
    def is_read_only(self) -> bool:
        """Whether it changes nothing, and so can be repeated."""
        return self.command.split()[1] in {"get", "describe", "explain", "api-resources"}


def steps(page: str) -> Iterator[Step]:
    """In the order of the page."""
    for language, content in _BLOCK.findall(page):
        if language == "yaml":
            yield Step("kubectl apply -f -", document=content)
        elif content.startswith(f"{_PROMPT}kubectl"):
            for part in re.split(r"^\$ ", content, flags=re.MULTILINE)[1:]:
                command, _, printed = part.partition("\n")
                yield Step(command, printed.strip())


def same(shown: str, printed: str) -> bool:
    """Whether a page that shows the one is right where the other is printed."""
    lines, others = _masked(shown), _masked(printed)
    return len(lines) == len(others) and all(map(_fits, lines, others))


def _fits(shown: str, printed: str) -> bool:
    if shown.endswith(_DOTS):
        return printed.startswith(shown.removesuffix(_DOTS))
    return shown == printed


def _masked(text: str) -> list[str]:
    for pattern, name in _CHANGING:
        text = pattern.sub(name, text)
    return [line.rstrip() for line in text.rstrip().splitlines()]
