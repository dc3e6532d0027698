"""Renewal of the caller's certificate, after a call or by `certificate renew`.

A file of its own because it is imported late: it loads cryptography.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kubelend.apps.settings import ClientSettings
from kubelend.cli import output
from kubelend.core.errors import KubelendError
from kubelend.kits import tables
from kubelend.pki import x509 as pki_x509
from kubelend.transports import tls

if TYPE_CHECKING:
    from cryptography import x509

    from kubelend.transports.client import BrokerClient

RENEWAL_TIMEOUT = 5.0
"""Seconds by which a renewal may delay the end of a command."""


async def renew_if_due(settings: ClientSettings, client: BrokerClient) -> None:
    """Renew the certificate if it is due. Errors are ignored: the next command tries again."""
    try:
        # Checked first: importing what renews takes longer than this whole check.
        if pki_x509.renewal_time(tls.own_certificate(settings.cert_path)) > output.now():
            return
        async with asyncio.timeout(RENEWAL_TIMEOUT):
            renewed = await renew_certificate(settings, client)
    except (KubelendError, TimeoutError):
        return
    if renewed is not None:
        output.note(f"renewed {certificate_summary(settings, renewed)}")


async def renew_certificate(
    settings: ClientSettings, client: BrokerClient, *, force: bool = False
) -> x509.Certificate | None:
    """The new certificate; None if it is not due, or another process is renewing it."""
    from kubelend.apps import renewal

    renewer = renewal.renewer_for(client, settings.broker_url, settings.cert_path, settings.timeout)
    renewed = await renewer.renew(output.now(), force=force)
    return None if renewed is None else renewed.certificate


def certificate_summary(settings: ClientSettings, certificate: x509.Certificate) -> str:
    end = tables.format_time(certificate.not_valid_after_utc, output.now())
    return f"the certificate in {settings.cert_path}, valid until {end}"
