"""Certificate directories: file names, loading and saving.

    server or client:       tls.crt, tls.key, ca.crt      (as in a mounted Kubernetes TLS secret)
    authority:              ca.crt, ca.key, next.key      (next.key during a rotation)
    cert-manager CA issuer: tls.crt, tls.key, ca.crt      (tls.crt is the authority's)

The TLS contexts (`kubelend.transports.tls`) read the same files with OpenSSL.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import NameOID

from kubelend.core.errors import InvalidSettings
from kubelend.kits import files
from kubelend.pki import keys
from kubelend.pki import x509 as pki_x509
from kubelend.pki.keys import PrivateKey
from kubelend.pki.passphrases import PASSPHRASE_VARIABLE, Passphrase

CA_KEY = "ca.key"
NO_AUTHORITY_HINT = "create an authority with `kubelend ca init`"
NEXT_KEY = "next.key"
"""Certificate and key of the authority that a rotation has added and that does not sign yet."""


class Credentials(msgspec.Struct, frozen=True):
    """A certificate with its key, and the authorities that its holder trusts."""

    certificate: x509.Certificate
    key: PrivateKey
    authorities: tuple[x509.Certificate, ...]
    chain: tuple[x509.Certificate, ...] = ()
    """Intermediates presented after the certificate, for peers that trust only the root."""


class Layout(NamedTuple):
    """File names of an authority's certificate and key."""

    certificate: str
    key: str


OWN_LAYOUT = Layout(files.CA_CERTIFICATES, CA_KEY)
CERT_MANAGER_LAYOUT = Layout(files.TLS_CERTIFICATE, files.TLS_KEY)


class AuthorityFiles(msgspec.Struct, frozen=True):
    """Contents of an authority's directory, not yet validated."""

    directory: Path
    layout: Layout
    key: PrivateKey
    own: tuple[x509.Certificate, ...]
    """One of these belongs to the key."""

    trusted: tuple[x509.Certificate, ...]


def save_credentials(directory: Path, credentials: Credentials, *, overwrite: bool = False) -> None:
    """Write the three files. Without `overwrite` nothing is written if a certificate or key exists."""
    make_private_directory(directory)
    if not overwrite:
        hint = "choose another directory, or replace them with --overwrite"
        _check_not_existing(directory, files.TLS_KEY, files.TLS_CERTIFICATE, hint=hint)
    save_trusted(directory, credentials.authorities, overwrite=overwrite)
    _save_key(directory / files.TLS_KEY, credentials.key, overwrite=overwrite)
    presented = [credentials.certificate, *credentials.chain]
    _save_certificates(directory / files.TLS_CERTIFICATE, presented, overwrite=overwrite)


def load_credentials(directory: Path) -> Credentials:
    """Read the three files. A certificate and key that do not match are an error."""
    hint = "issue a certificate with `kubelend ca issue`"
    certificate, *chain = load_certificates(directory / files.TLS_CERTIFICATE, hint=hint)
    key = load_key(directory / files.TLS_KEY, hint=hint)
    authorities = load_certificates(directory / files.CA_CERTIFICATES, hint=hint)
    if not is_certificate_of(certificate, key):
        raise InvalidSettings(
            f"{directory / files.TLS_CERTIFICATE} and {directory / files.TLS_KEY} do not match",
            hint="use a matching certificate and key",
        )
    return Credentials(certificate, key, authorities, tuple(chain))


def save_authority(
    directory: Path,
    certificates: Sequence[x509.Certificate],
    key: PrivateKey,
    *,
    passphrase: Passphrase | None = None,
    overwrite: bool = False,
) -> None:
    """Write an authority's files. Without `overwrite` nothing is written if one exists."""
    make_private_directory(directory)
    if not overwrite:
        hint = "choose another directory, or move the old files away"
        _check_not_existing(directory, CA_KEY, files.CA_CERTIFICATES, hint=hint)
    save_trusted(directory, certificates, overwrite=overwrite)
    _save_key(directory / CA_KEY, key, passphrase, overwrite=overwrite)


def save_next(
    directory: Path,
    certificate: x509.Certificate,
    key: PrivateKey,
    passphrase: Passphrase | None,
) -> None:
    """Write certificate and key of the next authority into one file, which becomes `ca.key`."""
    text = to_pem([certificate]) + keys.to_pem(key, passphrase)
    files.write_atomic(directory / NEXT_KEY, text, mode=files.PRIVATE_MODE)


def remove_temporary_files(directory: Path) -> None:
    """Remove temporary files of a killed process. The caller must hold the directory lock."""
    for name in (NEXT_KEY, *OWN_LAYOUT):
        files.remove_temporary_files(directory / name)


def layout_of(directory: Path) -> Layout:
    """Return our layout, or cert-manager's if only that has a key."""
    ours, theirs = (directory / each.key for each in (OWN_LAYOUT, CERT_MANAGER_LAYOUT))
    return CERT_MANAGER_LAYOUT if theirs.exists() and not ours.exists() else OWN_LAYOUT


def load_authority(directory: Path, passphrase: Passphrase | None = None) -> AuthorityFiles:
    """Read an authority's certificates and key. A key that other users can access is rejected."""
    layout = layout_of(directory)
    path = directory / layout.key
    if problem := files.mode_problem(path):
        hint = f"chmod 600 {path}, or set the secret volume's defaultMode; consider the key compromised"
        raise InvalidSettings(problem, hint=hint)
    # A rotation adds the certificate before the key, so the certificates that are read afterwards include
    # its own.
    key = load_key(path, passphrase, hint=NO_AUTHORITY_HINT)
    own = load_certificates(directory / layout.certificate, hint=NO_AUTHORITY_HINT)
    return AuthorityFiles(directory, layout, key, own, load_trusted(directory))


def load_trusted(directory: Path) -> tuple[x509.Certificate, ...]:
    """Return the authorities that clients shall trust; without `ca.crt` the roots of cert-manager's chain."""
    path = directory / files.CA_CERTIFICATES
    if path.exists() or layout_of(directory) is OWN_LAYOUT:
        return load_certificates(path, hint=NO_AUTHORITY_HINT)
    own = load_certificates(directory / files.TLS_CERTIFICATE)
    return tuple(filter(pki_x509.is_self_signed, own)) or own[:1]


def load_certificates(path: Path, *, hint: str = "") -> tuple[x509.Certificate, ...]:
    """Return all certificates of a PEM file in order, at least one."""
    text = files.read_file(path, hint=hint)
    try:
        certificates = tuple(x509.load_pem_x509_certificates(text))
    except (ValueError, x509.InvalidVersion) as error:
        raise InvalidSettings(f"{path} contains no certificate in PEM form", hint=hint) from error
    # The library ignores a truncated certificate after a complete one.
    if text.count(b"-----BEGIN CERTIFICATE-----") != len(certificates):
        raise InvalidSettings(f"{path} is truncated or corrupt", hint=hint)
    return certificates


def load_key(path: Path, passphrase: Passphrase | None = None, *, hint: str = "") -> PrivateKey:
    text = files.read_file(path, hint=hint)
    try:
        return keys.from_pem(text, passphrase)
    except ValueError as error:
        hint = _passphrase_hint(text, passphrase) or hint
        raise InvalidSettings(f"{path}: {error}", hint=hint) from error


def is_certificate_of(certificate: x509.Certificate, key: PrivateKey) -> bool:
    return certificate.public_key() == key.public_key()


def common_names(directory: Path) -> list[str]:
    certificate = load_certificates(directory / files.TLS_CERTIFICATE)[0]
    found = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return [str(attribute.value) for attribute in found]


def make_private_directory(directory: Path) -> None:
    """Create a directory for key files, accessible only to its owner."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidSettings(
            f"{directory} cannot be created: {error.strerror}",
            hint="choose a directory that this user may write to",
        ) from error


def to_pem(certificates: Iterable[x509.Certificate]) -> bytes:
    """Encode certificates as concatenated PEM."""
    return b"".join(each.public_bytes(serialization.Encoding.PEM) for each in certificates)


def _passphrase_hint(text: bytes, passphrase: Passphrase | None) -> str:
    if keys.is_encrypted(text):
        return f"provide its passphrase in a file or in {PASSPHRASE_VARIABLE}"
    if passphrase is not None:
        return "omit it, or create an encrypted key with `kubelend ca rotate --new-passphrase-file`"
    return ""


def _check_not_existing(directory: Path, *names: str, hint: str) -> None:
    existing = [str(directory / name) for name in names if (directory / name).exists()]
    if existing:
        raise InvalidSettings(f"{' and '.join(existing)} would be overwritten", hint=hint)


def _save_key(
    path: Path, key: PrivateKey, passphrase: Passphrase | None = None, *, overwrite: bool
) -> None:
    text = keys.to_pem(key, passphrase)
    files.write_atomic(path, text, mode=files.PRIVATE_MODE, overwrite=overwrite)


def save_trusted(
    directory: Path, certificates: Sequence[x509.Certificate], *, overwrite: bool
) -> None:
    # The authority's own directory may also be a server's, and then has the same file already.
    path = directory / files.CA_CERTIFICATES
    if path.exists() and files.read_file(path) == to_pem(certificates):
        return
    _save_certificates(path, certificates, overwrite=overwrite)


def _save_certificates(
    path: Path, certificates: Iterable[x509.Certificate], *, overwrite: bool
) -> None:
    files.write_atomic(path, to_pem(certificates), mode=files.PUBLIC_MODE, overwrite=overwrite)
