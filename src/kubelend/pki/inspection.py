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


class AuthorityInfo(msgspec.Struct, frozen=True, rename="camel"):
    """An authority that clients trust. Field names are API."""

    subject: str
    pin: str
    not_before: datetime
    not_after: datetime
    signs: bool | None
    """Whether it is the issuing authority; None if only the passphrase could tell."""


class AuthorityDirectoryInfo(msgspec.Struct, frozen=True, rename="camel"):
    """An authority's directory. Field names are API."""

    directory: str
    key_encrypted: bool
    rotating: bool
    """Whether a rotation is in progress, until `kubelend ca rotate --finish`."""

    authorities: list[AuthorityInfo]


def inspect_authority(
    directory: Path, passphrase: Passphrase | None = None
) -> AuthorityDirectoryInfo:
    """Inspect an authority's directory. An unusable authority is an error, as when issuing."""
    encrypted = _is_key_encrypted(directory)
    if encrypted and passphrase is None:
        return _inspect_without_key(directory)
    authority = Authority.load(directory, passphrase)
    authorities = [
        _authority_info(each, each == authority.certificate) for each in authority.trusted
    ]
    return AuthorityDirectoryInfo(str(directory), encrypted, authority.is_rotating, authorities)


def _is_key_encrypted(directory: Path) -> bool:
    path = directory / files.layout_of(directory).key
    return keys.is_encrypted(keyfiles.read_file(path, hint=files.NO_AUTHORITY_HINT))


def _inspect_without_key(directory: Path) -> AuthorityDirectoryInfo:
    trusted, cross = files.load_trusted(directory), files.load_cross(directory)
    rotating = any(chains.have_same_key(one, other) for one in cross for other in trusted)
    # A single authority must be the issuing one.
    signs = True if len(trusted) == 1 else None
    return AuthorityDirectoryInfo(
        str(directory), True, rotating, [_authority_info(each, signs) for each in trusted]
    )


def _authority_info(certificate: x509.Certificate, signs: bool | None) -> AuthorityInfo:
    return AuthorityInfo(
        subject=certificate.subject.rfc4514_string(),
        pin=pins.ca_pin(certificate),
        not_before=certificate.not_valid_before_utc,
        not_after=certificate.not_valid_after_utc,
        signs=signs,
    )
