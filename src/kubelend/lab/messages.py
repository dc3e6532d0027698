"""What a supervisor says to whoever has started it, a line of JSON each, until all runs or it gives up."""

from __future__ import annotations

import msgspec


class Begun(msgspec.Struct, frozen=True, tag="begun"):
    """A step has begun."""

    title: str


class Done(msgspec.Struct, frozen=True, tag="done"):
    """It has been done, and this is what there is to see."""

    title: str
    seconds: float
    lines: tuple[str, ...] = ()


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """It has given up, and runs nothing any more."""

    code: str
    message: str


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """All runs, and it says no more."""


Message = Begun | Done | Failed | Ready


def encode(message: Message) -> bytes:
    return msgspec.json.encode(message) + b"\n"


def decode(line: bytes) -> Message:
    return _DECODER.decode(line)


_DECODER: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)
