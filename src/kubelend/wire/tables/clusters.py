"""Clusters as viewers see and administrators steer them."""

from __future__ import annotations

from kubelend.core import errors
from kubelend.wire import bodies
from kubelend.wire.route import API, PAGE, Access, Route

ROUTES: tuple[Route, ...] = (
    Route(
        "list_clusters",
        "GET",
        f"{API}/clusters",
        "All clusters and what the broker makes of them",
        Access.READER,
        {200: bodies.ClusterList},
        parameters=PAGE,
        errors=(errors.InvalidInput, errors.Forbidden),
    ),
    Route(
        "get_cluster",
        "GET",
        f"{API}/clusters/{{cluster}}",
        "One cluster and what the broker makes of it",
        Access.OWNER,
        {200: bodies.Cluster},
        errors=(errors.Forbidden, errors.NotFound),
    ),
    Route(
        "cordon",
        "POST",
        f"{API}/clusters/{{cluster}}/cordon",
        "Close a cluster to new reservations",
        Access.ADMIN,
        {200: bodies.Cluster},
        bodies.CordonRequest,
        errors=(errors.InvalidInput, errors.Forbidden, errors.NotFound),
        harmless_twice=True,
    ),
    Route(
        "uncordon",
        "POST",
        f"{API}/clusters/{{cluster}}/uncordon",
        "Open it again",
        Access.ADMIN,
        {200: bodies.Cluster},
        errors=(errors.Forbidden, errors.NotFound),
        harmless_twice=True,
    ),
    Route(
        "drain",
        "POST",
        f"{API}/clusters/{{cluster}}/drain",
        "Close it and move what it lends to others; what fits nowhere else is released",
        Access.ADMIN,
        {200: bodies.Drained},
        bodies.CordonRequest,
        errors=(errors.InvalidInput, errors.Forbidden, errors.NotFound),
    ),
    Route(
        "remove_cluster",
        "DELETE",
        f"{API}/clusters/{{cluster}}",
        "Forget a cluster that lends nothing",
        Access.ADMIN,
        {204: None},
        errors=(errors.Forbidden, errors.NotFound, errors.Conflict),
    ),
)
