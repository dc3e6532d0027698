"""How the parts of an agent fare: what keeps each from its work, told once and not at every try.

`/readyz` shows the problems, the metrics count them, and the log has one line when one begins and one
when it is over.
"""

from __future__ import annotations

import structlog

log = structlog.get_logger("kubelend.agent")


class Standing:
    """The problems of now, by the part that has them."""

    def __init__(self) -> None:
        self._problems: dict[str, str] = {}
        self._starting: set[str] = set()
        self._partial: set[str] = set()

    def expect(self, part: str) -> None:
        """Not ready before this part has reported for the first time."""
        self._starting.add(part)

    def report(self, part: str, problem: str = "", *, is_partial: bool = False) -> None:
        """What keeps a part from its work now; nothing if it works. A line of log for each change.

        What is partial keeps it from some of its work, and the agent is ready all the same.
        """
        self._starting.discard(part)
        (self._partial.add if is_partial else self._partial.discard)(part)
        if self._problems.get(part, "") == problem:
            return
        if problem:
            self._problems[part] = problem
            log.warning("trouble", part=part, problem=problem)
        else:
            del self._problems[part]
            log.info("well again", part=part)

    @property
    def problems(self) -> dict[str, str]:
        return dict(self._problems)

    @property
    def unready(self) -> str:
        """Why the agent is not doing its work; empty if it is."""
        starting = [f"{part}: has not begun yet" for part in sorted(self._starting)]
        troubled = [
            f"{part}: {problem}"
            for part, problem in sorted(self._problems.items())
            if part not in self._partial
        ]
        return "; ".join(starting + troubled)
