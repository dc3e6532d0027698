"""Fixtures of the tests on a real API server."""

import pytest

from kube_stores import Place
from kubelend.envtest import servers
from tenants import Tenants


@pytest.fixture
def rules(kube):
    """For tests of rules that older servers do not know."""
    if kube.assets.version < servers.CEL_SINCE:
        pytest.skip(f"a server of version {kube.assets.version} has no rules")


@pytest.fixture
def place(kube):
    """A namespace for a store, or for the store of several brokers."""
    return Place(kube)


@pytest.fixture
def tenants(kube):
    """Cluster namespaces of a broker."""
    tenants = Tenants(kube)
    yield tenants
    tenants.close()
