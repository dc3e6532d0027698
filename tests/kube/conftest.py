"""Fixtures of the tests on a real API server."""

import contextlib

import pytest

import liqo_sites
from kube_stores import Place
from kubelend.envtest import servers
from labs import Lab
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


_LIQO_LAB = contextlib.ExitStack()


@pytest.fixture(scope="session")
def liqo_lab(kube_assets, liqo_assets, tmp_path_factory):
    """Three clusters, two of them with Liqo, which all tests of a run share."""
    directory = tmp_path_factory.mktemp("liqo") / "clusters"
    with _LIQO_LAB:
        yield _LIQO_LAB.enter_context(liqo_sites.started(directory))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem):
    """It takes a fifth of a core, and ends with the last test that uses it, not with the run."""
    if "liqo_lab" not in getattr(nextitem, "fixturenames", ()):
        _LIQO_LAB.close()


@pytest.fixture(scope="module")
def liqo_module(liqo_lab):
    """Every module leaves nothing in any cluster, and an audit without findings."""
    yield liqo_lab
    liqo_lab.check_clean()


@pytest.fixture
def site(liqo_module):
    """Every test leaves no reservation. The peering goes a while later, and may serve the next test."""
    yield liqo_module
    liqo_module.release_all()


@pytest.fixture(scope="session")
def plain_lab(kube_assets, tmp_path_factory):
    """Clusters without Liqo, which the modules of a group share, and what `up` printed.

    The last of their tests ends it, if all go well.
    """
    lab = Lab(tmp_path_factory.mktemp("lab") / "clusters")
    code, out, err = lab.lab("up", "--no-liqo")
    assert (code, err) == (0, ""), out
    yield lab, out
    lab.lab("down")
