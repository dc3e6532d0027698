"""Plain HTTP pages for probes and Prometheus, on separate addresses; used by the broker and the agent."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from aiohttp.web_request import BaseRequest
from aiohttp.web_response import Response

PageHandler = Callable[[], Awaitable[Response]]
HttpHandler = Callable[[BaseRequest], Awaitable[Response]]

SERVICE_UNAVAILABLE = 503


def serve_pages(pages: Mapping[str, PageHandler]) -> HttpHandler:
    """Returns a handler of these paths; 404 for all others."""

    async def answer(request: BaseRequest) -> Response:
        page = pages.get(request.path)
        if page is None:
            return Response(text=f"not found; available: {', '.join(pages)}\n", status=404)
        if request.method not in {"GET", "HEAD"}:
            return Response(
                text="method not allowed; use GET\n", status=405, headers={"Allow": "GET, HEAD"}
            )
        return await page()

    return answer


def readiness_response(unready: str | None) -> Response:
    """Returns the response of a readiness probe: `ok`, or 503 with the reason."""
    if not unready:
        return Response(text="ok")
    return Response(text=f"not ready: {unready}", status=SERVICE_UNAVAILABLE)
