"""Building of X.509 certificates: self-signed, cross-signed and leaf. Used by `Authority`."""

from __future__ import annotations

from typing import TypeVar

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import rsa

from kubelend.pki import keys, lifetimes
from kubelend.pki.keys import PrivateKey, PublicKey
from kubelend.pki.lifetimes import Validity
from kubelend.pki.profiles import Profile

_Extension = TypeVar("_Extension", bound=x509.ExtensionType)


def self_signed_certificate(
    name: x509.Name, key: PrivateKey, validity: Validity
) -> x509.Certificate:
    """Build the self-signed certificate of a new authority."""
    builder = _add_authority_extensions(_certificate_builder(name, key.public_key(), validity))
    return builder.issuer_name(name).sign(key, keys.digest_for(key))


def cross_signed_certificate(
    name: x509.Name,
    public_key: PublicKey,
    validity: Validity,
    issuer: x509.Certificate,
    key: PrivateKey,
) -> x509.Certificate:
    """Build a successor's certificate signed by the old authority, for peers that trust only the old one."""
    builder = _add_authority_extensions(_certificate_builder(name, public_key, validity))
    return _sign_with_issuer(builder, issuer, key)


def leaf_certificate(
    profile: Profile,
    public_key: PublicKey,
    validity: Validity,
    issuer: x509.Certificate,
    key: PrivateKey,
) -> x509.Certificate:
    """Build a leaf certificate from a profile. Nothing is taken from a CSR but the key."""
    builder = _certificate_builder(profile.subject, public_key, validity)
    return _sign_with_issuer(_add_leaf_extensions(builder, profile, public_key), issuer, key)


def is_authority(certificate: x509.Certificate) -> bool:
    """Whether the certificate may sign others."""
    constraints = find_extension(certificate, x509.BasicConstraints)
    usage = find_extension(certificate, x509.KeyUsage)
    # Without basic constraints it is not a CA; without key usage all usages are allowed.
    return bool(constraints and constraints.ca) and (usage is None or usage.key_cert_sign)


def find_extension(certificate: x509.Certificate, kind: type[_Extension]) -> _Extension | None:
    """Return an extension of a certificate, if present."""
    for each in certificate.extensions:
        if isinstance(each.value, kind):
            return each.value
    return None


def _certificate_builder(
    subject: x509.Name, public_key: PublicKey, validity: Validity
) -> x509.CertificateBuilder:
    serial = lifetimes.mark_backdated(x509.random_serial_number(), backdated=validity.backdated)
    return (
        x509.CertificateBuilder()
        .serial_number(serial)
        .subject_name(subject)
        .public_key(public_key)
        .not_valid_before(validity.start)
        .not_valid_after(validity.end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
    )


def _add_authority_extensions(builder: x509.CertificateBuilder) -> x509.CertificateBuilder:
    # No path length, so that the authority can cross-sign its successor.
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    return builder.add_extension(_key_usage(key_cert_sign=True, crl_sign=True), critical=True)


def _add_leaf_extensions(
    builder: x509.CertificateBuilder, profile: Profile, public_key: PublicKey
) -> x509.CertificateBuilder:
    # Some peers require keyEncipherment for RSA keys, for older cipher suites of TLS 1.2.
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


def _sign_with_issuer(
    builder: x509.CertificateBuilder, issuer: x509.Certificate, key: PrivateKey
) -> x509.Certificate:
    builder = builder.issuer_name(issuer.subject)
    builder = builder.add_extension(_authority_key_identifier(issuer), critical=False)
    return builder.sign(key, keys.digest_for(key))


def _authority_key_identifier(certificate: x509.Certificate) -> x509.AuthorityKeyIdentifier:
    # Copied if present, because other tools may compute it differently.
    identifier = find_extension(certificate, x509.SubjectKeyIdentifier)
    if identifier is None:
        identifier = x509.SubjectKeyIdentifier.from_public_key(certificate.public_key())
    return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier)
