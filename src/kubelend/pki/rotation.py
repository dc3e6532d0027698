"""Rotation of an authority in its directory, in two steps; see `pki.authority`."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

import msgspec
from cryptography import x509

from kubelend.core.errors import InvalidSettings
from kubelend.kits import keyfiles
from kubelend.pki import certificates, chains, files
from kubelend.pki.authority import AUTHORITY_LIFETIME, Authority
from kubelend.pki.keys import Algorithm
from kubelend.pki.passphrases import Passphrase


def rotate_authority(
    directory: Path,
    lifetime: timedelta = AUTHORITY_LIFETIME,
    *,
    now: datetime,
    name: str = "",
    algorithm: Algorithm | None = None,
    passphrase: Passphrase | None = None,
    new_passphrase: Passphrase | None = None,
) -> Authority:
    """Replace the authority by a successor and return it. The key algorithm stays by default.

    The new key is encrypted with `new_passphrase`, else with the predecessor's.
    """
    with keyfiles.lock_directory(directory):
        authority = Authority.load(directory, passphrase)
        _check_can_rotate(authority, directory)
        successor = _without_lost_successor(authority, directory).successor(
            lifetime, now=now, name=name, algorithm=algorithm, passphrase=new_passphrase
        )
        files.remove_temporary_files(directory)
        successor.save(directory, overwrite=True)
    return successor


def finish_rotation(
    directory: Path, passphrase: Passphrase | None = None
) -> tuple[Authority, tuple[x509.Certificate, ...]]:
    """Drop the predecessor. Return the current authority and the dropped certificates."""
    with keyfiles.lock_directory(directory):
        authority = Authority.load(directory, passphrase)
        if not authority.is_rotating:
            raise InvalidSettings(
                f"no rotation in progress in {directory}",
                hint="start one with `kubelend ca rotate`",
            )
        finished = authority.without_predecessor()
        dropped = tuple(each for each in authority.trusted if each not in finished.trusted)
        files.remove_temporary_files(directory)
        # Written first: after a crash the rotation can be finished again, and the dropped ones are known.
        files.save_dropped(directory, dropped)
        finished.save(directory, overwrite=True)
    return finished, dropped


def _check_can_rotate(authority: Authority, directory: Path) -> None:
    if files.layout_of(directory) is files.CERT_MANAGER_LAYOUT:
        raise InvalidSettings(
            f"{directory} is managed by cert-manager", hint="rotate the issuer with cert-manager"
        )
    if authority.is_rotating:
        raise InvalidSettings(
            f"a rotation is already in progress in {directory}",
            hint="when all clients have new certificates, run `kubelend ca rotate --finish --yes`",
        )
    if not chains.is_self_signed(authority.certificate):
        raise InvalidSettings(
            f"the authority in {directory} is an intermediate",
            hint="have its issuer sign a new one",
        )
    constraints = certificates.find_extension(authority.certificate, x509.BasicConstraints)
    # Peers would reject the cross certificate.
    if constraints is not None and constraints.path_length == 0:
        raise InvalidSettings(
            f"the authority in {directory} cannot sign another authority (path length 0)",
            hint="create another with `kubelend ca init`, and add it to every ca.crt first",
        )


def _without_lost_successor(authority: Authority, directory: Path) -> Authority:
    """Drop a trusted successor whose key was lost in a crash, which only its cross certificate shows."""
    lost = [
        each
        for each in files.load_cross(directory)
        if chains.is_issued_by(each, authority.certificate)
    ]
    remaining = (
        each
        for each in authority.trusted
        if each == authority.certificate or not any(chains.have_same_key(each, one) for one in lost)
    )
    return msgspec.structs.replace(authority, trusted=tuple(remaining))
