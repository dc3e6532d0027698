"""`kubelend completion`: the script that lets a shell complete commands and flags."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

VARIABLE = "_KUBELEND_COMPLETE"
"""Set by the script when the shell asks for completions; the same for both names of the command."""


class Shell(StrEnum):
    """The shells that are known."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(shell: Annotated[Shell, typer.Argument(show_default=False)]) -> None:
    """Print the completion script of a shell.

    For example: source <(kubelend completion bash)
    """
    from typer import completion as scripts

    print(
        scripts.get_completion_script(  # type: ignore[attr-defined]  # not in its __all__
            prog_name="kubelend", complete_var=VARIABLE, shell=shell.value
        )
    )
