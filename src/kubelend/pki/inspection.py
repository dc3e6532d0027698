"""What an authority's directory holds, told to a person or a program by `kubelend ca show`.

It needs no passphrase: then all is told but which authority an encrypted key belongs to.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import msgspec
from cryptography import x509

from kubelend.kits import keyfiles
from kubelend.pki import chains, files, keys, pins
from kubelend.pki.authority import Authority
from kubelend.pki.passphrases import Passphrase


class ShownAuthority(msgspec.Struct, frozen=True, rename="camel"):
    """One of those that holders trust. The keys are API."""

    subject: str
    pin: str
    not_before: datetime
    not_after: datetime
    signs: bool | None
    """Whether it is the one that issues; None when only the passphrase could tell."""


class Inspection(msgspec.Struct, frozen=True, rename="camel"):
    """A directory. The keys are API."""

    directory: str
    key_encrypted: bool
    rotating: bool
    """Whether a predecessor is still trusted, until `kubelend ca rotate --finish`."""

    authorities: list[ShownAuthority]


def inspect(directory: Path, passphrase: Passphrase | None = None) -> Inspection:
    """Read a directory; what cannot be used is an error, as it is when a certificate is issued."""
    encrypted = _is_key_encrypted(directory)
    if encrypted and passphrase is None:
        return _unopened(directory)
    authority = Authority.load(directory, passphrase)
    shown = [_shown(each, each == authority.certificate) for each in authority.trusted]
    return Inspection(str(directory), encrypted, authority.is_rotating, shown)


def _is_key_encrypted(directory: Path) -> bool:
    path = directory / files.layout_of(directory).key
    return keys.is_encrypted(keyfiles.read(path, hint=files.NO_AUTHORITY))


def _unopened(directory: Path) -> Inspection:
    trusted, cross = files.load_trusted(directory), files.load_cross(directory)
    rotating = any(chains.same_key(one, other) for one in cross for other in trusted)
    # Where there is no choice, no passphrase is needed to make it.
    signs = True if len(trusted) == 1 else None
    return Inspection(str(directory), True, rotating, [_shown(each, signs) for each in trusted])


def _shown(certificate: x509.Certificate, signs: bool | None) -> ShownAuthority:
    return ShownAuthority(
        subject=certificate.subject.rfc4514_string(),
        pin=pins.pin(certificate),
        not_before=certificate.not_valid_before_utc,
        not_after=certificate.not_valid_after_utc,
        signs=signs,
    )
