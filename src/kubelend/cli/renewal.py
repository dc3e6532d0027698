"""The command line renews the certificate that it calls with: by itself after a call, or when asked to."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kubelend.apps.settings import ClientSettings
from kubelend.cli import output, tables
from kubelend.core.errors import KubelendError
from kubelend.pki import lifetimes
from kubelend.transports import tls

if TYPE_CHECKING:
    from cryptography import x509

    from kubelend.transports.http_client import BrokerClient

RENEWAL_TIMEOUT = 5.0
"""Seconds that a command takes longer at most: it has done what it was asked for."""


async def renew_if_due(settings: ClientSettings, client: BrokerClient) -> None:
    """Renew it if it is time. Whatever comes in between: there is another command, and time left."""
    try:
        # A glance first, for what renews takes longer to import than this takes altogether.
        if lifetimes.renew_at(tls.own_certificate(settings.cert_path)) > output.now():
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
    """The new certificate; None if it is not time, or another process is at it."""
    from kubelend.apps import renewal

    renewer = renewal.by_client(client, settings.broker, settings.cert_path, settings.timeout)
    renewed = await renewer.renew(output.now(), force=force)
    return None if renewed is None else renewed.certificate


def certificate_summary(settings: ClientSettings, certificate: x509.Certificate) -> str:
    end = tables.moment(certificate.not_valid_after_utc, output.now())
    return f"the certificate in {settings.cert_path}, valid until {end}"
