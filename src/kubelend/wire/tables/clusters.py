"""Routes of clusters, for viewers and administrators."""

from __future__ import annotations

from kubelend.core import errors
from kubelend.wire import bodies
from kubelend.wire.route import API, PAGE_PARAMETERS, Access, Route

CLUSTER_ROUTES: tuple[Route, ...] = (
    Route(
        "list_clusters",
        "GET",
        f"{API}/clusters",
        "List clusters with their status",
        Access.READER,
        {200: bodies.ClusterList},
        parameters=PAGE_PARAMETERS,
        errors=(errors.InvalidInput, errors.Forbidden),
    ),
    Route(
        "get_cluster",
        "GET",
        f"{API}/clusters/{{cluster}}",
        "Get a cluster with its status",
        Access.OWNER,
        {200: bodies.Cluster},
        errors=(errors.Forbidden, errors.NotFound),
    ),
    Route(
        "cordon",
        "POST",
        f"{API}/clusters/{{cluster}}/cordon",
        "Cordon a cluster: no new reservations are placed on it",
        Access.ADMIN,
        {200: bodies.Cluster},
        bodies.CordonRequest,
        errors=(errors.InvalidInput, errors.Forbidden, errors.NotFound),
        idempotent=True,
    ),
    Route(
        "uncordon",
        "POST",
        f"{API}/clusters/{{cluster}}/uncordon",
        "Uncordon a cluster",
        Access.ADMIN,
        {200: bodies.Cluster},
        errors=(errors.Forbidden, errors.NotFound),
        idempotent=True,
    ),
    Route(
        "drain",
        "POST",
        f"{API}/clusters/{{cluster}}/drain",
        "Cordon a cluster and move its reservations to others; those that fit nowhere else are released",
        Access.ADMIN,
        {200: bodies.DrainResult},
        bodies.CordonRequest,
        errors=(errors.InvalidInput, errors.Forbidden, errors.NotFound),
    ),
    Route(
        "remove_cluster",
        "DELETE",
        f"{API}/clusters/{{cluster}}",
        "Delete a cluster without active reservations",
        Access.ADMIN,
        {204: None},
        errors=(errors.Forbidden, errors.NotFound, errors.Conflict),
    ),
)
