"""Certificate authority: create, load, sign and rotate.

The broker and `kubelend ca` use this. The authority's key signs every identity and never leaves the broker:
`sign` takes a public key, for clients that generate their own key.

Rotation replaces an authority by its successor in two steps:

    rotate    the successor signs; its predecessor stays trusted and has cross-signed the successor
    finish    the predecessor is dropped, once every client has a certificate of the successor

In between all clients accept each other: those that trust only the predecessor verify the cross
certificate, which new certificates carry in their chain, and those with the new `ca.crt` trust both. The
predecessor's key is deleted in the first step, because it is no longer needed and could be stolen. Its
certificate is kept in `dropped.crt` after the second, for brokers that did not run at that time.

A crash at any moment leaves a usable directory: `save_authority` replaces the key last and atomically, and
the next rotation removes leftovers of an unfinished one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Self

import msgspec
from cryptography import x509
from cryptography.x509.oid import NameOID

from kubelend.core.errors import InvalidSettings
from kubelend.pki import certificates, chains, files, keys, lifetimes
from kubelend.pki.files import AuthorityFiles, Credentials
from kubelend.pki.keys import Algorithm, PrivateKey, PublicKey
from kubelend.pki.passphrases import Passphrase
from kubelend.pki.profiles import Profile

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
        validity = lifetimes.validity_period(lifetime, now)
        certificate = certificates.self_signed_certificate(_authority_name(name), key, validity)
        return cls(certificate, key, (certificate,), passphrase=passphrase)

    @classmethod
    def load(cls, directory: Path, passphrase: Passphrase | None = None) -> Self:
        """Load the authority of a directory: `ca.crt` and `ca.key`, made by us or by any other tool.

        Without `ca.key`, cert-manager's `tls.crt`, `tls.key` and `ca.crt` are used.
        """
        found = files.load_authority(directory, passphrase)
        certificate = _signing_certificate(found)
        others = (each for each in found.trusted if each != certificate)
        chain = chains.chain_for(certificate, [*found.own, *found.trusted, *found.cross])
        return cls(certificate, found.key, (certificate, *others), chain, passphrase)

    def save(self, directory: Path, *, overwrite: bool = False) -> None:
        """Write the files. An existing authority is an error without `overwrite`."""
        files.save_authority(
            directory,
            self.trusted,
            self.key,
            cross=[each for each in self.chain if each not in self.trusted],
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
        """Create a key and its certificate."""
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
        validity = lifetimes.validity_period(
            lifetime, now, until=self._expiry(now), not_before=not_before
        )
        return certificates.leaf_certificate(
            profile, public_key, validity, self.certificate, self.key
        )

    @property
    def is_rotating(self) -> bool:
        """Whether a rotation is in progress: the predecessor is still trusted and has cross-signed this
        authority.
        """
        return any(self._is_cross(each) for each in self.chain)

    def successor(
        self,
        lifetime: timedelta = AUTHORITY_LIFETIME,
        *,
        now: datetime,
        name: str = "",
        algorithm: Algorithm | None = None,
        passphrase: Passphrase | None = None,
    ) -> Self:
        """Create the successor of this authority, cross-signed for clients that trust only this one.
        Nothing is written.
        """
        key = keys.generate(algorithm or keys.algorithm_of_successor(self.key))
        subject = _authority_name(name or _next_name(self.certificate))
        own = certificates.self_signed_certificate(
            subject, key, lifetimes.validity_period(lifetime, now)
        )
        cross = certificates.cross_signed_certificate(
            subject,
            key.public_key(),
            lifetimes.validity_period(lifetime, now, until=self._expiry(now)),
            self.certificate,
            self.key,
        )
        key_passphrase = passphrase or self.passphrase
        return type(self)(own, key, (own, *self.trusted), (cross,), key_passphrase)

    def without_predecessor(self) -> Self:
        """Return this authority without its predecessor, whose certificates are rejected from now on."""
        crosses = [each for each in self.chain if self._is_cross(each)]
        left = [each for each in self.trusted if not _signed_any(each, crosses)]
        return msgspec.structs.replace(self, trusted=tuple(left), chain=())

    def _is_cross(self, certificate: x509.Certificate) -> bool:
        return certificate != self.certificate and chains.have_same_key(
            certificate, self.certificate
        )

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
    certificate = next(filter(chains.is_self_signed, matching), matching[0])
    if not certificates.is_authority(certificate):
        raise InvalidSettings(
            f"{found.directory / found.layout.certificate} is not a CA certificate",
            hint="use one with CA:TRUE, or create one with `kubelend ca init`",
        )
    return certificate


def _next_name(certificate: x509.Certificate) -> str:
    """Append or increment a number, so that the names of successive authorities differ."""
    found = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    name = str(found[0].value) if found else "kubelend"
    match = _NUMBERED.fullmatch(name)
    base, number = (match[1], int(match[2])) if match else (name, 1)
    end = f"-{number + 1}"
    return base.encode()[: 64 - len(end)].decode(errors="ignore") + end


_NUMBERED = re.compile(r"(.+)-([0-9]{1,6})", re.DOTALL)


def _signed_any(issuer: x509.Certificate, issued: Sequence[x509.Certificate]) -> bool:
    return any(chains.is_issued_by(each, issuer) for each in issued)
