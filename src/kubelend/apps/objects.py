"""The broker's objects in Kubernetes, for its composition root: where they are, and who looks after them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kubelend.apps.settings import KUBERNETES, BrokerSettings
from kubelend.broker.service import Broker
from kubelend.stores import kube_places
from kubelend.wire.conversion import Terms

if TYPE_CHECKING:
    from kubelend.controllers.office import Office


def ledger(settings: BrokerSettings) -> str:
    """The text that names the store, with the kubeconfig in it if that was named apart."""
    text = settings.ledger
    if not settings.kubeconfig or not text.startswith(KUBERNETES):
        return text
    url = urlsplit(text.removeprefix(KUBERNETES))
    if url.path:
        return text
    return f"{KUBERNETES}{settings.kubeconfig}{f'?{url.query}' if url.query else ''}"


@asynccontextmanager
async def office(settings: BrokerSettings, broker: Broker, terms: Terms) -> AsyncIterator[Office]:
    """In the same namespace of the same cluster as the store."""
    # Late: a broker without objects does not load a client for Kubernetes.
    from kubelend.controllers.office import Office
    from kubelend.kube.client import Client

    place = kube_places.parse(ledger(settings).removeprefix(KUBERNETES))
    access = place.access()
    async with Client.open(access) as client:
        yield Office(broker, client, place.namespace_for(access, settings.http_namespace), terms)
