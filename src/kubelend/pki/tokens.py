"""Tokens: what a newcomer shows once to be let in. `kl1.<id>.<secret>`, easy to paste.

The id is public: it is listed, logged and deleted by. Of the secret only the SHA-256 is kept. That
it has 160 random bits is why a plain hash is enough: there is nothing to guess it from.
"""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
from typing import NamedTuple

from kubelend.core.errors import InvalidInput

VERSION = "kl1"

_ID_LENGTH = 10
_SECRET_LENGTH = 32
_TEXT = re.compile(rf"{VERSION}\.([a-z2-7]{{{_ID_LENGTH}}})\.([a-z2-7]{{{_SECRET_LENGTH}}})")
_LONGEST = 200


class NewToken(NamedTuple):
    """A token just made. Its text is shown once, and then nobody knows it but its holder."""

    text: str
    id: str
    digest: str

    def __repr__(self) -> str:
        return f"NewToken({VERSION}.{self.id}....)"


class Parts(NamedTuple):
    """What a token's text says."""

    id: str
    secret: str

    def __repr__(self) -> str:
        return f"Parts({self.id}, ...)"


def new() -> NewToken:
    """A token that nobody can guess."""
    name, secret = _random(_ID_LENGTH), _random(_SECRET_LENGTH)
    return NewToken(f"{VERSION}.{name}.{secret}", name, digest(secret))


def parse(text: str) -> Parts:
    """Its id and its secret. What is wrong is said without repeating any of it."""
    text = text.strip() if len(text) <= _LONGEST else ""
    match = _TEXT.fullmatch(text)
    if match is None:
        raise InvalidInput(
            f"this is no token: it would read {VERSION}.ID.SECRET,"
            f" with {_ID_LENGTH} and {_SECRET_LENGTH} letters or digits",
            hint="copy the whole of what `kubelend create token` printed",
        )
    return Parts(match[1], match[2])


def digest(secret: str) -> str:
    """What is kept of a secret, in hex."""
    return hashlib.sha256(secret.encode()).hexdigest()


def _random(length: int) -> str:
    # Base32 makes 8 letters of 5 bytes; lower case reads and pastes better.
    text = base64.b32encode(secrets.token_bytes(-(-length * 5 // 8)))
    return text.decode().lower()[:length]
