"""Logging belongs to the whole process: a test that sets it up must not set it up for the next one."""

import logging

import pytest
import structlog


@pytest.fixture
def own_logging():
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    root.handlers[:] = []
    yield
    root.setLevel(level)
    root.handlers[:] = handlers
    logging.captureWarnings(False)
    structlog.contextvars.clear_contextvars()
    structlog.reset_defaults()
