"""`kubelend completion`: the script that lets a shell complete commands and flags."""

from __future__ import annotations

import os
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


def prepare() -> None:
    """Make the shells known to the parser, if one of them is asking."""
    if VARIABLE in os.environ:
        from typer import completion as scripts

        scripts.completion_init()  # type: ignore[attr-defined]  # imported there, not listed


def completion(shell: Annotated[Shell, typer.Argument(show_default=False)]) -> None:
    """Print the completion script of a shell.

    For example: source <(kubelend completion bash)
    """
    from typer import completion as scripts

    print(
        scripts.get_completion_script(  # type: ignore[attr-defined]  # as above
            prog_name="kubelend", complete_var=VARIABLE, shell=shell.value
        )
    )
