"""Passphrase of the authority's key, from a file or an environment variable.

Never from a flag's value, because process lists show those.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kubelend.core.errors import InvalidSettings
from kubelend.kits import files

PASSPHRASE_VARIABLE = "KUBELEND_CA_PASSPHRASE"  # noqa: S105 - the name of a variable, not a secret

MAX_PASSPHRASE_LENGTH = 1023
"""Maximum length in bytes that OpenSSL reads."""


class Passphrase:
    """A secret whose repr does not show it."""

    __slots__ = ("_secret",)

    def __init__(self, secret: str | bytes) -> None:
        self._secret = secret.encode() if isinstance(secret, str) else secret
        if not self._secret:
            raise InvalidSettings("passphrase is empty")
        if len(self._secret) > MAX_PASSPHRASE_LENGTH:
            raise InvalidSettings(f"passphrase exceeds {MAX_PASSPHRASE_LENGTH} bytes")
        if b"\n" in self._secret or b"\r" in self._secret:
            raise InvalidSettings("passphrase has more than one line")

    def reveal(self) -> bytes:
        """Return the secret."""
        return self._secret

    def __repr__(self) -> str:
        return "Passphrase(...)"


def passphrase_from_file(path: Path) -> Passphrase:
    """Read a passphrase file of one line, as OpenSSL does. A file that other users can access is rejected."""
    if problem := files.mode_problem(path, content="a passphrase"):
        raise InvalidSettings(
            problem, hint=f"chmod 600 {path}; consider the passphrase compromised"
        )
    text = files.read_file(path, hint="write the passphrase into it")
    try:
        return Passphrase(text.removesuffix(b"\n").removesuffix(b"\r"))
    except InvalidSettings as error:
        raise InvalidSettings(f"{path}: {error.message}") from None


def load_passphrase(file: Path | None, environment: Mapping[str, str]) -> Passphrase | None:
    """Return the passphrase of the file, else of the variable; None if there is neither."""
    if file is not None:
        return passphrase_from_file(file)
    secret = environment.get(PASSPHRASE_VARIABLE, "")
    try:
        # Undecodable bytes are surrogates in `os.environ`; this restores them.
        return Passphrase(secret.encode(errors="surrogateescape")) if secret else None
    except InvalidSettings as error:
        raise InvalidSettings(f"{PASSPHRASE_VARIABLE}: {error.message}") from None
