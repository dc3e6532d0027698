"""The certificate authority: made once, kept in a directory, issues what a profile describes.

`kubelend ca init` and `kubelend ca issue` call this. Its key signs every identity, so it stays
where the broker is: `sign` takes a public key only, for holders that make their own.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path
from typing import Self, TypeVar

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID

from kubelend.core.errors import InvalidSettings
from kubelend.kits import keyfiles
from kubelend.pki import files, keys
from kubelend.pki.files import Credentials
from kubelend.pki.keys import Algorithm, PrivateKey, PublicKey
from kubelend.pki.profiles import Profile

AUTHORITY_LIFETIME = timedelta(days=3650)
LEAF_LIFETIME = timedelta(days=365)

# A peer's clock may be behind ours, and a fresh certificate would not be valid there yet.
CLOCK_SKEW = timedelta(minutes=5)


class Authority(msgspec.Struct, frozen=True):
    """A certificate that signs others, its key, and the authorities that holders shall trust."""

    certificate: x509.Certificate
    key: PrivateKey
    trusted: tuple[x509.Certificate, ...]
    """Its own certificate first; what else its `ca.crt` holds is handed on to every holder."""

    @classmethod
    def create(
        cls,
        name: str,
        lifetime: timedelta = AUTHORITY_LIFETIME,
        *,
        now: datetime,
        algorithm: Algorithm = Algorithm.P256,
    ) -> Self:
        """A new authority that trusts itself. Nothing is written: see `save`."""
        key = keys.generate(algorithm)
        certificate = _self_signed(_authority_name(name), key, _validity(lifetime, now))
        return cls(certificate, key, (certificate,))

    @classmethod
    def load(cls, directory: Path) -> Self:
        """The authority in a directory: ours, or any other whose `ca.crt` and `ca.key` match."""
        certificates, key = files.load_authority(directory)
        for certificate in certificates:
            if files.matches(certificate, key):
                _check_may_sign(certificate, directory)
                others = (each for each in certificates if each != certificate)
                return cls(certificate, key, (certificate, *others))
        raise InvalidSettings(
            f"{keyfiles.AUTHORITIES} and {files.AUTHORITY_KEY} in {directory} do not match",
            hint="put the pair there that was made together",
        )

    def save(self, directory: Path, *, overwrite: bool = False) -> None:
        """Write `ca.crt` and `ca.key`. An authority already there is an error, unless told."""
        files.save_authority(directory, self.trusted, self.key, overwrite=overwrite)

    def issue(
        self,
        profile: Profile,
        lifetime: timedelta = LEAF_LIFETIME,
        *,
        now: datetime,
        algorithm: Algorithm = Algorithm.P256,
    ) -> Credentials:
        """A new key and its certificate."""
        key = keys.generate(algorithm)
        return Credentials(
            self.sign(profile, key.public_key(), lifetime, now=now), key, self.trusted
        )

    def sign(
        self,
        profile: Profile,
        public_key: PublicKey,
        lifetime: timedelta = LEAF_LIFETIME,
        *,
        now: datetime,
    ) -> x509.Certificate:
        """A certificate for a key that its holder keeps. It never outlives the authority's own."""
        start, end = _validity(lifetime, now)
        own_end = self.certificate.not_valid_after_utc
        if now >= own_end:
            raise InvalidSettings(
                f"the authority's own certificate ended at {own_end:%Y-%m-%dT%H:%M:%SZ}",
                hint="make a new authority with `kubelend ca init`",
            )
        builder = _builder(profile.subject, public_key, (start, min(end, own_end)))
        builder = _add_leaf_extensions(builder, profile, public_key)
        builder = builder.issuer_name(self.certificate.subject)
        builder = builder.add_extension(_authority_key_identifier(self.certificate), critical=False)
        return builder.sign(self.key, keys.digest_for(self.key))


_Validity = tuple[datetime, datetime]
_Extension = TypeVar("_Extension", bound=x509.ExtensionType)


def _authority_name(name: str) -> x509.Name:
    try:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    except ValueError as error:
        raise InvalidSettings(f"{name!r} cannot name an authority: 1 to 64 bytes can") from error


def _validity(lifetime: timedelta, now: datetime) -> _Validity:
    if lifetime <= timedelta(0):
        raise InvalidSettings(f"a certificate cannot live for {lifetime}", hint="give more than 0")
    try:
        return now - CLOCK_SKEW, now + lifetime
    except OverflowError as error:
        raise InvalidSettings(f"a certificate cannot live for {lifetime.days} days") from error


def _self_signed(name: x509.Name, key: PrivateKey, validity: _Validity) -> x509.Certificate:
    # No path length: this one can sign its successor while holders move from one to the other.
    builder = _builder(name, key.public_key(), validity).issuer_name(name)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    builder = builder.add_extension(_key_usage(key_cert_sign=True, crl_sign=True), critical=True)
    return builder.sign(key, keys.digest_for(key))


def _builder(
    subject: x509.Name, public_key: PublicKey, validity: _Validity
) -> x509.CertificateBuilder:
    start, end = validity
    return (
        x509.CertificateBuilder()
        .serial_number(x509.random_serial_number())
        .subject_name(subject)
        .public_key(public_key)
        .not_valid_before(start)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
    )


def _add_leaf_extensions(
    builder: x509.CertificateBuilder, profile: Profile, public_key: PublicKey
) -> x509.CertificateBuilder:
    # Only RSA encrypts keys, in the older suites of TLS 1.2; some peers insist on the permission.
    usage = _key_usage(
        digital_signature=True, key_encipherment=isinstance(public_key, rsa.RSAPublicKey)
    )
    builder = builder.add_extension(
        x509.BasicConstraints(ca=False, path_length=None), critical=True
    )
    builder = builder.add_extension(usage, critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([profile.usage]), critical=False)
    if profile.names:
        builder = builder.add_extension(x509.SubjectAlternativeName(profile.names), critical=False)
    return builder


def _key_usage(
    *,
    digital_signature: bool = False,
    key_encipherment: bool = False,
    key_cert_sign: bool = False,
    crl_sign: bool = False,
) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        key_encipherment=key_encipherment,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        content_commitment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _authority_key_identifier(certificate: x509.Certificate) -> x509.AuthorityKeyIdentifier:
    # Another's certificate may have none, or one made in another way: where it is, it is copied.
    identifier = _find(certificate, x509.SubjectKeyIdentifier)
    if identifier is None:
        identifier = x509.SubjectKeyIdentifier.from_public_key(certificate.public_key())
    return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier)


def _check_may_sign(certificate: x509.Certificate, directory: Path) -> None:
    constraints = _find(certificate, x509.BasicConstraints)
    usage = _find(certificate, x509.KeyUsage)
    # Without constraints it is no authority; without a stated usage it may do anything.
    if not (constraints and constraints.ca) or (usage and not usage.key_cert_sign):
        raise InvalidSettings(
            f"the certificate in {directory / keyfiles.AUTHORITIES} may not sign others",
            hint="use an authority's (CA:TRUE), or make one with `kubelend ca init`",
        )


def _find(certificate: x509.Certificate, kind: type[_Extension]) -> _Extension | None:
    for extension in certificate.extensions:
        if isinstance(extension.value, kind):
            return extension.value
    return None
