"""The troubles of a part with many things to do at once, told as one problem of a few words.

`agent.peering` has one for each pair of clusters that it cannot join, part or use.
"""

from __future__ import annotations

from typing import Final

from kubelend.agent.standing import Standing

MOST_TOLD: Final = 3
"""Troubles that are named, of all that there are."""


class Troubles:
    """What keeps a part from some of its work, and what keeps it from all."""

    def __init__(self, standing: Standing, part: str) -> None:
        self._standing = standing
        self._part = part
        self._known: dict[str, str] = {}
        self._whole = ""

    def begin(self, what: str, problem: str) -> None:
        # The first words stand until it is well: others come at every try, and say no more.
        self._known.setdefault(what, problem)
        self._report()

    def end(self, *what: str) -> None:
        """All is well with these."""
        for each in what:
            self._known.pop(each, None)
        self._report()

    def concern_all(self, problem: str) -> None:
        """What keeps it from everything; nothing if nothing does."""
        self._whole = problem
        self._report()

    def _report(self) -> None:
        told = [f"{what}: {problem}" for what, problem in sorted(self._known.items())]
        more = [f"and {len(told) - MOST_TOLD} more"] if len(told) > MOST_TOLD else []
        self._standing.report(
            self._part,
            "; ".join(filter(None, [self._whole, *told[:MOST_TOLD], *more])),
            is_partial=not self._whole,
        )
