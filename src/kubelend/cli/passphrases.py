"""The passphrase of an authority's key, as commands take it: from a file, a variable or a terminal."""

from __future__ import annotations

import getpass
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from kubelend.core.errors import InvalidInput
from kubelend.pki import passphrases
from kubelend.pki.passphrases import Passphrase

File = Annotated[
    Path | None,
    typer.Option(
        "--passphrase-file",
        help=f"File with the passphrase of the authority's key. {passphrases.VARIABLE} can hold it too.",
        metavar="FILE",
        envvar=f"{passphrases.VARIABLE}_FILE",
        show_default=False,
    ),
]
Prompt = Annotated[
    bool, typer.Option("--passphrase-prompt", help="Ask for the passphrase on the terminal.")
]


def known(passphrase_file: File = None, passphrase_prompt: Prompt = False) -> Passphrase | None:
    """The one with which the key is encrypted."""
    if passphrase_prompt:
        return Passphrase(_ask("Passphrase of the authority's key: "))
    return passphrases.find(passphrase_file, os.environ)


def chosen(passphrase_file: File = None, passphrase_prompt: Prompt = False) -> Passphrase | None:
    """The one with which a new key is to be encrypted."""
    if not passphrase_prompt:
        return passphrases.find(passphrase_file, os.environ)
    first = _ask("New passphrase for the authority's key: ")
    if first != _ask("The same again: "):
        raise InvalidInput("the two passphrases differ")
    return Passphrase(first)


def read(file: Path | None) -> Passphrase | None:
    """Of a file that is named for one purpose only; no variable stands in for it."""
    return passphrases.from_file(file) if file is not None else None


def _ask(question: str) -> str:
    # Without a terminal getpass would show what is typed, or wait for nobody.
    if not sys.stdin.isatty():
        raise InvalidInput(
            "there is no terminal to ask for a passphrase on", hint="use --passphrase-file"
        )
    return getpass.getpass(question)
