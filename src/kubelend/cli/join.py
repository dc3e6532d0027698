"""`kubelend join`: get a certificate with a join token."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import typer

from kubelend.apps import settings
from kubelend.cli import members, output
from kubelend.cli.certificates import Algorithm, KeyAlgorithm, client_profile_for
from kubelend.cli.members import JoinRole
from kubelend.core import durations
from kubelend.core.errors import InvalidInput
from kubelend.kits import tables

if TYPE_CHECKING:
    from kubelend.apps.join import JoinOutcome, JoinParameters
    from kubelend.wire.admin_bodies import JoinPending

EnrolmentUrl = Annotated[
    str,
    typer.Argument(
        metavar="BROKER",
        help="Address of the broker's enrolment port: https://HOST:8444.",
        show_default=False,
    ),
]
Token = Annotated[
    str,
    typer.Option(
        help="Join token. Process lists show flags: better use the variable or --token-file.",
        metavar="TOKEN",
        envvar="KUBELEND_TOKEN",
        show_envvar=True,
    ),
]


def join(
    *,
    broker: EnrolmentUrl,
    token: Token = "",
    token_file: Annotated[
        Path | None, typer.Option(help="File with the join token; - reads stdin.", metavar="FILE")
    ] = None,
    ca_hash: Annotated[
        str, typer.Option(help="Hash of the broker's authority: sha256:...", metavar="HASH")
    ] = "",
    name: Annotated[
        str,
        typer.Option("--cluster-id", "--name", help="Name to join as.", metavar="NAME"),
    ] = "",
    role: Annotated[JoinRole, typer.Option(help="Role to join as.")] = JoinRole.CLUSTER,
    out: Annotated[
        Path | None,
        typer.Option(help="Output directory. Defaults to certs/NAME.", metavar="DIR"),
    ] = None,
    wait: Annotated[
        str,
        typer.Option(help="How long to wait for approval.", metavar="DURATION"),
    ] = "5m",
    algorithm: KeyAlgorithm = Algorithm.P256,
) -> None:
    """Join a broker with a token, to get a certificate.

    Writes tls.crt, tls.key and ca.crt to one directory. The key is generated here and never sent. Run
    again, the command continues where it stopped.
    """
    for flag, value in (("--ca-hash", ca_hash), ("--cluster-id", name)):
        if not value:
            raise InvalidInput(
                f"{flag} is required",
                hint="run the whole command that `kubelend create token` printed",
            )
    if problem := settings.broker_url_problem(broker, "BROKER"):
        raise InvalidInput(problem)
    directory = out or Path("certs") / quote(name, safe=" @+:,=")
    invitation = _invitation(broker, token, token_file, ca_hash, name, role)
    joined = _join(invitation, directory, wait, algorithm)
    end = tables.format_time(joined.credentials.certificate.not_valid_after_utc, output.now())
    print(f"wrote the certificate of {role} {name} to {directory}, valid until {end}")
    address = members.broker_address(broker, joined.port)
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
