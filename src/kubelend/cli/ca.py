"""`kubelend ca`: an authority, and the first certificates from it.

The key of each certificate is made here, which is right for the broker and for trying things out.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import typer

from kubelend.cli import output, tables
from kubelend.core import durations
from kubelend.core.errors import InvalidInput

if TYPE_CHECKING:
    from kubelend.pki.profiles import Profile

Lifetime = Annotated[
    str, typer.Option(help="How long it is valid, for example 720h.", metavar="DURATION")
]


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


KeyAlgorithm = Annotated[Algorithm, typer.Option(help="The kind of key.")]
AuthorityDirectory = Annotated[
    Path, typer.Option("--ca", help="Directory of the authority.", metavar="DIR")
]


def init(
    out: AuthorityDirectory = Path("ca"),
    name: Annotated[str, typer.Option(help="The authority's name.")] = "kubelend",
    lifetime: Lifetime = "87600h",
    algorithm: KeyAlgorithm = Algorithm.P256,
) -> None:
    """Make a certificate authority: ca.crt, and ca.key which stays with it."""
    from kubelend.pki import keys
    from kubelend.pki.authority import Authority

    authority = Authority.create(
        name, durations.parse(lifetime), now=output.now(), algorithm=keys.Algorithm(algorithm)
    )
    authority.save(out)
    print(f"{out} holds a new authority; whoever has {out / 'ca.key'} can be any cluster")
    output.note(f"Next: kubelend ca issue broker --role broker{_flag('--ca', out, 'ca')}")


def issue(
    *,
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="Cluster ID or a person's name. A broker's certificate has its own name.",
            show_default=False,
        ),
    ],
    role: Annotated[Role, typer.Option(help="What the holder is.")] = Role.CLUSTER,
    out: Annotated[
        Path | None,
        typer.Option(help="Where to write it; certs/NAME if not given.", metavar="DIR"),
    ] = None,
    dns: Annotated[
        list[str] | None,
        typer.Option(help="A host name of the broker; may be repeated.", metavar="NAME"),
    ] = None,
    ip: Annotated[
        list[str] | None,
        typer.Option(help="An address of the broker; may be repeated.", metavar="ADDRESS"),
    ] = None,
    namespace: Annotated[
        str, typer.Option(help="The broker's Kubernetes namespace, for its service's names.")
    ] = "default",
    lifetime: Lifetime = "8760h",
    algorithm: KeyAlgorithm = Algorithm.P256,
    authority: AuthorityDirectory = Path("ca"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")] = False,
) -> None:
    """Make a key and a certificate: tls.crt, tls.key and ca.crt in one directory."""
    from kubelend.pki import files, keys
    from kubelend.pki.authority import Authority

    profile = _profile(name, role, [*(dns or []), *(ip or [])], namespace)
    valid_for = durations.parse(lifetime)
    credentials = Authority.load(authority).issue(
        profile,
        valid_for,
        now=output.now(),
        algorithm=keys.Algorithm(algorithm),
    )
    directory = out or Path("certs") / quote(name, safe=" @+:,=")
    files.save_credentials(directory, credentials, overwrite=overwrite)
    end = tables.moment(credentials.certificate.not_valid_after_utc, output.now())
    print(f"{directory} holds the certificate of {role} {name}, valid until {end}")
    output.note(_next_step(role, directory))


def _profile(name: str, role: Role, names: list[str], namespace: str) -> Profile:
    from kubelend.core import roles
    from kubelend.pki import profiles

    if role is Role.BROKER:
        return profiles.server(namespace=namespace, names=names)
    if names:
        raise InvalidInput("--dns and --ip are for a broker", hint="add --role broker")
    return profiles.client(name, roles.Role(role))


def _next_step(role: Role, directory: Path) -> str:
    if role is Role.BROKER:
        return f"Next: kubelend broker --http-cert-path {directory}"
    if role is Role.PROXY:
        return "Next: let the proxy show it to the broker, which needs --trust-proxies"
    return f"Next: export KUBELEND_CERT_PATH={directory}"


def _flag(name: str, value: Path, default: str) -> str:
    return "" if str(value) == default else f" {name} {value}"
