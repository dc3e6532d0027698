"""Routes of advertisements."""

from __future__ import annotations

from kubelend.core import errors
from kubelend.wire import bodies
from kubelend.wire.route import API, Access, Route

ADVERTISEMENT_ROUTES: tuple[Route, ...] = (
    Route(
        "publish",
        "POST",
        f"{API}/advertisements",
        "Publish the caller's advertisement",
        Access.CLUSTER,
        {200: bodies.PublishResult},
        bodies.Advertisement,
        errors=(
            errors.InvalidInput,
            errors.InvalidQuantity,
            errors.InvalidDuration,
            errors.Forbidden,
            errors.IdentityInUse,
        ),
        idempotent=True,
    ),
    Route(
        "get_advertisement",
        "GET",
        f"{API}/advertisements/{{cluster}}",
        "Get a cluster's advertisement, with the reserved amounts",
        Access.OWNER,
        {200: bodies.Advertisement},
        errors=(errors.Forbidden, errors.NotFound),
    ),
)
