"""What answers without TLS, on addresses of their own: a few pages for probes and for Prometheus.

The broker and the agent serve theirs with it, so it knows neither.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from aiohttp.web_request import BaseRequest
from aiohttp.web_response import Response

Answer = Callable[[], Awaitable[Response]]
HttpHandler = Callable[[BaseRequest], Awaitable[Response]]

SERVICE_UNAVAILABLE = 503


def serve(pages: Mapping[str, Answer]) -> HttpHandler:
    """A handler for these paths, and a word about them for all others."""

    async def answer(request: BaseRequest) -> Response:
        page = pages.get(request.path)
        if page is None:
            return Response(text=f"only {', '.join(pages)} here\n", status=404)
        if request.method not in {"GET", "HEAD"}:
            return Response(text="only GET here\n", status=405, headers={"Allow": "GET, HEAD"})
        return await page()

    return answer


def readiness(unready: str | None) -> Response:
    """The answer to a probe: `ok`, or 503 and why not."""
    if not unready:
        return Response(text="ok")
    return Response(text=f"not ready: {unready}", status=SERVICE_UNAVAILABLE)
