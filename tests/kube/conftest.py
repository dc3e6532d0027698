"""Fixtures of the tests on a real API server."""

import pytest

from kube_stores import Place
from tenants import Tenants


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
