"""Logging belongs to the whole process: a test that sets it up must not set it up for the next one."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import structlog


@contextmanager
def put_back() -> Iterator[None]:
    """Everything is as before behind it, also loggers that were used meanwhile."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    configured = structlog.get_config() if structlog.is_configured() else None
    root.handlers[:] = []
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers
        logging.captureWarnings(False)
        structlog.contextvars.clear_contextvars()
        structlog.reset_defaults()
        if configured is not None:
            structlog.configure(**configured)
        _forget_first_uses()


def _forget_first_uses() -> None:
    """A logger that was used once keeps what was set up then, and would be deaf to a capture of logs."""
    for module in [module for name, module in sys.modules.items() if name.startswith("kubelend.")]:
        log = vars(module).get("log")
        if log is not None:
            vars(log).pop("bind", None)
