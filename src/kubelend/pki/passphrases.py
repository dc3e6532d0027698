"""The passphrase of the authority's key: where it comes from, and that it goes nowhere else.

The commands and the broker ask here. It is never a flag's value, for process lists show those.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kubelend.core.errors import InvalidSettings
from kubelend.kits import keyfiles

VARIABLE = "KUBELEND_CA_PASSPHRASE"

LONGEST = 1023
"""Bytes: what OpenSSL can read, and so what every other tool can."""


class Passphrase:
    """A secret that prints as dots, wherever it is printed."""

    __slots__ = ("_secret",)

    def __init__(self, secret: str | bytes) -> None:
        self._secret = secret.encode() if isinstance(secret, str) else secret
        if not self._secret:
            raise InvalidSettings("the passphrase is empty")
        if len(self._secret) > LONGEST:
            raise InvalidSettings(f"the passphrase has more than {LONGEST} bytes")
        if b"\n" in self._secret or b"\r" in self._secret:
            raise InvalidSettings("the passphrase has more than one line")

    def reveal(self) -> bytes:
        """The secret itself, for whoever encrypts or decrypts."""
        return self._secret

    def __repr__(self) -> str:
        return "Passphrase(...)"


def from_file(path: Path) -> Passphrase:
    """The one line of a file, as OpenSSL reads it too. A file that others can read is refused."""
    if complaint := keyfiles.exposure(path, holds="a passphrase"):
        raise InvalidSettings(complaint, hint=f"chmod 600 {path}, and ask who has read it")
    text = keyfiles.read(path, hint="write the passphrase into it")
    try:
        return Passphrase(text.removesuffix(b"\n").removesuffix(b"\r"))
    except InvalidSettings as error:
        raise InvalidSettings(f"{path}: {error.message}") from None


def find(file: Path | None, environment: Mapping[str, str]) -> Passphrase | None:
    """What the file holds, or else the variable; None if there is neither."""
    if file is not None:
        return from_file(file)
    secret = environment.get(VARIABLE, "")
    try:
        # Undecodable bytes come as surrogates, and go back to what they were.
        return Passphrase(secret.encode(errors="surrogateescape")) if secret else None
    except InvalidSettings as error:
        raise InvalidSettings(f"{VARIABLE}: {error.message}") from None
