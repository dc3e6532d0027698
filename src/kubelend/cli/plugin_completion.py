"""`kubectl_complete-lend`: kubectl runs it to complete `kubectl lend ...`, and reads its lines as cobra does.

Called with the words of the command line, the last being the one to complete, maybe empty. What to offer is
asked for as the completion script of a shell asks, so the two never differ.
"""

from __future__ import annotations

import io
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from typing import Final

from kubelend.cli import completion, places
from kubelend.cli import main as command

NO_FILES: Final = ":4"
"""Cobra's word for: these are all."""
FILES: Final = ":0"
"""Nothing is known here, so it may be a file."""


def main() -> None:
    print(answer(sys.argv[1:]))


def answer(words: Sequence[str]) -> str:
    """The candidates, one to a line, help behind a tab; then what the shell is to do with them."""
    candidates = _candidates(words)
    return "\n".join([*candidates, NO_FILES if candidates else FILES])


def _candidates(words: Sequence[str]) -> list[str]:
    *before, incomplete = words or [""]
    line = (
        shlex.join(["kubelend", *places.gathered(before)])
        + " "
        + (incomplete and shlex.quote(incomplete))
    )
    os.environ |= {
        completion.VARIABLE: "complete_fish",
        "_TYPER_COMPLETE_ARGS": line,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    with redirect_stdout(io.StringIO()) as said, suppress(SystemExit):  # it ends where a shell asks
        command.run([])
    # Where a file is wanted, one without a name is offered.
    return [line for line in said.getvalue().splitlines() if line]
