"""Real clusters for tests: started when the first test asks for one, and only then imported.

async def test_something(kube_client, namespace):    the one cluster that all tests share
def test_faults(clusters):                           clusters of the test's own, to stop and to break
"""

import contextlib
import json
import os
import re
import secrets

import pytest
from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

# Rare garbage collections: API servers take a quarter less processor time, and 120 MB more memory each.
os.environ.setdefault("GOGC", "400")

REQUIRED = "KUBELEND_KUBE_TESTS"
MOST_FAILURES = 3
DIRECTORIES = ("tests/contract/", "tests/kube/")
"""Only tests below these may use an API server."""
OWN_CLUSTERS = {
    "clusters with Liqo": ("liqo", "liqo_faults"),
    "charts with Liqo": ("install",),
    "clusters without Liqo": ("kubectl_lend", "lab_command"),
    "benchmark": ("bench_kube",),
    "own API servers": ("deploy", "deploy_guide", "lab", "migrate", "peering_chart", "roles"),
}
"""Modules that start clusters of their own, and leave the shared one alone, in groups that share clusters or
an etcd."""
SECOND_SERVER = (
    *("advertisement_objects", "agent", "agent_objects", "agent_source"),
    *("cluster_namespace_requests", "cluster_namespace_sessions", "cluster_namespaces"),
    *("hold_chart", "liqo_api", "object_lifecycle", "objects_page", "placeholders"),
    *("request_rules", "reservation_objects", "transport", "two_brokers"),
)
"""Half of the others: all of them on one API server, one after the other, would take longer than all else."""
_GROUPS = {
    f"tests/kube/test_{module}.py": group
    for group, modules in {**OWN_CLUSTERS, "second API server": SECOND_SERVER}.items()
    for module in modules
}
SHARED = {"kube", "kube_client", "namespace", "place", "tenants"}
"""Fixtures of the shared cluster."""


class ByCluster(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    """Distributes tests by file, but all that share clusters to one worker.

    So there are few API servers in a run, and no other test works on one at the same time: tests may count
    its writes, pause its etcd, and run brokers that watch all namespaces. Likewise clusters with Liqo.
    """

    def _split_scope(self, nodeid):
        file = super()._split_scope(nodeid)
        shared = "API server" if file.startswith(DIRECTORIES) else file
        return _GROUPS.get(file, shared)


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return ByCluster(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_modifyitems(items):
    """Whatever needs a cluster can be chosen, or left out, by the mark `kube`."""
    chosen = [item for item in items if _needs_assets(item)]
    for item in chosen:
        if not item.nodeid.startswith(DIRECTORIES):
            raise pytest.UsageError(f"{item.nodeid} uses an API server: move it to {DIRECTORIES}")
        if item.nodeid.partition("::")[0] in OWN_CLUSTERS and SHARED.intersection(
            item.fixturenames
        ):
            raise pytest.UsageError(
                f"{item.nodeid} uses the shared cluster: remove it from OWN_CLUSTERS"
            )
    missing = _missing() if chosen else ""
    for item in chosen:
        item.add_marker(pytest.mark.kube)
        # By a mark, and not by the fixture: so all of a file's tests are one line of the summary.
        if missing and not _is_required():
            item.add_marker(pytest.mark.skip(reason=missing))


@pytest.fixture(scope="session")
def kube_assets():
    """The programs. Without them tests are skipped, or fail where they are required, as in CI."""
    from kubelend.envtest import assets

    if missing := _missing():
        refuse = pytest.fail if _is_required() else pytest.skip
        refuse(missing)
    return assets.find_assets()


class Servers:
    """One etcd and the cluster that tests share, each started when it is first asked for.

    One that did not start fails the test that asked, and is started anew for the next; after a few, no more.
    """

    def __init__(self, assets):
        self._assets = assets
        self._stack = contextlib.ExitStack()
        self._lab = self._kube = None
        self._failures = []

    def lab(self):
        from kubelend.envtest import servers as envtest_servers

        if self._lab is None:
            with self._counting_failures():
                self._lab = self._stack.enter_context(envtest_servers.run_api_servers(self._assets))
        return self._lab

    def kube(self):
        lab = self.lab()
        if self._kube is None:
            name = f"kube-{len(self._failures)}"
            with self._counting_failures():
                try:
                    [cluster] = lab.start(name)
                    _install(cluster)
                except Exception:
                    lab.clusters[name].kill()
                    raise
            self._kube = cluster
        return self._kube

    def stop(self):
        self._stack.close()

    @contextlib.contextmanager
    def _counting_failures(self):
        if len(self._failures) >= MOST_FAILURES:
            pytest.fail(f"no server is started any more: {self._failures[-1]}")
        try:
            yield
        except Exception as error:
            self._failures.append(error)
            raise


@pytest.fixture(scope="session")
def servers(kube_assets):
    servers = Servers(kube_assets)
    yield servers
    servers.stop()


@pytest.fixture(scope="module")
def lab(servers):
    """The store of all clusters of this run."""
    return servers.lab()


@pytest.fixture
def kube(servers):
    """A cluster that knows our kinds. It is every test's: leave it running."""
    return servers.kube()


@pytest.fixture(scope="session")
def liqo_assets(kube_assets):
    """Liqo's programs, and a scheduler and a controller manager. Without them tests are skipped, or fail."""
    from kubelend.core.errors import InvalidSettings
    from kubelend.envtest import assets

    try:
        return assets.find_liqo_assets()
    except InvalidSettings as error:
        refuse = pytest.fail if _is_required() else pytest.skip
        refuse(str(error))


@pytest.fixture(scope="session")
def helm():
    """What renders our charts. Without it tests are skipped, or fail where they are required."""
    import charts

    found = charts.find_helm()
    if found is None:
        refuse = pytest.fail if _is_required() else pytest.skip
        refuse("no helm: run make helm, or set KUBELEND_HELM")
    return found


@pytest.fixture
def clusters(lab):
    """Starts clusters that know our kinds and are gone at the end: `broker, lender = clusters(2)`."""
    started = []

    def start(count=1):
        found = lab.start(*(f"cluster-{secrets.token_hex(4)}" for _ in range(count)))
        started.extend(found)
        for cluster in found:
            _install(cluster)
        return found

    yield start
    for cluster in started:
        cluster.kill()


@pytest.fixture
def namespace(kube, request):
    """Of this test alone. Nobody empties it afterwards: there are no controllers in a lab."""
    import kube_objects

    name = kube_objects.create_namespace(kube, _namespace_name(request.node.name))
    yield name
    kube.call("DELETE", f"/api/v1/namespaces/{name}")


@pytest.fixture
async def kube_client(kube):
    """The administrator's."""
    from kubelend.kube import config
    from kubelend.kube.client import Client

    async with Client.open(config.config_from_kubeconfig(kube.admin_kubeconfig)) as client:
        yield client


def compact(etcd):
    """Compact all older revisions, so that watches from one of them fail with 410 Gone.

    Recent API servers also cache the last revisions: restart them to drop the cache. Requires etcd 3.5.
    """
    found = json.loads(etcd.request("POST", "/v3/kv/range", b'{"key": "AA=="}').body)
    order = {"revision": found["header"]["revision"], "physical": True}
    answer = etcd.request("POST", "/v3/kv/compaction", json.dumps(order).encode())
    assert answer.status == 200, answer.body


def _needs_assets(item):
    """Also one that is marked itself, because only some of its parameters do."""
    fixtures = getattr(item, "fixturenames", ())
    return "kube_assets" in fixtures or item.get_closest_marker("kube") is not None


def _missing():
    from kubelend.core.errors import InvalidSettings
    from kubelend.envtest import assets

    try:
        assets.locate_assets()
    except InvalidSettings as error:
        return str(error)
    return ""


def _is_required():
    return os.environ.get(REQUIRED) == "required"


def _install(cluster):
    from kubelend.envtest import servers as envtest_servers

    envtest_servers.install_crds(cluster)


def _namespace_name(test):
    words = re.sub(r"[^a-z0-9]+", "-", test.lower().removeprefix("test_")).strip("-")
    return f"{words[:40].strip('-') or 'test'}-{secrets.token_hex(4)}"
