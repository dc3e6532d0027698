"""Certificate authority: create, load, sign, rotate, and inspect without its passphrase.

The broker and `kubelend ca` use this. The authority's key signs every identity and never leaves the broker:
`sign` takes a public key, for clients that generate their own key.

Rotation replaces an authority in three steps. Each waits until every client has renewed its certificate,
because a renewal also brings the current `ca.crt`:

    rotate    a new authority is added to `ca.crt`; its key is `next.key`, and the old one still signs
    sign      the new one signs: `next.key` becomes `ca.key`, and the old key is gone
    drop      the old one is removed from `ca.crt`; its certificates are rejected

Every client trusts the new authority before anything is signed with it, so nobody is rejected in between.
Each step replaces one file atomically; a step that was interrupted is repeated.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from pathlib import Path
from typing import Self

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kubelend.core.errors import InvalidSettings
from kubelend.kits import files as kits_files
from kubelend.pki import files, identity, keys, tokens
from kubelend.pki import x509 as pki_x509
from kubelend.pki.files import AuthorityFiles, Credentials
from kubelend.pki.identity import Profile
from kubelend.pki.keys import Algorithm, PrivateKey, PublicKey
from kubelend.pki.passphrases import Passphrase
from kubelend.pki.x509 import Validity

AUTHORITY_LIFETIME = timedelta(days=3650)
LEAF_LIFETIME = timedelta(days=365)


class Authority(msgspec.Struct, frozen=True):
    """An authority's certificate and key, and the authorities that clients shall trust."""

    certificate: x509.Certificate
    key: PrivateKey
    trusted: tuple[x509.Certificate, ...]
    """Own certificate first. The others in `ca.crt` are passed on to every client."""

    chain: tuple[x509.Certificate, ...] = ()
    """Intermediates that clients present after their own certificate, for peers that trust only the root.
    """

    passphrase: Passphrase | None = None
    """Encrypts the key when it is saved."""

    @classmethod
    def create(
        cls,
        name: str,
        lifetime: timedelta = AUTHORITY_LIFETIME,
        *,
        now: datetime,
        algorithm: Algorithm = Algorithm.P256,
        passphrase: Passphrase | None = None,
    ) -> Self:
        """Create an authority with a self-signed certificate, in memory only: see `save`."""
        key = keys.generate(algorithm)
        validity = pki_x509.validity_period(lifetime, now)
        certificate = _authority_certificate(_authority_name(name), validity, key)
        return cls(certificate, key, (certificate,), passphrase=passphrase)

    @classmethod
    def load(cls, directory: Path, passphrase: Passphrase | None = None) -> Self:
        """Load the authority of a directory: `ca.crt` and `ca.key`, made by us or by any other tool.

        Without `ca.key`, cert-manager's `tls.crt`, `tls.key` and `ca.crt` are used.
        """
        found = files.load_authority(directory, passphrase)
        certificate = _signing_certificate(found)
        others = (each for each in found.trusted if each != certificate)
        chain = pki_x509.chain_for(certificate, [*found.own, *found.trusted])
        return cls(certificate, found.key, (certificate, *others), chain, passphrase)

    def save(self, directory: Path, *, overwrite: bool = False) -> None:
        """Write the files. An existing authority is an error without `overwrite`."""
        files.save_authority(
            directory,
            self.trusted,
            self.key,
            passphrase=self.passphrase,
            overwrite=overwrite,
        )

    def issue(
        self,
        profile: Profile,
        lifetime: timedelta = LEAF_LIFETIME,
        *,
        now: datetime,
        algorithm: Algorithm = Algorithm.P256,
    ) -> Credentials:
        key = keys.generate(algorithm)
        certificate = self.sign(profile, key.public_key(), lifetime, now=now)
        return Credentials(certificate, key, self.trusted, self.chain)

    def sign(
        self,
        profile: Profile,
        public_key: PublicKey,
        lifetime: timedelta = LEAF_LIFETIME,
        *,
        now: datetime,
        not_before: datetime | None = None,
    ) -> x509.Certificate:
        """Sign a certificate for a public key. It never outlives the authority's own.

        It is backdated, because clocks differ, but not before `not_before`: certificates of a revoked name
        are distinguished by their start.
        """
        validity = pki_x509.validity_period(
            lifetime, now, until=self._expiry(now), not_before=not_before
        )
        return _leaf_certificate(profile, public_key, validity, self.certificate, self.key)

    def _expiry(self, now: datetime) -> datetime:
        end = self.certificate.not_valid_after_utc
        if now >= end:
            raise InvalidSettings(
                f"certificate of the authority expired at {end:%Y-%m-%dT%H:%M:%SZ}",
                hint="create a new authority with `kubelend ca init`",
            )
        return end


def _authority_name(name: str) -> x509.Name:
    try:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    except ValueError as error:
        raise InvalidSettings(
            f"{name!r} is not a valid name of an authority: use 1 to 64 bytes"
        ) from error


def _signing_certificate(found: AuthorityFiles) -> x509.Certificate:
    """Return the certificate of the key, preferably the self-signed one over a cross-signed one."""
    matching = [each for each in found.own if files.is_certificate_of(each, found.key)]
    if not matching:
        raise InvalidSettings(
            f"{found.layout.certificate} and {found.layout.key} in {found.directory} do not match",
            hint="use a matching certificate and key",
        )
    certificate = next(filter(pki_x509.is_self_signed, matching), matching[0])
    constraints = pki_x509.find_extension(certificate, x509.BasicConstraints)
    usage = pki_x509.find_extension(certificate, x509.KeyUsage)
    # Without basic constraints it is not a CA; without key usage all usages are allowed.
    if not (constraints and constraints.ca) or (usage is not None and not usage.key_cert_sign):
        raise InvalidSettings(
            f"{found.directory / found.layout.certificate} is not a CA certificate",
            hint="use one with CA:TRUE, or create one with `kubelend ca init`",
        )
    return certificate


def _next_name(certificate: x509.Certificate) -> str:
    """Append or increment a number, so that the names of successive authorities differ."""
    found = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    name = str(found[0].value) if found else "kubelend"
    match = re.fullmatch(r"(.+)-([0-9]{1,6})", name, re.DOTALL)
    base, number = (match[1], int(match[2])) if match else (name, 1)
    end = f"-{number + 1}"
    return base.encode()[: 64 - len(end)].decode(errors="ignore") + end


def start_rotation(
    directory: Path,
    lifetime: timedelta = AUTHORITY_LIFETIME,
    *,
    now: datetime,
    name: str = "",
    algorithm: Algorithm | None = None,
    passphrase: Passphrase | None = None,
    new_passphrase: Passphrase | None = None,
) -> x509.Certificate:
    """Create the next authority, add it to `ca.crt` and return its certificate.

    Its key algorithm is that of the current key by default, and so is its passphrase.
    """
    with kits_files.lock_directory(directory):
        current = Authority.load(directory, passphrase)
        _check_can_rotate(current, directory)
        files.remove_temporary_files(directory)
        if not (directory / files.NEXT_KEY).exists():
            following = Authority.create(
                name or _next_name(current.certificate),
                lifetime,
                now=now,
                algorithm=algorithm or keys.algorithm_of_successor(current.key),
                passphrase=new_passphrase or passphrase,
            )
            files.save_next(directory, following.certificate, following.key, following.passphrase)
        # Also after an earlier attempt was interrupted here.
        certificate = files.load_certificates(directory / files.NEXT_KEY)[0]
        files.save_trusted(directory, [*current.trusted, certificate], overwrite=True)
    return certificate


def finish_rotation(directory: Path) -> x509.Certificate:
    """Let the next authority sign and return its certificate. The old key is deleted."""
    with kits_files.lock_directory(directory):
        certificate = next_authority(directory)
        if certificate is None:
            raise InvalidSettings(
                f"no next authority in {directory}", hint="create it with `kubelend ca rotate`"
            )
        kits_files.rename_file(directory / files.NEXT_KEY, directory / files.CA_KEY)
    return certificate


def drop_authority(
    directory: Path, pin: tokens.Pin, passphrase: Passphrase | None = None
) -> x509.Certificate:
    """Remove an authority from `ca.crt` and return it. Its certificates are rejected from now on."""
    with kits_files.lock_directory(directory):
        current = Authority.load(directory, passphrase)
        dropped = tokens.pinned_certificates(current.trusted, pin)
        if not dropped:
            raise InvalidSettings(f"{directory} has no authority with hash {pin}")
        if current.certificate in dropped or next_authority(directory) in dropped:
            raise InvalidSettings(
                f"the authority with hash {pin} signs, or will sign next",
                hint="let another one sign first: `kubelend ca rotate`, then `kubelend ca rotate --sign`",
            )
        left = [each for each in current.trusted if each not in dropped]
        files.save_trusted(directory, left, overwrite=True)
    return dropped[0]


def next_authority(directory: Path) -> x509.Certificate | None:
    """Return the authority that a rotation has added and that does not sign yet, if there is one."""
    path = directory / files.NEXT_KEY
    added = files.load_certificates(path)[0] if path.exists() else None
    return added if added in files.load_trusted(directory) else None


def _check_can_rotate(authority: Authority, directory: Path) -> None:
    if files.layout_of(directory) is files.CERT_MANAGER_LAYOUT:
        raise InvalidSettings(
            f"{directory} is managed by cert-manager", hint="rotate the issuer with cert-manager"
        )
    if next_authority(directory) is not None:
        raise InvalidSettings(
            f"a rotation is already in progress in {directory}",
            hint="when all clients trust the new authority, run `kubelend ca rotate --sign`",
        )
    if not pki_x509.is_self_signed(authority.certificate):
        raise InvalidSettings(
            f"the authority in {directory} is an intermediate",
            hint="have its issuer sign a new one",
        )


def _authority_certificate(
    name: x509.Name, validity: Validity, key: PrivateKey
) -> x509.Certificate:
    """Build the self-signed certificate of an authority."""
    builder = _certificate_builder(name, key.public_key(), validity)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    builder = builder.add_extension(_key_usage("key_cert_sign", "crl_sign"), critical=True)
    return builder.issuer_name(name).sign(key, keys.digest_for(key))


def _leaf_certificate(
    profile: Profile,
    public_key: PublicKey,
    validity: Validity,
    issuer: x509.Certificate,
    key: PrivateKey,
) -> x509.Certificate:
    """Build a leaf certificate from a profile. Nothing is taken from a CSR but the key."""
    # Some peers require keyEncipherment for RSA keys, for older cipher suites of TLS 1.2.
    rsa_usage = ["key_encipherment"] if isinstance(public_key, rsa.RSAPublicKey) else []
    constraints = x509.BasicConstraints(ca=False, path_length=None)
    builder = (
        _certificate_builder(profile.subject, public_key, validity)
        .add_extension(constraints, critical=True)
        .add_extension(_key_usage("digital_signature", *rsa_usage), critical=True)
        .add_extension(x509.ExtendedKeyUsage([profile.usage]), critical=False)
    )
    if profile.names:
        builder = builder.add_extension(x509.SubjectAlternativeName(profile.names), critical=False)
    # Copied if present, because other tools may compute it differently.
    identifier = pki_x509.find_extension(issuer, x509.SubjectKeyIdentifier)
    if identifier is None:
        identifier = x509.SubjectKeyIdentifier.from_public_key(issuer.public_key())
    issuer_key = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier)
    builder = builder.add_extension(issuer_key, critical=False)
    return builder.issuer_name(issuer.subject).sign(key, keys.digest_for(key))


def _key_usage(*allowed: str) -> x509.KeyUsage:
    return x509.KeyUsage(**{name: name in allowed for name in _KEY_USAGES})


_KEY_USAGES = (
    "digital_signature",
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "key_cert_sign",
    "crl_sign",
    "encipher_only",
    "decipher_only",
)


def _certificate_builder(
    subject: x509.Name, public_key: PublicKey, validity: Validity
) -> x509.CertificateBuilder:
    serial = x509.random_serial_number()
    # See `pki_x509.lifetime_of`.
    serial = serial & ~1 if validity.backdated else serial | 1
    return (
        x509.CertificateBuilder()
        .serial_number(serial)
        .subject_name(subject)
        .public_key(public_key)
        .not_valid_before(validity.start)
        .not_valid_after(validity.end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
    )


class AuthorityInfo(msgspec.Struct, frozen=True, rename="camel"):
    """An authority that clients trust. Field names are API."""

    subject: str
    pin: str
    not_before: datetime
    not_after: datetime
    signs: bool | None
    """Whether it is the issuing authority; None if that needs the passphrase."""


class AuthorityDirectoryInfo(msgspec.Struct, frozen=True, rename="camel"):
    """An authority's directory. Field names are API."""

    directory: str
    key_encrypted: bool
    next: str
    """Pin of the authority that signs after `kubelend ca rotate --sign`; empty if there is none."""

    authorities: list[AuthorityInfo]


def inspect_authority(
    directory: Path, passphrase: Passphrase | None = None
) -> AuthorityDirectoryInfo:
    """Inspect an authority's directory. An unusable authority is an error, as when issuing."""
    path = directory / files.layout_of(directory).key
    encrypted = keys.is_encrypted(kits_files.read_file(path, hint=files.NO_AUTHORITY_HINT))
    following = next_authority(directory)
    signing: x509.Certificate | None = None
    if not encrypted or passphrase is not None:
        current = Authority.load(directory, passphrase)
        trusted, signing = current.trusted, current.certificate
    elif len(trusted := files.load_trusted(directory)) == 1:
        signing = trusted[0]
    authorities = [
        _authority_info(each, None if signing is None else each == signing) for each in trusted
    ]
    pin = "" if following is None else tokens.ca_pin(following)
    return AuthorityDirectoryInfo(str(directory), encrypted, pin, authorities)


def _authority_info(certificate: x509.Certificate, signs: bool | None) -> AuthorityInfo:
    return AuthorityInfo(
        subject=certificate.subject.rfc4514_string(),
        pin=tokens.ca_pin(certificate),
        not_before=certificate.not_valid_before_utc,
        not_after=certificate.not_valid_after_utc,
        signs=signs,
    )


class TrustedAuthority(msgspec.Struct, frozen=True, rename="camel"):
    """An authority that verifies peers. Field names are API."""

    subject: str
    pin: str
    not_after: datetime


class CertificateInfo(msgspec.Struct, frozen=True, rename="camel"):
    """A certificate and its directory. Field names are API."""

    directory: str
    name: str
    role: str
    subject: str
    serial: str
    issuer: str
    not_before: datetime
    not_after: datetime
    renew_at: datetime
    authorities: list[TrustedAuthority]


def inspect_certificate(directory: Path) -> CertificateInfo:
    """Inspect a certificate directory. A certificate and key that do not match are an error."""
    found = files.load_credentials(directory)
    own = found.certificate
    return CertificateInfo(
        directory=str(directory),
        name=identity.caller_from_certificate(own).name,
        role=_certificate_role(own),
        subject=own.subject.rfc4514_string(),
        serial=f"{own.serial_number:x}",
        issuer=own.issuer.rfc4514_string(),
        not_before=own.not_valid_before_utc,
        not_after=own.not_valid_after_utc,
        renew_at=pki_x509.renewal_time(own).replace(microsecond=0),
        authorities=[
            TrustedAuthority(
                each.subject.rfc4514_string(), tokens.ca_pin(each), each.not_valid_after_utc
            )
            for each in found.authorities
        ],
    )


def _certificate_role(certificate: x509.Certificate) -> str:
    """Role of the certificate's holder; `broker` for a server certificate."""
    usage = pki_x509.find_extension(certificate, x509.ExtendedKeyUsage)
    if usage is not None and ExtendedKeyUsageOID.CLIENT_AUTH not in usage:
        return "broker"
    return str(identity.caller_from_certificate(certificate).role)
