"""A broker that says what it is told to, over real TLS."""

import pytest

from certificates import Certificates


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return Certificates(tmp_path_factory.mktemp("pki"))
