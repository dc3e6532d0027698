"""Certificates: `certificate` for the caller's own, `ca` for the authority and what it issues.

`ca issue` makes the key as well, which suits the broker and tests; others join by a token.
"""

from __future__ import annotations

import getpass
import os
import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import typer

from kubelend.apps.settings import CertificateSettings, ClientSettings
from kubelend.cli import calls, options, output
from kubelend.cli.output import Format
from kubelend.core import durations, lifecycle
from kubelend.core.errors import InvalidIdentity, InvalidInput
from kubelend.kits import tables
from kubelend.pki import passphrases
from kubelend.pki.passphrases import Passphrase

if TYPE_CHECKING:
    from cryptography import x509

    from kubelend.pki.identity import Profile
    from kubelend.pki.inspection import AuthorityDirectoryInfo, CertificateInfo


@options.takes(settings=options.holder)
def show_certificate(
    format: options.Output = Format.TABLE, *, settings: CertificateSettings
) -> None:
    """Show the certificate in --cert-path: holder, validity and trusted authorities."""
    from kubelend.pki import inspection

    found = inspection.inspect_certificate(settings.cert_path)
    output.show(
        found, format, text=lambda: _certificate_text(found), names=[f"certificate/{found.name}"]
    )


@options.takes(settings=options.client)
def renew_own_certificate(
    force: Annotated[
        bool, typer.Option("--force", help="Renew it although it is not due.")
    ] = False,
    *,
    settings: ClientSettings,
) -> None:
    """Renew the certificate in --cert-path if it is due. Other commands do so by themselves."""
    from kubelend.cli import renewal
    from kubelend.pki import inspection

    renewed = calls.call_broker(
        settings, lambda client: renewal.renew_certificate(settings, client, force=force)
    )
    if renewed is not None:
        print(f"renewed {renewal.certificate_summary(settings, renewed)}")
        return
    found = inspection.inspect_certificate(settings.cert_path)
    moment = tables.format_time(found.renew_at, output.now())
    if found.renew_at > output.now():
        print(f"the certificate in {settings.cert_path} is not due for renewal before {moment}")
        output.note("Next: --force renews it now")
    else:
        print(f"another process is renewing the certificate in {settings.cert_path}")


def _certificate_text(found: CertificateInfo) -> str:
    now = output.now()
    trusted = (
        (each.subject, tables.format_time(each.not_after, now), each.pin)
        for each in found.authorities
    )
    return "\n".join(
        [
            tables.format_pairs(
                [
                    ("Name", found.name),
                    ("Role", found.role),
                    ("Subject", found.subject),
                    ("Valid from", tables.format_time(found.not_before, now)),
                    ("Valid until", tables.format_time(found.not_after, now)),
                    ("Days left", str(max(0, (found.not_after - now).days))),
                    ("Renewed from", tables.format_time(found.renew_at, now)),
                    ("Signed by", found.issuer),
                    ("Serial", found.serial),
                    ("Files", found.directory),
                ]
            ),
            "",
            tables.format_table(("TRUSTED", "END", "HASH"), trusted),
        ]
    )


PassphraseFile = Annotated[
    Path | None,
    typer.Option(
        "--passphrase-file",
        help="File with the passphrase of the authority's key."
        f" {passphrases.PASSPHRASE_VARIABLE} can hold it too.",
        metavar="FILE",
        envvar=f"{passphrases.PASSPHRASE_VARIABLE}_FILE",
        show_default=False,
    ),
]
PassphrasePrompt = Annotated[
    bool, typer.Option("--passphrase-prompt", help="Ask for the passphrase on the terminal.")
]


def existing_passphrase(
    passphrase_file: PassphraseFile = None, passphrase_prompt: PassphrasePrompt = False
) -> Passphrase | None:
    """A builder: the passphrase of an existing key, from a file, a variable or the terminal."""
    if passphrase_prompt:
        return Passphrase(_prompt_passphrase("Passphrase of the authority's key: "))
    return passphrases.load_passphrase(passphrase_file, os.environ)


def new_passphrase(
    passphrase_file: PassphraseFile = None, passphrase_prompt: PassphrasePrompt = False
) -> Passphrase | None:
    """A builder: the passphrase for a new key; on the terminal it is asked for twice."""
    if not passphrase_prompt:
        return passphrases.load_passphrase(passphrase_file, os.environ)
    first = _prompt_passphrase("New passphrase for the authority's key: ")
    if first != _prompt_passphrase("Repeat the passphrase: "):
        raise InvalidInput("the two passphrases differ")
    return Passphrase(first)


def read_passphrase_file(file: Path | None) -> Passphrase | None:
    """The passphrase in a file that a flag names; no variable is read instead."""
    return passphrases.passphrase_from_file(file) if file is not None else None


def _prompt_passphrase(question: str) -> str:
    # Without a terminal getpass would echo what is typed, or block.
    if not sys.stdin.isatty():
        raise InvalidInput(
            "there is no terminal to ask for a passphrase on", hint="use --passphrase-file"
        )
    return getpass.getpass(question)


Lifetime = Annotated[str, typer.Option(help="Validity, for example 720h.", metavar="DURATION")]


class Algorithm(StrEnum):
    """What `--algorithm` takes."""

    P256 = "p256"
    RSA = "rsa"


class Role(StrEnum):
    """What `--role` takes."""

    CLUSTER = "cluster"
    VIEWER = "viewer"
    ADMIN = "admin"
    PROXY = "proxy"
    BROKER = "broker"


KeyAlgorithm = Annotated[Algorithm, typer.Option(help="Key algorithm.")]
AuthorityDirectory = Annotated[
    Path, typer.Option("--ca", help="Directory of the authority.", metavar="DIR")
]


@options.takes(passphrase=new_passphrase)
def init_authority(
    *,
    out: AuthorityDirectory = Path("ca"),
    name: Annotated[str, typer.Option(help="Name of the authority.")] = "kubelend",
    lifetime: Lifetime = "87600h",
    algorithm: KeyAlgorithm = Algorithm.P256,
    passphrase: Passphrase | None,
) -> None:
    """Create a certificate authority: ca.crt and ca.key.

    With a passphrase the key is encrypted; issuing certificates then needs the passphrase.
    """
    from kubelend.pki import keys
    from kubelend.pki.authority import Authority

    authority = Authority.create(
        name,
        durations.parse_duration(lifetime),
        now=output.now(),
        algorithm=keys.Algorithm(algorithm),
        passphrase=passphrase,
    )
    authority.save(out)
    secret = f"{out / 'ca.key'} and its passphrase" if passphrase else out / "ca.key"
    print(
        f"created an authority in {out}; keep {secret} secret: it can issue a certificate for any name"
    )
    output.note(f"Next: kubelend ca issue broker --role broker{_flag('--ca', out, 'ca')}")


@options.takes(passphrase=existing_passphrase)
def issue_certificate(
    *,
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="Cluster ID, or name of a person. Not used for the broker.",
            show_default=False,
        ),
    ],
    role: Annotated[Role, typer.Option(help="Role of the holder.")] = Role.CLUSTER,
    out: Annotated[
        Path | None,
        typer.Option(help="Output directory. Defaults to certs/NAME.", metavar="DIR"),
    ] = None,
    dns: Annotated[
        list[str] | None,
        typer.Option(help="Host name of the broker; may be repeated.", metavar="NAME"),
    ] = None,
    ip: Annotated[
        list[str] | None,
        typer.Option(help="IP address of the broker; may be repeated.", metavar="ADDRESS"),
    ] = None,
    namespace: Annotated[
        str, typer.Option(help="Kubernetes namespace of the broker, for the names of its service.")
    ] = "default",
    lifetime: Lifetime = "8760h",
    algorithm: KeyAlgorithm = Algorithm.P256,
    authority: AuthorityDirectory = Path("ca"),
    passphrase: Passphrase | None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")] = False,
) -> None:
    """Issue a certificate with a new key: tls.crt, tls.key and ca.crt in one directory."""
    from kubelend.pki import files, keys
    from kubelend.pki.authority import Authority

    profile = _profile(name, role, [*(dns or []), *(ip or [])], namespace)
    valid_for = durations.parse_duration(lifetime)
    credentials = Authority.load(authority, passphrase).issue(
        profile,
        valid_for,
        now=output.now(),
        algorithm=keys.Algorithm(algorithm),
    )
    directory = out or Path("certs") / quote(name, safe=" @+:,=")
    files.save_credentials(directory, credentials, overwrite=overwrite)
    end = tables.format_time(credentials.certificate.not_valid_after_utc, output.now())
    print(f"wrote the certificate of {role} {name} to {directory}, valid until {end}")
    output.note(_next_step(role, directory))


@options.takes(passphrase=existing_passphrase)
def rotate_authority(
    *,
    authority: AuthorityDirectory = Path("ca"),
    name: Annotated[
        str, typer.Option(help="Name of the new authority. Defaults to the old name and a number.")
    ] = "",
    lifetime: Lifetime = "87600h",
    algorithm: Annotated[
        Algorithm | None, typer.Option(help="Key algorithm. Defaults to that of the old key.")
    ] = None,
    passphrase: Passphrase | None,
    new_passphrase_file: Annotated[
        Path | None,
        typer.Option(help="File with the passphrase for the new key.", metavar="FILE"),
    ] = None,
    finish: Annotated[
        bool, typer.Option("--finish", help="Remove the old authority. Needs --yes.")
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Confirm --finish, which cannot be undone.")
    ] = False,
) -> None:
    """Replace the authority by a new one, which signs from now on. The old key is deleted.

    Both are trusted until `--finish`; then certificates of the old one are rejected.
    """
    if finish:
        return _finish_rotation(authority, passphrase, yes=yes)
    from kubelend.pki import authority as pki_authority
    from kubelend.pki import keys

    successor = pki_authority.rotate_authority(
        authority,
        durations.parse_duration(lifetime),
        now=output.now(),
        name=name,
        algorithm=keys.Algorithm(algorithm) if algorithm else None,
        passphrase=passphrase,
        new_passphrase=read_passphrase_file(new_passphrase_file),
    )
    print(f"{_authority_name(successor.certificate)} signs from now on")
    for each in successor.trusted[1:]:
        print(f"{_authority_name(each)} stays trusted")
    where = _flag("--ca", authority, "ca")
    output.note(
        f"Next: new certificates for all (kubelend ca issue broker --role broker --overwrite{where}"
        f" for the broker), then kubelend ca rotate --finish --yes{where}"
    )
    return None


@options.takes(passphrase=existing_passphrase)
def show_authority(
    *,
    authority: AuthorityDirectory = Path("ca"),
    passphrase: Passphrase | None,
    format: options.Output = output.Format.TABLE,
) -> None:
    """Show the authorities in a directory, their hashes, and which one signs."""
    from kubelend.pki import inspection

    found = inspection.inspect_authority(authority, passphrase)
    names = [f"authority/{each.subject}" for each in found.authorities]
    output.show(found, format, text=lambda: _authority_text(found), names=names)


def _finish_rotation(authority: Path, passphrase: Passphrase | None, *, yes: bool) -> None:
    from kubelend.pki import authority as pki_authority

    if not yes:
        raise InvalidInput(
            "--finish removes the old authority for good: certificates that it signed are rejected"
            " from then on",
            hint="add --yes once all certificates are issued by the new one",
        )
    finished, dropped = pki_authority.finish_rotation(authority, passphrase)
    for each in dropped:
        print(
            f"{_authority_name(each)} removed: certificates that it signed are rejected from now on"
        )
    print(f"{_authority_name(finished.certificate)} signs and is trusted")
    output.note(
        "Next: copy the new ca.crt to the broker and to all that do not renew by themselves"
    )


def _authority_name(certificate: x509.Certificate) -> str:
    from kubelend.pki import tokens

    return f"{certificate.subject.rfc4514_string()} ({tokens.ca_pin(certificate)})"


def _authority_text(found: AuthorityDirectoryInfo) -> str:
    signs = {True: "yes", False: "no", None: "?"}
    rows = [
        (
            each.subject,
            signs[each.signs],
            tables.format_time(each.not_after, output.now()),
            each.pin,
        )
        for each in found.authorities
    ]
    lines = [tables.format_table(("SUBJECT", "SIGNS", "END", "HASH"), rows), ""]
    lines.append(f"The key is {'' if found.key_encrypted else 'not '}encrypted.")
    if any(each.signs is None for each in found.authorities):
        lines.append("Its passphrase is needed to tell which authority it belongs to.")
    if found.rotating:
        lines.append("A rotation is in progress: `kubelend ca rotate --finish --yes` completes it.")
    return "\n".join(lines)


def _profile(name: str, role: Role, names: list[str], namespace: str) -> Profile:
    from kubelend.pki import identity

    if role is Role.BROKER:
        return identity.server_profile(namespace=namespace, names=names)
    if names:
        raise InvalidInput("--dns and --ip are for a broker", hint="add --role broker")
    return client_profile_for("NAME", name, lifecycle.Role(role))


def client_profile_for(argument: str, name: str, role: lifecycle.Role) -> Profile:
    """The profile of a client certificate; an invalid name is reported as an error of this argument."""
    from kubelend.pki import identity

    try:
        return identity.client_profile(name, role)
    except InvalidIdentity as error:
        raise InvalidInput(f"{argument}: {error.message}", hint=error.hint) from None


def _next_step(role: Role, directory: Path) -> str:
    if role is Role.BROKER:
        return f"Next: kubelend broker --http-cert-path {shlex.quote(str(directory))}"
    if role is Role.PROXY:
        return "Next: configure the proxy to use it, and start the broker with --trust-proxies"
    return f"Next: export KUBELEND_CERT_PATH={shlex.quote(str(directory))}"


def _flag(name: str, value: Path, default: str) -> str:
    return "" if str(value) == default else f" {name} {shlex.quote(str(value))}"
