"""Progress messages of the supervisor to the process that started it: JSON lines on stdout."""

from __future__ import annotations

import msgspec


class StepStarted(msgspec.Struct, frozen=True, tag="begun"):
    """A step has started."""

    title: str


class StepFinished(msgspec.Struct, frozen=True, tag="done"):
    """A step has finished."""

    title: str
    seconds: float
    lines: tuple[str, ...] = ()


class StartFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The start failed; all processes are stopped."""

    code: str
    message: str


class LabReady(msgspec.Struct, frozen=True, tag="ready"):
    """Everything is running. The last message."""


Message = StepStarted | StepFinished | StartFailed | LabReady


def encode_message(message: Message) -> bytes:
    return msgspec.json.encode(message) + b"\n"


def decode_message(line: bytes) -> Message:
    return _DECODER.decode(line)


_DECODER: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)
