"""Contents of certificate and authority directories, for `kubelend certificate show` and `kubelend ca
show`.

No passphrase is needed; without it only the owner of an encrypted key is unknown.
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
    """An authority that clients trust. Field names are API."""

    subject: str
    pin: str
    not_before: datetime
    not_after: datetime
    signs: bool | None
    """Whether it is the issuing authority; None if only the passphrase could tell."""


class Inspection(msgspec.Struct, frozen=True, rename="camel"):
    """An authority's directory. Field names are API."""

    directory: str
    key_encrypted: bool
    rotating: bool
    """Whether a rotation is in progress, until `kubelend ca rotate --finish`."""

    authorities: list[ShownAuthority]


def inspect(directory: Path, passphrase: Passphrase | None = None) -> Inspection:
    """Inspect an authority's directory. An unusable authority is an error, as when issuing."""
    encrypted = _is_key_encrypted(directory)
    if encrypted and passphrase is None:
        return _unopened(directory)
    authority = Authority.load(directory, passphrase)
    authorities = [_shown(each, each == authority.certificate) for each in authority.trusted]
    return Inspection(str(directory), encrypted, authority.is_rotating, authorities)


def _is_key_encrypted(directory: Path) -> bool:
    path = directory / files.layout_of(directory).key
    return keys.is_encrypted(keyfiles.read(path, hint=files.NO_AUTHORITY))


def _unopened(directory: Path) -> Inspection:
    trusted, cross = files.load_trusted(directory), files.load_cross(directory)
    rotating = any(chains.same_key(one, other) for one in cross for other in trusted)
    # A single authority must be the issuing one.
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
