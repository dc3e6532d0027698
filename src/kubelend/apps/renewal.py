"""Renews a client certificate through the broker before it expires.

Commands check after each call whether renewal is due. The agent runs `kubelend certificate renew`
(`apps.agent_launcher`). Open sessions reload the new files from the directory (`transports.session`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from pathlib import Path

from kubelend.core.errors import InvalidSettings
from kubelend.kits import backoff, files
from kubelend.kits.files import AtomicDirectory
from kubelend.pki import csr, identity
from kubelend.pki import files as pki_files
from kubelend.pki import x509 as pki_x509
from kubelend.pki.files import Credentials
from kubelend.transports.client import BrokerClient
from kubelend.wire import admin_bodies

RequestCertificate = Callable[[str], Awaitable[admin_bodies.IssuedCertificate]]
"""Sends a CSR to the broker over a connection authenticated with the old certificate."""

VerifyCredentials = Callable[[Path], Awaitable[object]]
"""Calls the broker with the certificate in another directory; raises if that fails."""


async def renew_with_client(
    client: BrokerClient,
    url: str,
    directory: Path,
    timeout: timedelta,
    now: datetime,
    *,
    force: bool = False,
) -> Credentials | None:
    """Renews through an open client."""

    async def verify(staged: Path) -> None:
        async with BrokerClient(url, staged, timeout=timeout, backoff=backoff.NO_RETRIES) as fresh:
            await fresh.version()

    return await renew(directory, client.certificates.renew, verify, now, force=force)


async def renew(
    directory: Path,
    request: RequestCertificate,
    verify: VerifyCredentials,
    now: datetime,
    *,
    force: bool = False,
) -> Credentials | None:
    """Renews and installs the credentials of a directory; returns the new ones.

    None if they are not due (unless `force` is set), or if another process is renewing them.
    """
    target = AtomicDirectory(directory, files.CREDENTIAL_FILES)
    if reason := target.write_problem():
        raise InvalidSettings(reason, hint="renew the files with the tool that manages them")
    with target.try_lock() as is_ours:
        if not is_ours:
            return None
        old = pki_files.load_credentials(directory)
        if not force and now < pki_x509.renewal_time(old.certificate):
            return None
        # In a thread: creating an RSA key and writing to disk take time.
        key, text = await asyncio.to_thread(csr.begin_renewal, old)
        answer = await request(text)
        holder = identity.caller_from_certificate(old.certificate)
        new = csr.verify_issued(key, holder, answer.certificate, answer.authorities, now)
        try:
            staged = await asyncio.to_thread(target.stage, csr.credential_files(new))
            # Only files that work are installed: broken ones would lock the client out.
            await verify(staged)
            await asyncio.to_thread(target.switch_to, staged)
        finally:
            target.remove_unused()
        return new
