"""Parser for server-sent events: bytes in, events out."""

from __future__ import annotations

from typing import NamedTuple

from kubelend.core.errors import UnexpectedAnswer

MAX_EVENT_BYTES = 1 << 20
"""Maximum bytes of an unfinished event. An instruction takes about 1000."""


class ServerSentEvent(NamedTuple):
    """One event, as the HTML standard defines it."""

    data: str
    id: str = ""
    name: str = ""


class EventStreamParser:
    """Incremental parser of an event stream."""

    def __init__(self) -> None:
        self._rest = b""
        self._id = ""
        self._name = ""
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> list[ServerSentEvent]:
        """Returns the events that end in this chunk; comments (keep-alives) are skipped."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        found = [event for line in lines if (event := self._parse_line(line)) is not None]
        if len(self._rest) + sum(map(len, self._data)) > MAX_EVENT_BYTES:
            raise UnexpectedAnswer("the stream of the broker contains an oversized event")
        return found

    def _parse_line(self, line: bytes) -> ServerSentEvent | None:
        text = line.decode("utf-8", "replace").removesuffix("\r")
        if not text:
            return self._finish_event()
        field, _, value = text.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            self._data.append(value)
        elif field == "id":
            self._id = value
        elif field == "event":
            self._name = value
        return None

    def _finish_event(self) -> ServerSentEvent | None:
        event = ServerSentEvent("\n".join(self._data), self._id, self._name) if self._data else None
        self._data, self._name = [], ""
        return event
