"""The certificate authority: made once, kept in a directory, issues what a profile describes.

The broker and `kubelend ca` call this. Its key signs every identity, so it stays where the broker
is: `sign` takes a public key only, for holders that make their own.
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
    """A certificate that signs others, its key, and the authorities that holders shall trust."""

    certificate: x509.Certificate
    key: PrivateKey
    trusted: tuple[x509.Certificate, ...]
    """Its own certificate first; what else its `ca.crt` holds is handed on to every holder."""

    chain: tuple[x509.Certificate, ...] = ()
    """What each holder shows behind its own certificate, for peers that trust only the end."""

    passphrase: Passphrase | None = None
    """With which the key is encrypted when it is saved."""

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
        """A new authority that trusts itself. Nothing is written: see `save`."""
        key = keys.generate(algorithm)
        validity = lifetimes.validity(lifetime, now)
        certificate = certificates.self_signed(_authority_name(name), key, validity)
        return cls(certificate, key, (certificate,), passphrase=passphrase)

    @classmethod
    def load(cls, directory: Path, passphrase: Passphrase | None = None) -> Self:
        """The authority in a directory: ours, or any other's `ca.crt` and `ca.key` that match.

        Where there is no `ca.key`, cert-manager's `tls.crt`, `tls.key` and `ca.crt` do.
        """
        found = files.load_authority(directory, passphrase)
        certificate = _signing(found)
        others = (each for each in found.trusted if each != certificate)
        chain = chains.links(certificate, [*found.own, *found.trusted, *found.cross])
        return cls(certificate, found.key, (certificate, *others), chain, passphrase)

    def save(self, directory: Path, *, overwrite: bool = False) -> None:
        """Write its files. An authority already there is an error, unless told."""
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
        """A new key and its certificate."""
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
        """A certificate for a key that its holder keeps. It never outlives the authority's own.

        It begins a little early, for clocks differ, but never before `not_before`: certificates of
        a name that was revoked are told apart by when they begin.
        """
        validity = lifetimes.validity(lifetime, now, until=self._end(now), not_before=not_before)
        return certificates.leaf(profile, public_key, validity, self.certificate, self.key)

    @property
    def is_rotating(self) -> bool:
        """Whether its predecessor is still trusted beside it, and has signed it."""
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
        """A new authority that signs from now on, while holders that trust only this one follow.

        Nothing is written: see `kubelend.pki.rotation`.
        """
        key = keys.generate(algorithm or keys.algorithm_like(self.key))
        subject = _authority_name(name or _next_name(self.certificate))
        own = certificates.self_signed(subject, key, lifetimes.validity(lifetime, now))
        cross = certificates.cross_signed(
            subject,
            key.public_key(),
            lifetimes.validity(lifetime, now, until=self._end(now)),
            self.certificate,
            self.key,
        )
        kept = passphrase or self.passphrase
        return type(self)(own, key, (own, *self.trusted), (cross,), kept)

    def finish_rotation(self) -> Self:
        """The same without its predecessor: what that one signed is refused from now on."""
        crosses = [each for each in self.chain if self._is_cross(each)]
        left = [each for each in self.trusted if not _signed_any(each, crosses)]
        return msgspec.structs.replace(self, trusted=tuple(left), chain=())

    def _is_cross(self, certificate: x509.Certificate) -> bool:
        return certificate != self.certificate and chains.same_key(certificate, self.certificate)

    def _end(self, now: datetime) -> datetime:
        end = self.certificate.not_valid_after_utc
        if now >= end:
            raise InvalidSettings(
                f"the authority's own certificate ended at {end:%Y-%m-%dT%H:%M:%SZ}",
                hint="make a new authority with `kubelend ca init`",
            )
        return end


def _authority_name(name: str) -> x509.Name:
    try:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    except ValueError as error:
        raise InvalidSettings(f"{name!r} cannot name an authority: 1 to 64 bytes can") from error


def _signing(found: AuthorityFiles) -> x509.Certificate:
    """The certificate of the key; its own rather than one that another signed for it."""
    matching = [each for each in found.own if files.matches(each, found.key)]
    if not matching:
        raise InvalidSettings(
            f"{found.layout.certificate} and {found.layout.key} in {found.directory} do not match",
            hint="put the pair there that was made together",
        )
    certificate = next(filter(chains.is_self_signed, matching), matching[0])
    if not certificates.may_sign(certificate):
        raise InvalidSettings(
            f"the certificate in {found.directory / found.layout.certificate} may not sign others",
            hint="use an authority's (CA:TRUE), or make one with `kubelend ca init`",
        )
    return certificate


def _next_name(certificate: x509.Certificate) -> str:
    """The name with a number, or with the next one: two of the same name are hard to tell apart."""
    found = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    name = str(found[0].value) if found else "kubelend"
    match = _NUMBERED.fullmatch(name)
    base, number = (match[1], int(match[2])) if match else (name, 1)
    end = f"-{number + 1}"
    return base.encode()[: 64 - len(end)].decode(errors="ignore") + end


_NUMBERED = re.compile(r"(.+)-([0-9]{1,6})", re.DOTALL)


def _signed_any(issuer: x509.Certificate, issued: Sequence[x509.Certificate]) -> bool:
    return any(chains.is_issued_by(each, issuer) for each in issued)
