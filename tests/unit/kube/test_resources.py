"""Where objects are found."""

import pytest

from config_maps import CONFIG_MAPS, ConfigMap
from kubelend.core.errors import InvalidInput
from kubelend.kube import resources
from kubelend.kube.resources import Resource
from kubelend.wire import objects

NODES = Resource("", "v1", "nodes", "Node", ConfigMap, namespaced=False)
LEASES = Resource("coordination.k8s.io", "v1", "leases", "Lease", ConfigMap)


@pytest.mark.parametrize(
    "resource, arguments, path",
    [
        pytest.param(CONFIG_MAPS, (), "/api/v1/configmaps", id="all namespaces"),
        pytest.param(CONFIG_MAPS, ("a",), "/api/v1/namespaces/a/configmaps", id="one namespace"),
        pytest.param(CONFIG_MAPS, ("a", "b"), "/api/v1/namespaces/a/configmaps/b", id="one object"),
        pytest.param(NODES, ("a", "n"), "/api/v1/nodes/n", id="of the whole cluster"),
        pytest.param(NODES, ("", "n", "status"), "/api/v1/nodes/n/status", id="its status"),
        pytest.param(
            LEASES, ("a",), "/apis/coordination.k8s.io/v1/namespaces/a/leases", id="of a group"
        ),
        pytest.param(
            CONFIG_MAPS,
            ("a/b", "../c?d"),
            "/api/v1/namespaces/a%2Fb/configmaps/..%2Fc%3Fd",
            id="a name cannot leave its place",
        ),
    ],
)
def test_path(resource, arguments, path):
    assert resource.path(*arguments) == path


def test_one_object_of_no_namespace_is_nowhere():
    with pytest.raises(InvalidInput, match="namespace"):
        CONFIG_MAPS.path("", "b")


@pytest.mark.parametrize("kind", objects.KINDS)
def test_own_kinds_know_where_they_are(kind):
    found = resources.resource_for(kind)
    assert found.api_version == "rear.fluidos.eu/v1alpha1"
    assert (found.kind, found.plural, found.type) == (kind.kind, kind.plural, kind)
