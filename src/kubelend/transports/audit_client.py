"""The journal, asked of the broker."""

from __future__ import annotations

from collections.abc import Mapping

from kubelend.transports import calls
from kubelend.transports.sessions import Session
from kubelend.wire.audit_bodies import AuditLine, AuditLog


class AuditClient:
    """`client.audit`."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def page(
        self, filters: Mapping[str, str], *, limit: int = 0, after: str = ""
    ) -> AuditLog:
        """Lines, newest first; `filters` by the names of the route's parameters."""
        query = {**filters, **calls.page(limit, after)}
        return await self._session.ask(AuditLog, "audit_log", query=query)

    async def newest(self, filters: Mapping[str, str], limit: int) -> list[AuditLine]:
        """So many lines, over as many pages as it takes; newest first."""
        found: list[AuditLine] = []
        after = ""
        while len(found) < limit:
            page = await self.page(filters, limit=min(limit - len(found), 1000), after=after)
            found += page.lines
            if not (after := page.next):
                break
        return found
