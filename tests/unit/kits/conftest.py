"""What tests of the kits share."""

import pytest

import logging_state


@pytest.fixture
def own_logging():
    with logging_state.put_back():
        yield
