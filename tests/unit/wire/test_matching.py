"""A method and a path mean one route, or say why they mean none."""

import re

import pytest

from kubelend.core.errors import MethodNotAllowed, NotFound
from kubelend.wire import routes
from kubelend.wire.routes import ROUTES, RouteMatch


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_every_route_is_found_by_its_own_path(route):
    names = re.findall(r"{(\w+)}", route.path)
    found = routes.match_route(route.method, route.path.replace("{", "").replace("}", ""))
    assert isinstance(found, RouteMatch)
    assert found.route is route
    assert found.names == {name: name for name in names}


@pytest.mark.parametrize(
    "sent, name",
    [
        ("a", "a"),
        ("Team%20A%2FCluster_1", "Team A/Cluster_1"),
        ("%7Bcluster%7D", "{cluster}"),
        ("..", ".."),
    ],
)
def test_names_may_hold_any_text_once_decoded(sent, name):
    found = routes.match_route("GET", f"/api/v1/clusters/{sent}")
    assert isinstance(found, routes.RouteMatch)
    assert found.names == {"cluster": name}


@pytest.mark.parametrize(
    "path",
    [
        *("/", "", "/nix", "/api/v1/clusters/", "/api/v1/clusters/a/b/c", "/healthz/"),
        *("/api/v1/clusters/a%1B%5B2J", "/api/v1/clusters/a%0A", "/api/v1/clusters/%E2%80%A8"),
    ],
)
def test_other_paths_mean_nothing(path):
    assert isinstance(routes.match_route("GET", path), NotFound)


@pytest.mark.parametrize(
    "method, path, allowed",
    [
        ("PUT", "/api/v1/reservations", ["GET", "POST"]),
        ("POST", "/api/v1/clusters/a", ["DELETE", "GET"]),
        ("GET", "/api/v1/clusters/a/drain", ["POST"]),
    ],
)
def test_wrong_method_says_which_are_right(method, path, allowed):
    found = routes.match_route(method, path)
    assert isinstance(found, MethodNotAllowed)
    assert list(found.allowed) == allowed
