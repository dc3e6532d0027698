"""The directories of certificates: what each file holds, and whether the files match.

    a server's or client's: tls.crt, tls.key, ca.crt      (as a Kubernetes TLS secret mounts them)
    the authority's own:    ca.crt, ca.key, cross.crt     (the last while authorities are exchanged)
                            dropped.crt                   (predecessors that nobody may believe)
    or cert-manager's:      tls.crt, tls.key, ca.crt      (of a CA issuer; tls.crt is an authority's)

The authority and the commands call this; the TLS contexts (`kubelend.transports.tls`) read the same
files with OpenSSL.
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
from kubelend.kits import keyfiles
from kubelend.pki import chains, keys
from kubelend.pki.keys import PrivateKey
from kubelend.pki.passphrases import VARIABLE, Passphrase

AUTHORITY_KEY = "ca.key"
NO_AUTHORITY = "make an authority with `kubelend ca init`"
CROSS = "cross.crt"
"""Where the certificates are that holders show and nobody need trust."""
DROPPED = "dropped.crt"
"""Where the predecessors are: other files may still hold them, and those who read these must not."""


class Credentials(msgspec.Struct, frozen=True):
    """A certificate with its key, and the authorities that its holder trusts."""

    certificate: x509.Certificate
    key: PrivateKey
    authorities: tuple[x509.Certificate, ...]
    chain: tuple[x509.Certificate, ...] = ()
    """What the holder shows behind its own, for peers that trust only the end of the chain."""


class Layout(NamedTuple):
    """Where an authority's certificate and key are in its directory."""

    certificate: str
    key: str


OURS = Layout(keyfiles.AUTHORITIES, AUTHORITY_KEY)
CERT_MANAGERS = Layout(keyfiles.CERTIFICATE, keyfiles.KEY)


class AuthorityFiles(msgspec.Struct, frozen=True):
    """What an authority's directory holds, read and not yet judged."""

    directory: Path
    layout: Layout
    key: PrivateKey
    own: tuple[x509.Certificate, ...]
    """Among these is the key's."""

    trusted: tuple[x509.Certificate, ...]
    cross: tuple[x509.Certificate, ...]


def save_credentials(directory: Path, credentials: Credentials, *, overwrite: bool = False) -> None:
    """Write the three files. Without `overwrite` nothing at all is written if a pair is there."""
    make_directory(directory)
    if not overwrite:
        hint = "choose another directory, or replace them with --overwrite"
        _refuse_existing(directory, keyfiles.KEY, keyfiles.CERTIFICATE, hint=hint)
    _save_authorities(directory, credentials.authorities, overwrite=overwrite)
    _save_key(directory / keyfiles.KEY, credentials.key, overwrite=overwrite)
    shown = [credentials.certificate, *credentials.chain]
    _save_certificates(directory / keyfiles.CERTIFICATE, shown, overwrite=overwrite)


def load_credentials(directory: Path) -> Credentials:
    """Read the three files back. A certificate and a key that do not match are an error."""
    hint = "make one with `kubelend ca issue`"
    certificate, *chain = load_certificates(directory / keyfiles.CERTIFICATE, hint=hint)
    key = load_key(directory / keyfiles.KEY, hint=hint)
    authorities = load_certificates(directory / keyfiles.AUTHORITIES, hint=hint)
    if not matches(certificate, key):
        raise InvalidSettings(
            f"{directory / keyfiles.CERTIFICATE} and {directory / keyfiles.KEY} do not match",
            hint="put the pair there that was issued together",
        )
    return Credentials(certificate, key, authorities, tuple(chain))


def save_authority(
    directory: Path,
    certificates: Sequence[x509.Certificate],
    key: PrivateKey,
    *,
    cross: Sequence[x509.Certificate] = (),
    passphrase: Passphrase | None = None,
    overwrite: bool = False,
) -> None:
    """Write an authority's own files. Without `overwrite` none is written if one is there.

    The key comes last. Until then an authority that is replaced by its successor signs on: its own
    certificate is among the new ones, and the successor's cross certificate is not for its key.
    """
    make_directory(directory)
    if not overwrite:
        hint = "choose another directory, or move the old files away"
        _refuse_existing(directory, AUTHORITY_KEY, keyfiles.AUTHORITIES, CROSS, hint=hint)
    if cross:
        _save_certificates(directory / CROSS, cross, overwrite=overwrite)
    _save_authorities(directory, certificates, overwrite=overwrite)
    _save_key(directory / AUTHORITY_KEY, key, passphrase, overwrite=overwrite)
    if not cross:
        keyfiles.remove(directory / CROSS)


def remove_leftovers(directory: Path) -> None:
    """What a killed process left of an authority's files. For who holds the directory's lock."""
    for name in (CROSS, DROPPED, *OURS):
        keyfiles.remove_leftovers(directory / name)


def layout_of(directory: Path) -> Layout:
    """Ours, or cert-manager's where only that has a key."""
    ours, theirs = (directory / each.key for each in (OURS, CERT_MANAGERS))
    return CERT_MANAGERS if theirs.exists() and not ours.exists() else OURS


def load_authority(directory: Path, passphrase: Passphrase | None = None) -> AuthorityFiles:
    """Read an authority's certificates and key. A key that others can reach is refused."""
    layout = layout_of(directory)
    path = directory / layout.key
    if complaint := keyfiles.exposure(path):
        mend = f"chmod 600 {path}, or set the secret volume's defaultMode, and ask who has read it"
        raise InvalidSettings(complaint, hint=mend)
    # The key first, for it is written last: the certificates read then know it in any case.
    key = load_key(path, passphrase, hint=NO_AUTHORITY)
    own = load_certificates(directory / layout.certificate, hint=NO_AUTHORITY)
    if layout is OURS:
        return AuthorityFiles(directory, layout, key, own, own, load_cross(directory))
    return AuthorityFiles(directory, layout, key, own, load_trusted(directory), ())


def load_trusted(directory: Path) -> tuple[x509.Certificate, ...]:
    """The authorities that holders are to trust; without `ca.crt`, the ends of cert-manager's."""
    path = directory / keyfiles.AUTHORITIES
    if path.exists() or layout_of(directory) is OURS:
        return load_certificates(path, hint=NO_AUTHORITY)
    own = load_certificates(directory / keyfiles.CERTIFICATE)
    return tuple(filter(chains.is_self_signed, own)) or own[:1]


def load_cross(directory: Path) -> tuple[x509.Certificate, ...]:
    """What `cross.crt` holds; nothing if there is none."""
    path = directory / CROSS
    return load_certificates(path) if path.exists() else ()


def load_dropped(directory: Path) -> tuple[x509.Certificate, ...]:
    """What `dropped.crt` holds; nothing if no rotation was ever finished here."""
    path = directory / DROPPED
    return load_certificates(path) if path.exists() else ()


def save_dropped(directory: Path, certificates: Iterable[x509.Certificate]) -> None:
    """Add to `dropped.crt`: whoever was away for several rotations needs all of them."""
    if dropped := dict.fromkeys((*load_dropped(directory), *certificates)):
        _save_certificates(directory / DROPPED, dropped, overwrite=True)


def load_certificates(path: Path, *, hint: str = "") -> tuple[x509.Certificate, ...]:
    """All certificates of a PEM file, at least one, in their order."""
    text = keyfiles.read(path, hint=hint)
    try:
        certificates = tuple(x509.load_pem_x509_certificates(text))
    except (ValueError, x509.InvalidVersion) as error:
        raise InvalidSettings(f"{path} holds no certificate in PEM form", hint=hint) from error
    # The library passes over a certificate that is cut off behind a whole one.
    if text.count(b"-----BEGIN CERTIFICATE-----") != len(certificates):
        raise InvalidSettings(f"{path} is cut off or damaged", hint=hint)
    return certificates


def load_key(path: Path, passphrase: Passphrase | None = None, *, hint: str = "") -> PrivateKey:
    """The private key of a PEM file."""
    text = keyfiles.read(path, hint=hint)
    try:
        return keys.from_pem(text, passphrase)
    except ValueError as error:
        hint = _passphrase_hint(text, passphrase) or hint
        raise InvalidSettings(f"{path} cannot be used: {error}", hint=hint) from error


def matches(certificate: x509.Certificate, key: PrivateKey) -> bool:
    """Whether the certificate is for this key."""
    return certificate.public_key() == key.public_key()


def common_names(directory: Path) -> list[str]:
    """The common names of the directory's own certificate."""
    certificate = load_certificates(directory / keyfiles.CERTIFICATE)[0]
    found = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return [str(attribute.value) for attribute in found]


def make_directory(directory: Path) -> None:
    """For the files of one holder or authority: nobody else looks into it."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidSettings(
            f"{directory} cannot be made: {error.strerror}",
            hint="choose a directory that this user may write to",
        ) from error


def to_pem(certificates: Iterable[x509.Certificate]) -> bytes:
    """Certificates as text, one after the other."""
    return b"".join(each.public_bytes(serialization.Encoding.PEM) for each in certificates)


def _passphrase_hint(text: bytes, passphrase: Passphrase | None) -> str:
    if keys.is_encrypted(text):
        return f"give the passphrase it was encrypted with, in a file or in {VARIABLE}"
    if passphrase is not None:
        return "give none, or let `kubelend ca rotate --new-passphrase-file` make an encrypted key"
    return ""


def _refuse_existing(directory: Path, *names: str, hint: str) -> None:
    existing = [str(directory / name) for name in names if (directory / name).exists()]
    if existing:
        raise InvalidSettings(f"{' and '.join(existing)} would be overwritten", hint=hint)


def _save_key(
    path: Path, key: PrivateKey, passphrase: Passphrase | None = None, *, overwrite: bool
) -> None:
    text = keys.to_pem(key, passphrase)
    keyfiles.write(path, text, mode=keyfiles.PRIVATE, overwrite=overwrite)


def _save_authorities(
    directory: Path, certificates: Sequence[x509.Certificate], *, overwrite: bool
) -> None:
    # The authority's own directory may be a server's as well, and holds this very file then.
    path = directory / keyfiles.AUTHORITIES
    if path.exists() and keyfiles.read(path) == to_pem(certificates):
        return
    _save_certificates(path, certificates, overwrite=overwrite)


def _save_certificates(
    path: Path, certificates: Iterable[x509.Certificate], *, overwrite: bool
) -> None:
    keyfiles.write(path, to_pem(certificates), mode=keyfiles.PUBLIC, overwrite=overwrite)
