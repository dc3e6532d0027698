"""Client of the audit log routes."""

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
        """Returns one page, newest first; `filters` are query parameters of the route."""
        query = {**filters, **calls.page_query(limit, after)}
        return await self._session.call(AuditLog, "audit_log", query=query)

    async def latest(self, filters: Mapping[str, str], limit: int) -> list[AuditLine]:
        """Returns the newest `limit` lines, from as many pages as needed."""
        found: list[AuditLine] = []
        after = ""
        while len(found) < limit:
            page = await self.page(filters, limit=min(limit - len(found), 1000), after=after)
            found += page.lines
            if not (after := page.next):
                break
        return found
