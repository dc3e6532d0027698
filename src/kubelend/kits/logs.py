"""Structured logging: one line per event, as JSON or as text, to one stream.

Composition roots call `setup` once, before anything else. Our code logs through
`structlog.get_logger(name)`; records of `logging`, which libraries use, go through the same processors.
Secrets are removed by `redact`.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import sys
from datetime import datetime
from typing import ClassVar, Final, Literal, TextIO

import msgspec
import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from kubelend.core.errors import InvalidSettings
from kubelend.kits import clock, tables

Format = Literal["json", "console"]

LEVELS: Final = ("debug", "info", "warning", "error", "critical")
FORMATS: Final[tuple[Format, ...]] = ("json", "console")
REDACTED: Final = "[redacted]"

_processors: Final[list[Processor]] = []
"""Changed in place, so that existing loggers use the processors of a later setup."""


def setup(level: str = "info", format: Format = "json", stream: TextIO | None = None) -> None:
    """Configure logging: level, format and stream.

    May be called again: all loggers switch to the new stream and format. A logger that was used before
    keeps its level, because checking the level for each line would be slow.
    """
    if level not in LEVELS:
        raise InvalidSettings(
            f"unknown log level {level!r}", hint=f"use one of {', '.join(LEVELS)}"
        )
    if format not in FORMATS:
        raise InvalidSettings(f"unknown log format {format!r}", hint=f"use {' or '.join(FORMATS)}")
    stream = _LineLogger.stream = sys.stderr if stream is None else stream
    # Not the default rich traceback, which prints local variables and thereby possibly secrets.
    console = structlog.dev.ConsoleRenderer(
        colors=stream.isatty() and "NO_COLOR" not in os.environ,
        exception_formatter=structlog.dev.plain_traceback,
    )
    _processors[:] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.format_exc_info,
        redact,
        _order_keys,
        *((_printable, console) if format == "console" else (_json,)),
    ]
    threshold = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=_processors,
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=_LineLogger,
        cache_logger_on_first_use=True,
    )
    root = logging.getLogger()
    root.handlers = [each for each in root.handlers if not isinstance(each, _StructlogHandler)]
    root.addHandler(_StructlogHandler())
    root.setLevel(threshold)
    logging.captureWarnings(True)


def redact(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """Redact values with secret-looking keys and secrets inside texts, and convert values to plain JSON
    types.
    """
    is_plain = _is_plain("\n".join([text for text in event.values() if type(text) is str]))
    for name, value in event.items():
        if _is_secret(name) and value is not None:
            event[name] = REDACTED
        elif not (is_plain and type(value) is str):
            event[name] = _cleaned(value)
    return event


# -- secrets

_SECRET_NAME: Final = re.compile(
    r"token(?!_?id$)|secret|passphrase|password|passwd|authori[sz]ation|credential|cookie|private|pem$"
    r"|(?<!idempotency.)(?<!request.)keys?$",
    re.IGNORECASE,
)
# Secrets inside texts: a marker that is fast to find, the pattern and its replacement.
_SECRET_TEXTS: Final = (
    # Without an end marker everything up to the end: a truncated key is secret too.
    ("-----BEGIN", re.compile(r"-----BEGIN.*?(?:-----END[^-]*+-----|\Z)", re.DOTALL), REDACTED),
    ("://", re.compile(r"(?<=://)[^/\s@]++(?=@)"), REDACTED),
    *((each, re.compile(r"(?<=bearer )\S++", re.I), REDACTED) for each in ("earer ", "EARER ")),
    # A join token: its ID is public and identifies it.
    ("kl1.", re.compile(r"\b(kl1\.[\w-]++\.)[\w-]++", re.ASCII), rf"\1{REDACTED}"),
)
_MAX_DEPTH: Final = 4
_MAX_INTEGER: Final = 2**63


@functools.lru_cache(maxsize=1024)
def _is_secret(name: str) -> bool:
    return _SECRET_NAME.search(name) is not None


def _is_plain(text: str) -> bool:
    """Whether `_cleaned_text` would leave it as it is: one check for the whole line is half of its cost."""
    return text.isascii() and not any(marker in text for marker, _, _ in _SECRET_TEXTS)


def _cleaned(value: object, depth: int = 0) -> object:
    match value:
        case None | bool() | float():
            return value
        case int() if abs(value) < _MAX_INTEGER:
            return value
        case dict() | list() | tuple() | set() | frozenset() if depth >= _MAX_DEPTH:
            return "[too deep]"
        case dict():
            return {
                str(name): REDACTED if _is_secret(str(name)) else _cleaned(part, depth + 1)
                for name, part in value.items()
            }
        case list() | tuple() | set() | frozenset():
            return [_cleaned(part, depth + 1) for part in value]
        case _:
            return _cleaned_text(_text(value))


def _text(value: object) -> str:
    match value:
        case datetime():
            return value.isoformat()
        case bytes() | bytearray() | memoryview():
            return f"[{len(value)} bytes]"
        case BaseException():
            return repr(value)
        case _:
            return str(value)


def _cleaned_text(text: str) -> str:
    for marker, pattern, replacement in _SECRET_TEXTS:
        if marker in text:
            text = pattern.sub(replacement, text)
    # A lone surrogate, as in a path that is not UTF-8, cannot be encoded as JSON.
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


# -- the line

_encode: Final = msgspec.json.Encoder().encode


def _order_keys(logger: WrappedLogger, _: str, event: EventDict) -> EventDict:
    """Put timestamp, level, logger and event first, for people who read JSON."""
    return {
        "timestamp": clock.utc_now(),
        "level": event.pop("level"),
        "logger": logger.name,
        "event": event.pop("event"),
        **event,
    }


def _json(_: WrappedLogger, __: str, event: EventDict) -> str:
    return _encode(event).decode()


def _printable(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """Escape control characters: texts from other clusters must not start a line or move the cursor."""
    event["timestamp"] = f"{event['timestamp']:%Y-%m-%dT%H:%M:%S.%f}"[:-3] + "Z"
    for name, value in event.items():
        if isinstance(value, str):
            escape = tables.sanitize_lines if name == "exception" else tables.sanitize_line
            event[name] = escape(value)
    return event


class _LineLogger:
    """Output of log lines. A stream that is full, broken or closed must not stop the process."""

    stream: ClassVar[TextIO] = sys.stderr

    def __init__(self, name: str = "") -> None:
        self.name = name

    def msg(self, line: str) -> None:
        try:  # not `suppress`, which costs half as much as the write
            self.stream.write(line + "\n")
            self.stream.flush()
        except (OSError, ValueError):
            pass

    debug = info = warning = error = critical = exception = msg


# -- records of the standard library


class _StructlogHandler(logging.Handler):
    """Forwards records of `logging` to structlog."""

    def emit(self, record: logging.LogRecord) -> None:
        level = min(max(record.levelno // 10 * 10, logging.DEBUG), logging.CRITICAL)
        try:
            text = record.getMessage()
        except (TypeError, ValueError, KeyError):
            text = f"{record.msg} {record.args}"
        structlog.get_logger(record.name).log(level, text, exc_info=record.exc_info)
