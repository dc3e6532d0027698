"""Certificates: `join` and `certificate` for the caller's own, `ca` for the authority and what it issues.

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

from kubelend.apps import settings
from kubelend.apps.settings import CertificateSettings, ClientSettings
from kubelend.cli import calls, members, options, output
from kubelend.cli.members import JoinRole
from kubelend.cli.options import Many, flag
from kubelend.cli.output import OutputFormat
from kubelend.core import durations, lifecycle
from kubelend.core.errors import InvalidIdentity, InvalidInput, KubelendError
from kubelend.kits import tables
from kubelend.pki import passphrases
from kubelend.pki.passphrases import Passphrase

if TYPE_CHECKING:
    from cryptography import x509

    from kubelend.apps.join import JoinOutcome, JoinParameters
    from kubelend.pki.authority import AuthorityDirectoryInfo, CertificateInfo
    from kubelend.pki.identity import Profile
    from kubelend.transports.client import BrokerClient
    from kubelend.wire.admin_bodies import JoinPending


@options.takes(settings=options.holder)
def show_certificate(
    format: options.Output = OutputFormat.TABLE, *, settings: CertificateSettings
) -> None:
    """Show the certificate in --cert-path: holder, validity and trusted authorities."""
    from kubelend.pki import authority

    found = authority.inspect_certificate(settings.cert_path)
    output.show(found, format, lambda: _certificate_text(found), [f"certificate/{found.name}"])


@options.takes(settings=options.client)
def renew_own_certificate(
    force: Annotated[bool, flag("Renew it although it is not due.", None, "--force")] = False,
    *,
    settings: ClientSettings,
) -> None:
    """Renew the certificate in --cert-path if it is due. Other commands do so by themselves."""
    from kubelend.pki import authority

    renewed = calls.call_broker(
        settings, lambda client: _renew_certificate(settings, client, force=force)
    )
    if renewed is not None:
        print(f"renewed the certificate in {settings.cert_path}, {_validity(renewed)}")
        return
    found = authority.inspect_certificate(settings.cert_path)
    moment = tables.format_time(found.renew_at, output.now())
    if found.renew_at > output.now():
        print(f"the certificate in {settings.cert_path} is not due for renewal before {moment}")
        output.note("Next: --force renews it now")
    else:
        print(f"another process is renewing the certificate in {settings.cert_path}")


RENEWAL_TIMEOUT = 5.0
"""Seconds by which a renewal may delay the end of a command."""


async def renew_if_due(settings: ClientSettings, client: BrokerClient) -> None:
    """Renew the certificate if it is due. Errors are ignored: the next command tries again."""
    import asyncio

    from kubelend.pki import x509 as pki_x509
    from kubelend.transports import tls

    try:
        # Checked first: importing what renews takes longer than this whole check.
        if pki_x509.renewal_time(tls.own_certificate(settings.cert_path)) > output.now():
            return
        async with asyncio.timeout(RENEWAL_TIMEOUT):
            renewed = await _renew_certificate(settings, client)
    except (KubelendError, TimeoutError):
        return
    if renewed is not None:
        output.note(f"renewed the certificate in {settings.cert_path}, {_validity(renewed)}")


async def _renew_certificate(
    settings: ClientSettings, client: BrokerClient, *, force: bool = False
) -> x509.Certificate | None:
    """The new certificate; None if it is not due, or another process is renewing it."""
    from kubelend.apps import join

    renewed = await join.renew_with_client(
        client,
        settings.broker_url,
        settings.cert_path,
        settings.timeout,
        output.now(),
        force=force,
    )
    return None if renewed is None else renewed.certificate


def _validity(certificate: x509.Certificate) -> str:
    return f"valid until {tables.format_time(certificate.not_valid_after_utc, output.now())}"


def _certificate_text(found: CertificateInfo) -> str:
    now = output.now()
    facts = output.details(
        [
            ("Name", found.name),
            ("Role", found.role),
            ("Subject", found.subject),
            ("Valid from", found.not_before),
            ("Valid until", found.not_after),
            ("Days left", max(0, (found.not_after - now).days)),
            ("Renewed from", found.renew_at),
            ("Signed by", found.issuer),
            ("Serial", found.serial),
            ("Files", found.directory),
        ],
        now,
    )
    trusted = (
        (each.subject, tables.format_time(each.not_after, now), each.pin)
        for each in found.authorities
    )
    return f"{facts}\n\n{tables.format_table(('TRUSTED', 'END', 'HASH'), trusted)}"


PassphraseFile = Annotated[
    Path | None,
    flag(
        "File with the passphrase of the authority's key."
        f" {passphrases.PASSPHRASE_VARIABLE} can hold it too.",
        *("FILE", "--passphrase-file"),
        envvar=f"{passphrases.PASSPHRASE_VARIABLE}_FILE",
        show_default=False,
    ),
]
PassphrasePrompt = Annotated[
    bool, flag("Ask for the passphrase on the terminal.", None, "--passphrase-prompt")
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


def _prompt_passphrase(question: str) -> str:
    # Without a terminal getpass would echo what is typed, or block.
    if not sys.stdin.isatty():
        raise InvalidInput(
            "there is no terminal to ask for a passphrase on", hint="use --passphrase-file"
        )
    return getpass.getpass(question)


Lifetime = Annotated[str, flag("Validity, for example 720h.", "DURATION")]


Algorithm = StrEnum("Algorithm", ["P256", "RSA"])
CertificateRole = StrEnum("CertificateRole", ["CLUSTER", "VIEWER", "ADMIN", "PROXY", "BROKER"])

KeyAlgorithm = Annotated[Algorithm, flag("Key algorithm.")]
AuthorityDirectory = Annotated[Path, flag("Directory of the authority.", "DIR", "--ca")]
OutputDirectory = Annotated[Path | None, flag("Output directory. Defaults to certs/NAME.", "DIR")]


@options.takes(passphrase=new_passphrase)
def init_authority(
    *,
    out: AuthorityDirectory = Path("ca"),
    name: Annotated[str, flag("Name of the authority.")] = "kubelend",
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
        options.argument("NAME", help="Cluster ID, or name of a person. Not used for the broker."),
    ],
    role: Annotated[CertificateRole, flag("Role of the holder.")] = CertificateRole.CLUSTER,
    out: OutputDirectory = None,
    dns: Annotated[Many, flag("Host name of the broker; may be repeated.", "NAME")] = None,
    ip: Annotated[Many, flag("IP address of the broker; may be repeated.", "ADDRESS")] = None,
    namespace: Annotated[
        str, flag("Kubernetes namespace of the broker, for the names of its service.")
    ] = "default",
    lifetime: Lifetime = "8760h",
    algorithm: KeyAlgorithm = Algorithm.P256,
    authority: AuthorityDirectory = Path("ca"),
    passphrase: Passphrase | None,
    overwrite: Annotated[bool, flag("Replace existing files.", None, "--overwrite")] = False,
) -> None:
    """Issue a certificate with a new key: tls.crt, tls.key and ca.crt in one directory."""
    from kubelend.pki import files, keys
    from kubelend.pki.authority import Authority

    profile = _profile(name, role, [*(dns or []), *(ip or [])], namespace)
    valid_for = durations.parse_duration(lifetime)
    credentials = Authority.load(authority, passphrase).issue(
        profile, valid_for, now=output.now(), algorithm=keys.Algorithm(algorithm)
    )
    directory = out or default_directory(name)
    files.save_credentials(directory, credentials, overwrite=overwrite)
    print_written(role, name, directory, credentials.certificate)
    output.note(_next_step(role, directory))


def default_directory(name: str) -> Path:
    """Where a certificate is written; whatever the name is, below the current directory."""
    return Path("certs") / quote(name, safe=" @+:,=")


def print_written(role: str, name: str, directory: Path, certificate: x509.Certificate) -> None:
    print(f"wrote the certificate of {role} {name} to {directory}, {_validity(certificate)}")


@options.takes(passphrase=existing_passphrase)
def rotate_authority(
    *,
    authority: AuthorityDirectory = Path("ca"),
    name: Annotated[
        str, flag("Name of the new authority. Defaults to the old name and a number.")
    ] = "",
    lifetime: Lifetime = "87600h",
    algorithm: Annotated[
        Algorithm | None, flag("Key algorithm. Defaults to that of the old key.")
    ] = None,
    passphrase: Passphrase | None,
    new_passphrase_file: Annotated[
        Path | None, flag("File with the passphrase for the new key.", "FILE")
    ] = None,
    sign: Annotated[
        bool, flag("Let the new authority sign, and delete the old key.", None, "--sign")
    ] = False,
    drop: Annotated[
        str, flag("Remove the authority with this hash: its certificates are rejected.", "HASH")
    ] = "",
) -> None:
    """Replace the authority in three steps, without rejecting anybody.

    First without --sign and --drop: a new authority is added to ca.crt, and the old one still signs.
    Then --sign, and then --drop with the hash of the old one: each when `kubelend get members --outdated`
    lists nobody any more.
    """
    from kubelend.pki import authority as pki_authority
    from kubelend.pki import keys, tokens

    where = _flag("--ca", authority, "ca")
    renew = (
        "Next: wait until `kubelend get members --outdated` lists nobody, then kubelend ca rotate"
    )
    if sign:
        certificate = pki_authority.finish_rotation(authority)
        print(f"{_authority_name(certificate)} signs from now on")
        output.note(f"{renew} --drop HASH{where}, with the hash of the old one")
    elif drop:
        pin = tokens.parse_ca_pin(drop)
        certificate = pki_authority.drop_authority(authority, pin, passphrase)
        print(f"{_authority_name(certificate)} removed: certificates that it signed are rejected")
    else:
        certificate = pki_authority.start_rotation(
            authority,
            durations.parse_duration(lifetime),
            now=output.now(),
            name=name,
            algorithm=keys.Algorithm(algorithm) if algorithm else None,
            passphrase=passphrase,
            new_passphrase=None
            if new_passphrase_file is None
            else passphrases.passphrase_from_file(new_passphrase_file),
        )
        print(f"{_authority_name(certificate)} is trusted from now on and does not sign yet")
        output.note(f"{renew} --sign{where}")


@options.takes(passphrase=existing_passphrase)
def show_authority(
    *,
    authority: AuthorityDirectory = Path("ca"),
    passphrase: Passphrase | None,
    format: options.Output = output.OutputFormat.TABLE,
) -> None:
    """Show the authorities in a directory, their hashes, and which one signs."""
    from kubelend.pki import authority as pki_authority

    found = pki_authority.inspect_authority(authority, passphrase)
    names = [f"authority/{each.subject}" for each in found.authorities]
    output.show(found, format, lambda: _authority_text(found), names)


def _authority_name(certificate: x509.Certificate) -> str:
    from kubelend.pki import tokens

    return f"{certificate.subject.rfc4514_string()} ({tokens.ca_pin(certificate)})"


def _authority_text(found: AuthorityDirectoryInfo) -> str:
    signs = {True: "yes", False: "no", None: "?"}
    now = output.now()
    rows = [
        (each.subject, signs[each.signs], tables.format_time(each.not_after, now), each.pin)
        for each in found.authorities
    ]
    lines = [tables.format_table(("SUBJECT", "SIGNS", "END", "HASH"), rows), ""]
    lines.append(f"The key is {'' if found.key_encrypted else 'not '}encrypted.")
    if any(each.signs is None for each in found.authorities):
        lines.append("Its passphrase is needed to tell which authority it belongs to.")
    if found.next:
        lines.append(f"After `kubelend ca rotate --sign` the one with hash {found.next} signs.")
    return "\n".join(lines)


def _profile(name: str, role: CertificateRole, names: list[str], namespace: str) -> Profile:
    from kubelend.pki import identity

    if role is CertificateRole.BROKER:
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


def _next_step(role: CertificateRole, directory: Path) -> str:
    if role is CertificateRole.BROKER:
        return f"Next: kubelend broker --http-cert-path {shlex.quote(str(directory))}"
    if role is CertificateRole.PROXY:
        return "Next: configure the proxy to use it, and start the broker with --trust-proxies"
    return f"Next: export KUBELEND_CERT_PATH={shlex.quote(str(directory))}"


def _flag(name: str, value: Path, default: str) -> str:
    return "" if str(value) == default else f" {name} {shlex.quote(str(value))}"


def join(
    *,
    broker: Annotated[
        str,
        options.argument(
            "BROKER", help="Address of the broker's enrolment port: https://HOST:8444."
        ),
    ],
    token: Annotated[
        str,
        flag(
            "Join token. Process lists show flags: better use the variable or --token-file.",
            "TOKEN",
            envvar="KUBELEND_TOKEN",
            show_envvar=True,
        ),
    ] = "",
    token_file: Annotated[
        Path | None, flag("File with the join token; - reads stdin.", "FILE")
    ] = None,
    ca_hash: Annotated[str, flag("Hash of the broker's authority: sha256:...", "HASH")] = "",
    name: Annotated[str, flag("Name to join as.", "NAME", "--cluster-id", "--name")] = "",
    role: Annotated[JoinRole, flag("Role to join as.")] = JoinRole.CLUSTER,
    out: OutputDirectory = None,
    wait: Annotated[str, flag("How long to wait for approval.", "DURATION")] = "5m",
    algorithm: KeyAlgorithm = Algorithm.P256,
) -> None:
    """Join a broker with a token, to get a certificate.

    Writes tls.crt, tls.key and ca.crt to one directory. The key is generated here and never sent. Run
    again, the command continues where it stopped.
    """
    for required, value in (("--ca-hash", ca_hash), ("--cluster-id", name)):
        if not value:
            raise InvalidInput(
                f"{required} is required",
                hint="run the whole command that `kubelend create token` printed",
            )
    if problem := settings.broker_url_problem(broker, "BROKER"):
        raise InvalidInput(problem)
    directory = out or default_directory(name)
    invitation = _invitation(broker, token, token_file, ca_hash, name, role)
    joined = _join(invitation, directory, wait, algorithm)
    print_written(role, name, directory, joined.credentials.certificate)
    address = members.on_same_host(broker, joined.port)
    where = shlex.quote(str(directory))
    output.note(
        f"Next: export KUBELEND_BROKER_URL={shlex.quote(address)} KUBELEND_CERT_PATH={where}"
    )


def _invitation(
    broker: str, token: str, token_file: Path | None, ca_hash: str, name: str, role: JoinRole
) -> JoinParameters:
    from kubelend.apps.join import JoinParameters
    from kubelend.core import lifecycle
    from kubelend.pki import tokens

    text = token if token_file is None else _read_token_file(token_file)
    if not text:
        raise InvalidInput(
            "a token is required", hint="an administrator creates one with `kubelend create token`"
        )
    client_profile_for("--cluster-id", name, lifecycle.Role(role))
    return JoinParameters(broker, text, tokens.parse_ca_pin(ca_hash), name, lifecycle.Role(role))


def _join(
    invitation: JoinParameters, directory: Path, wait: str, algorithm: Algorithm
) -> JoinOutcome:
    import asyncio

    from kubelend.apps import join as apps_join
    from kubelend.pki import keys

    def on_pending(answer: JoinPending) -> None:
        flag = "" if invitation.role == "cluster" else f" --role {invitation.role}"
        output.note(
            f"{invitation.name} waits for approval by an administrator:"
            f" kubelend approve {shlex.quote(invitation.name)}{flag}"
        )
        output.note(
            f"Its key has the hash {answer.key}. After Ctrl-C the request stays; run the same to continue."
        )

    return asyncio.run(
        apps_join.join_broker(
            invitation,
            directory,
            wait=durations.parse_duration(wait),
            algorithm=keys.Algorithm(algorithm),
            on_pending=on_pending,
        )
    )


def _read_token_file(path: Path) -> str:
    from kubelend.kits import files

    if str(path) == "-":
        return sys.stdin.readline().strip()
    if problem := files.mode_problem(path, content="a token"):
        output.note(f"warning: {problem}")
    return files.read_file(path, hint="write the token to it").decode(errors="replace").strip()
