"""`kubelend certificate`: the one that a caller shows, looked at and renewed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kubelend.apps.settings import ClientSettings, HolderSettings
from kubelend.cli import calling, options, output, tables
from kubelend.cli.output import Format

if TYPE_CHECKING:
    from kubelend.pki.holdings import Holding


@options.takes(settings=options.reader(HolderSettings))
def show(format: options.Output = Format.TABLE, *, settings: HolderSettings) -> None:
    """Whose certificate it is, until when, and who is trusted. No broker is asked."""
    from kubelend.pki import holdings

    found = holdings.inspect(settings.cert_path)
    output.show(found, format, text=lambda: _described(found), names=[found.name])


@options.takes(settings=options.client)
def renew(
    force: Annotated[bool, typer.Option("--force", help="Also before it is time.")] = False,
    *,
    settings: ClientSettings,
) -> None:
    """Renew the certificate, if it is time. After other commands that happens by itself."""
    from kubelend.cli import renewing
    from kubelend.pki import holdings

    renewed = calling.call(settings, lambda client: renewing.renew(settings, client, force=force))
    if renewed is not None:
        print(f"renewed {renewing.sentence(settings, renewed)}")
        return
    found = holdings.inspect(settings.cert_path)
    moment = tables.moment(found.renew_at, output.now())
    if found.renew_at > output.now():
        print(f"the certificate in {settings.cert_path} is renewed from {moment} on")
        output.note("Next: --force renews it now")
    else:
        print(f"another process renews the certificate in {settings.cert_path}")


def _described(found: Holding) -> str:
    now = output.now()
    trusted = (
        (each.subject, tables.moment(each.not_after, now), each.pin) for each in found.authorities
    )
    return "\n".join(
        [
            tables.pairs(
                [
                    ("Name", found.name),
                    ("Role", found.role),
                    ("Subject", found.subject),
                    ("Valid from", tables.moment(found.not_before, now)),
                    ("Valid until", tables.moment(found.not_after, now)),
                    ("Days left", str(max(0, (found.not_after - now).days))),
                    ("Renewed from", tables.moment(found.renew_at, now)),
                    ("Signed by", found.issuer),
                    ("Serial", found.serial),
                    ("Files", found.directory),
                ]
            ),
            "",
            tables.columns(("TRUSTED", "END", "HASH"), trusted),
        ]
    )
