"""The exchange of an authority for its successor, in its directory and in two steps.

    rotate    the successor signs; its predecessor is trusted beside it, and has signed it as well
    finish    the predecessor is dropped, when every holder has a certificate of the successor

In between nobody refuses anybody: who trusts only the predecessor follows the cross certificate,
which every new holder shows, and who has the new `ca.crt` trusts both. The predecessor's key is gone
with the first step. It has nothing left to sign, and a key that is kept can be stolen. Its certificate
is kept in `dropped.crt` after the second: a broker that did not run then must learn of it later.

A crash leaves a directory that can be used, wherever it comes: `files.save_authority` replaces the
key last and at one stroke, and what an unfinished rotation left behind is cleared by the next.
"""

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


def rotate(
    directory: Path,
    lifetime: timedelta = AUTHORITY_LIFETIME,
    *,
    now: datetime,
    name: str = "",
    algorithm: Algorithm | None = None,
    passphrase: Passphrase | None = None,
    new_passphrase: Passphrase | None = None,
) -> Authority:
    """Put a successor in the authority's place; gives it. Its key is of the same kind, unless told.

    It is encrypted with the new passphrase, or else as its predecessor's.
    """
    with keyfiles.locked(directory):
        authority = Authority.load(directory, passphrase)
        _check_can_be_succeeded(authority, directory)
        successor = _without_leftovers(authority, directory).successor(
            lifetime, now=now, name=name, algorithm=algorithm, passphrase=new_passphrase
        )
        files.remove_leftovers(directory)
        successor.save(directory, overwrite=True)
    return successor


def finish(
    directory: Path, passphrase: Passphrase | None = None
) -> tuple[Authority, tuple[x509.Certificate, ...]]:
    """Drop the predecessor; gives who signs now, and what was dropped."""
    with keyfiles.locked(directory):
        authority = Authority.load(directory, passphrase)
        if not authority.is_rotating:
            raise InvalidSettings(
                f"no rotation is under way in {directory}", hint="begin one: `kubelend ca rotate`"
            )
        finished = authority.finish_rotation()
        dropped = tuple(each for each in authority.trusted if each not in finished.trusted)
        files.remove_leftovers(directory)
        # First: a crash in between leaves a rotation that can be finished again, and none that is
        # finished without a word of whom it dropped.
        files.save_dropped(directory, dropped)
        finished.save(directory, overwrite=True)
    return finished, dropped


def _check_can_be_succeeded(authority: Authority, directory: Path) -> None:
    if files.layout_of(directory) is files.CERT_MANAGERS:
        raise InvalidSettings(
            f"{directory} holds cert-manager's files", hint="let cert-manager exchange them"
        )
    if authority.is_rotating:
        raise InvalidSettings(
            f"a rotation is under way in {directory}",
            hint="when all have new certificates: `kubelend ca rotate --finish --yes`",
        )
    if not chains.is_self_signed(authority.certificate):
        raise InvalidSettings(
            f"another authority signed the one in {directory}", hint="let that one sign a new one"
        )
    constraints = certificates.extension(authority.certificate, x509.BasicConstraints)
    # The cross certificate would break that rule, and peers would refuse it.
    if constraints is not None and constraints.path_length == 0:
        raise InvalidSettings(
            f"the authority in {directory} may sign no other authority (path length 0)",
            hint="make another with `kubelend ca init`, and put both into every ca.crt first",
        )


def _without_leftovers(authority: Authority, directory: Path) -> Authority:
    """Not trusting a successor whose key was lost in a crash; only its cross certificate tells."""
    lost = [
        each
        for each in files.load_cross(directory)
        if chains.is_issued_by(each, authority.certificate)
    ]
    kept = (
        each
        for each in authority.trusted
        if each == authority.certificate or not any(chains.same_key(each, one) for one in lost)
    )
    return msgspec.structs.replace(authority, trusted=tuple(kept))
