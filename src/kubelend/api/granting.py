"""Signs grants: with each instruction to use or hold, and on request.

Signing takes half as long as a placement decision but does not hold the interpreter lock: all grants of one
event loop iteration are signed together in a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from kubelend.core.models import ClusterId, Reservation
from kubelend.pki.grants import GRANT_ISSUER, Grant, GrantKeys, JwkSet

_PendingGrant = tuple[Grant, "asyncio.Future[str]"]


class GrantSigner:
    """Signs grants in a thread; bound to one event loop."""

    def __init__(self, keys: GrantKeys) -> None:
        self._keys = keys
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grants")
        self._pending: list[_PendingGrant] = []

    @property
    def public(self) -> JwkSet:
        return self._keys.public

    async def grant(self, found: Reservation, reader: ClusterId) -> str | None:
        """Returns the grant of a live reservation for its requester or provider; None for others."""
        if reader not in (found.requester, found.target):
            return None
        grant = _grant_claims(found)
        return None if grant is None else await self._sign_in_batch(grant)

    def close(self) -> None:
        self._thread.shutdown()

    def _sign_in_batch(self, grant: Grant) -> asyncio.Future[str]:
        loop = asyncio.get_running_loop()
        if not self._pending:
            loop.call_soon(self._sign_pending)
        signed = loop.create_future()
        self._pending.append((grant, signed))
        return signed

    def _sign_pending(self) -> None:
        waiting, self._pending = self._pending, []
        loop = asyncio.get_running_loop()
        work = partial(self._sign, [grant for grant, _ in waiting])
        loop.run_in_executor(self._thread, work).add_done_callback(partial(_set_results, waiting))

    def _sign(self, grants: Sequence[Grant]) -> list[str]:
        return [self._keys.sign(grant) for grant in grants]


def _set_results(pending: Sequence[_PendingGrant], work: asyncio.Future[list[str]]) -> None:
    problem = work.exception()
    for index, (_, signed) in enumerate(pending):
        if signed.done():
            continue  # its caller was cancelled
        if problem is None:
            signed.set_result(work.result()[index])
        else:
            signed.set_exception(problem)


def _grant_claims(found: Reservation) -> Grant | None:
    if not found.is_live or found.target is None:
        return None
    if found.reserved_at is None or found.expires_at is None:
        return None
    return Grant(
        iss=GRANT_ISSUER,
        jti=found.id,
        sub=found.requester,
        aud=found.target,
        nbf=int(found.reserved_at.timestamp()),
        exp=int(found.expires_at.timestamp()),
        resources=found.request.resources.quantities(),
    )
