"""The directories of certificates: what each file holds, and whether the files match.

    a server's or client's: tls.crt, tls.key, ca.crt      (as a Kubernetes TLS secret mounts them)
    the authority's own:    ca.crt, ca.key

The authority and the commands call this; the TLS contexts (`kubelend.transports.tls`) read the same
files with OpenSSL.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import NameOID

from kubelend.core.errors import InvalidSettings
from kubelend.kits import keyfiles
from kubelend.pki import keys
from kubelend.pki.keys import PrivateKey

AUTHORITY_KEY = "ca.key"


class Credentials(msgspec.Struct, frozen=True):
    """A certificate with its key, and the authorities that its holder trusts."""

    certificate: x509.Certificate
    key: PrivateKey
    authorities: tuple[x509.Certificate, ...]


def save_credentials(directory: Path, credentials: Credentials, *, overwrite: bool = False) -> None:
    """Write the three files. Without `overwrite` nothing at all is written if a pair is there."""
    _make_directory(directory)
    if not overwrite:
        _refuse_existing(directory, keyfiles.KEY, keyfiles.CERTIFICATE)
    _save_authorities(directory, credentials.authorities, overwrite=overwrite)
    _save_key(directory / keyfiles.KEY, credentials.key, overwrite=overwrite)
    _save_certificates(
        directory / keyfiles.CERTIFICATE, [credentials.certificate], overwrite=overwrite
    )


def load_credentials(directory: Path) -> Credentials:
    """Read the three files back. A certificate and a key that do not match are an error."""
    hint = "make one with `kubelend ca issue`"
    certificate = load_certificates(directory / keyfiles.CERTIFICATE, hint=hint)[0]
    key = load_key(directory / keyfiles.KEY, hint=hint)
    authorities = load_certificates(directory / keyfiles.AUTHORITIES, hint=hint)
    if not matches(certificate, key):
        raise InvalidSettings(
            f"{directory / keyfiles.CERTIFICATE} and {directory / keyfiles.KEY} do not match",
            hint="put the pair there that was issued together",
        )
    return Credentials(certificate, key, authorities)


def save_authority(
    directory: Path,
    certificates: Sequence[x509.Certificate],
    key: PrivateKey,
    *,
    overwrite: bool = False,
) -> None:
    """Write an authority's own files. Without `overwrite` none is written if one is there."""
    _make_directory(directory)
    if not overwrite:
        _refuse_existing(directory, AUTHORITY_KEY, keyfiles.AUTHORITIES)
    _save_key(directory / AUTHORITY_KEY, key, overwrite=overwrite)
    _save_authorities(directory, certificates, overwrite=overwrite)


def load_authority(directory: Path) -> tuple[tuple[x509.Certificate, ...], PrivateKey]:
    """Read an authority's certificates and key. A key that others can reach is refused."""
    hint = "make an authority with `kubelend ca init`"
    certificates = load_certificates(directory / keyfiles.AUTHORITIES, hint=hint)
    path = directory / AUTHORITY_KEY
    if complaint := keyfiles.exposure(path):
        raise InvalidSettings(complaint, hint=f"chmod 600 {path}, and ask who has read it")
    return certificates, load_key(path, hint=hint)


def load_certificates(path: Path, *, hint: str = "") -> tuple[x509.Certificate, ...]:
    """All certificates of a PEM file, at least one, in their order."""
    text = keyfiles.read(path, hint=hint)
    try:
        certificates = tuple(x509.load_pem_x509_certificates(text))
    except ValueError as error:
        raise InvalidSettings(f"{path} holds no certificate in PEM form", hint=hint) from error
    # The library passes over a certificate that is cut off behind a whole one.
    if text.count(b"-----BEGIN CERTIFICATE-----") != len(certificates):
        raise InvalidSettings(f"{path} is cut off or damaged", hint=hint)
    return certificates


def load_key(path: Path, *, hint: str = "") -> PrivateKey:
    """The private key of a PEM file."""
    text = keyfiles.read(path, hint=hint)
    try:
        return keys.from_pem(text)
    except ValueError as error:
        raise InvalidSettings(f"{path} cannot be used: {error}", hint=hint) from error


def matches(certificate: x509.Certificate, key: PrivateKey) -> bool:
    """Whether the certificate is for this key."""
    return certificate.public_key() == key.public_key()


def common_names(directory: Path) -> list[str]:
    """The common names of the directory's own certificate."""
    certificate = load_certificates(directory / keyfiles.CERTIFICATE)[0]
    found = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return [str(attribute.value) for attribute in found]


def _make_directory(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidSettings(
            f"{directory} cannot be made: {error.strerror}",
            hint="choose a directory that this user may write to",
        ) from error


def _refuse_existing(directory: Path, *names: str) -> None:
    existing = [str(directory / name) for name in names if (directory / name).exists()]
    if existing:
        raise InvalidSettings(
            f"{' and '.join(existing)} would be overwritten",
            hint="choose another directory, or move the old files away",
        )


def _save_key(path: Path, key: PrivateKey, *, overwrite: bool) -> None:
    keyfiles.write(path, keys.to_pem(key), mode=keyfiles.PRIVATE, overwrite=overwrite)


def _save_authorities(
    directory: Path, certificates: Sequence[x509.Certificate], *, overwrite: bool
) -> None:
    # The authority's own directory may be a server's as well, and holds this very file then.
    path = directory / keyfiles.AUTHORITIES
    if path.exists() and keyfiles.read(path) == _to_pem(certificates):
        return
    _save_certificates(path, certificates, overwrite=overwrite)


def _save_certificates(
    path: Path, certificates: Iterable[x509.Certificate], *, overwrite: bool
) -> None:
    keyfiles.write(path, _to_pem(certificates), mode=keyfiles.PUBLIC, overwrite=overwrite)


def _to_pem(certificates: Iterable[x509.Certificate]) -> bytes:
    return b"".join(each.public_bytes(serialization.Encoding.PEM) for each in certificates)
