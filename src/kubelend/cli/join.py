"""`kubelend join`: get a certificate with a join token."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from kubelend.apps import settings
from kubelend.cli import certificates, members, options, output
from kubelend.cli.certificates import Algorithm, KeyAlgorithm, OutputDirectory
from kubelend.cli.members import JoinRole
from kubelend.cli.options import flag
from kubelend.core import durations
from kubelend.core.errors import InvalidInput

if TYPE_CHECKING:
    from kubelend.apps.join import JoinOutcome, JoinParameters
    from kubelend.wire.admin_bodies import JoinPending


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
    directory = out or certificates.default_directory(name)
    invitation = _invitation(broker, token, token_file, ca_hash, name, role)
    joined = _join(invitation, directory, wait, algorithm)
    certificates.print_written(role, name, directory, joined.credentials.certificate)
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
    certificates.client_profile_for("--cluster-id", name, lifecycle.Role(role))
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
