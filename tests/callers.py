"""Callers of a running broker, as raw as HTTP: a certificate each, bodies as plain values, streams of events.

    agent = broker.cluster("agent-cluster-1")
    await agent.advertise(cpu="10", memory="16Gi")
    answer = await agent.post("reservations", request_body(cpu="500m"))
    assert answer.status == 201

Our own client is left out on purpose: it could share a mistake with the server. Every answer is held
against the OpenAPI document on its way through, so a status, a media type or a field that the document
does not have fails whichever test meets it first.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

import aiohttp
import msgspec
import yarl

from kubelend.transports import tls
from kubelend.wire import bodies, openapi, problems, routes
from kubelend.wire.route import API, COMMON_ERRORS, IDEMPOTENCY_KEY, LAST_EVENT_ID, Route
from waiting import PATIENCE

Json = Any


def offer(
    cluster: str, cpu: str = "4", memory: str = "8Gi", *, gpu: str = "", **fields: Json
) -> Json:
    """The body of an advertisement of an empty cluster; `fields` go beside its resources."""
    capacity = {"cpu": cpu, "memory": memory} | ({"gpu": gpu} if gpu else {})
    return {"clusterID": cluster, "resources": {"capacity": capacity}} | fields


def request_body(cpu: str = "1", memory: str = "1Gi", *, gpu: str = "", **fields: Json) -> Json:
    """The body of a request for a reservation."""
    wanted = {"cpu": cpu, "memory": memory} | ({"gpu": gpu} if gpu else {})
    return {"requestedResources": wanted} | fields


class Answer(NamedTuple):
    """What came back."""

    status: int
    headers: Mapping[str, str]
    content: bytes

    @property
    def json(self) -> Json:
        return json.loads(self.content)

    @property
    def problem(self) -> bodies.Problem:
        """The body of an error; that it is one is checked."""
        assert self.headers["Content-Type"] == problems.CONTENT_TYPE, self
        return msgspec.json.decode(self.content, type=bodies.Problem)

    @property
    def refusal(self) -> tuple[int, str]:
        """The status and the code of an error."""
        return self.status, self.problem.code


class Caller:
    """The holder of one certificate."""

    def __init__(self, port: int, directory: Path, name: str) -> None:
        self.name = name
        self.port = port
        self.context = tls.client_context(directory)

    @cached_property
    def session(self) -> aiohttp.ClientSession:
        """Made by the first call: only then an event loop runs for sure."""
        connector = aiohttp.TCPConnector(ssl=self.context, limit=0)
        return aiohttp.ClientSession(
            f"https://localhost:{self.port}", connector=connector, timeout=_TIMEOUT
        )

    async def hang_up(self) -> None:
        """Close all connections; the next call makes new ones."""
        if "session" in self.__dict__:
            await self.session.close()
            del self.session

    # -- any call: parts of a path below /api/v1, or one absolute path as it is

    async def get(self, *path: str, **query: str) -> Answer:
        return await self.call("GET", *path, query=query)

    async def post(
        self, *path_and_body: Json, key: str = "", content: bytes | None = None, **query: str
    ) -> Answer:
        """The last argument is the body unless it is a text; `content` is sent as it is."""
        *path, body = path_and_body
        if isinstance(body, str):
            path, body = [*path, body], None
        headers = {IDEMPOTENCY_KEY: key} if key else {}
        if body is not None:
            content = json.dumps(body).encode()
        return await self.call("POST", *path, query=query, content=content, headers=headers)

    async def put(self, *path_and_body: Json) -> Answer:
        """The last argument is the body."""
        *path, body = path_and_body
        return await self.call("PUT", *path, content=json.dumps(body).encode())

    async def delete(self, *path: str) -> Answer:
        return await self.call("DELETE", *path)

    async def call(
        self,
        method: str,
        *path: str,
        query: Mapping[str, str] | None = None,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        url = address(*path, **(query or {}))
        async with self.session.request(method, url, data=content, headers=headers) as response:
            answer = Answer(response.status, response.headers, await response.read())
        check_documented(method, url.raw_path, answer)
        return answer

    # -- what must succeed

    async def advertise(self, cpu: str = "4", memory: str = "8Gi", **fields: Json) -> Json:
        """Publish what this cluster offers; gives the answer's body."""
        answer = await self.post("advertisements", offer(self.name, cpu, memory, **fields))
        assert answer.status == 200, answer
        return answer.json

    async def reserve(
        self, cpu: str = "1", memory: str = "1Gi", *, key: str = "", **fields: Json
    ) -> Json:
        """Borrow what must be placed; gives the reservation."""
        answer = await self.post("reservations", request_body(cpu, memory, **fields), key=key)
        assert answer.status == 201, answer
        return answer.json

    async def queue(self, cpu: str = "1", memory: str = "1Gi", **fields: Json) -> Json:
        """Borrow what must wait; gives the reservation."""
        answer = await self.post("reservations", request_body(cpu, memory, **fields))
        assert answer.status == 202, answer
        return answer.json

    async def read(self, *path: str, **query: str) -> Json:
        """Get what must be there."""
        answer = await self.get(*path, **query)
        assert answer.status == 200, answer
        return answer.json

    async def phase_of(self, reservation: str) -> str:
        return str((await self.read("reservations", reservation))["status"]["phase"])

    # -- the stream of instructions

    @asynccontextmanager
    async def stream(self, after: str = "") -> AsyncIterator[Stream]:
        headers = {LAST_EVENT_ID: after} if after else {}
        url = address("instructions", "stream")
        async with self.session.get(url, headers=headers, timeout=_ENDLESS) as response:
            yield Stream(response)


class Event(NamedTuple):
    """What stands between two empty lines of a stream."""

    name: str = ""
    id: str = ""
    data: Json = None
    comment: str = ""

    @property
    def instruction(self) -> tuple[str, str, str]:
        """Which side has to do what with which reservation."""
        return self.data["role"], self.data["action"], self.data["reservation"]["id"]


class Stream:
    """The reading end of a stream of server-sent events."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response

    async def next(self) -> Event | None:
        """Whatever comes next, a comment too; None at the end."""
        lines: list[str] = []
        async with asyncio.timeout(PATIENCE):
            while line := (await self.response.content.readline()).decode():
                if line == "\n":
                    return _event(lines)
                lines.append(line.removesuffix("\n"))
        return None

    async def event(self) -> Event:
        """The next that is no comment."""
        while (found := await self.next()) is not None:
            if not found.comment:
                return found
        raise AssertionError("the stream has ended")

    async def events(self, count: int) -> list[Event]:
        return [await self.event() for _ in range(count)]

    async def rest(self) -> list[Event]:
        """All that is still to come before it ends."""
        found = []
        while (event := await self.next()) is not None:
            found.append(event)
        return found


def address(*path: str, **query: str) -> yarl.URL:
    """Parts of a path below /api/v1, each quoted whole; or one absolute path as it is."""
    absolute = path[0].startswith("/")
    text = path[0] if absolute else "/".join((API, *(quote(p, safe="") for p in path)))
    return yarl.URL(text + (f"?{urlencode(query)}" if query else ""), encoded=True)


def check_documented(method: str, path: str, answer: Answer) -> None:
    """Fail if a client that knows only the OpenAPI document would be surprised by an answer."""
    route = route_of(method, path)
    if route is None:
        return
    described = DOCUMENT["paths"][route.path][method.lower()]["responses"]
    known = described.get(str(answer.status))
    if known is None and answer.status in ALWAYS_POSSIBLE:
        known = described["default"]
    assert known is not None, f"{method} {route.path} does not document {answer.status}: {answer}"
    if not answer.content:
        assert "content" not in known, f"{method} {route.path} answers nothing"
        return
    media_type = answer.headers["Content-Type"].partition(";")[0]
    assert media_type in known["content"], f"{method} {route.path} does not document {media_type}"
    _check_body(route, media_type, answer)


ALWAYS_POSSIBLE = {403, 408, 413, 429, 500, 503}
"""Statuses that every route may answer: they are the document's `default`."""


def route_of(method: str, path: str) -> Route | None:
    for route, pattern in _PATTERNS:
        if route.method == method and pattern.fullmatch(path):
            return route
    return None


def _check_body(route: Route, media_type: str, answer: Answer) -> None:
    if media_type == problems.CONTENT_TYPE:
        kind: Any = bodies.Problem
        known = {found.code for found in (*route.declared_errors, *COMMON_ERRORS)}
        assert answer.problem.code in known, f"{route.name} does not document {answer.problem}"
    elif media_type == "application/json":
        kind = route.responses[answer.status]
    else:
        return
    # Nothing beside the type's fields, or it would be lost on the way there and back.
    again = msgspec.json.decode(msgspec.json.encode(msgspec.json.decode(answer.content, type=kind)))
    assert again == answer.json, f"{route.name} answers what {kind} does not have"


def _event(lines: list[str]) -> Event:
    fields: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        fields[name or "comment"] = value.strip()
    data = json.loads(fields["data"]) if "data" in fields else None
    return Event(fields.get("event", ""), fields.get("id", ""), data, fields.get("comment", ""))


_TIMEOUT = aiohttp.ClientTimeout(total=PATIENCE)
_ENDLESS = aiohttp.ClientTimeout(sock_connect=PATIENCE)
DOCUMENT = openapi.document("test")
# Literal paths first: `instructions/stream` is no reservation called stream.
_PATTERNS = sorted(
    ((route, re.compile(re.sub(r"\{\w+\}", "[^/]+", route.path))) for route in routes.ROUTES),
    key=lambda found: "{" in found[0].path,
)
