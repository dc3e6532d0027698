"""Wiring of the controllers and cluster namespaces, and the location of the broker's objects."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kubelend.apps.settings import KUBERNETES, BrokerSettings
from kubelend.broker.service import Broker
from kubelend.broker.speakers import Speakers
from kubelend.stores import kube_places
from kubelend.wire.conversion import Terms

if TYPE_CHECKING:
    from kubelend.controllers.mailbox_pen import Granting
    from kubelend.controllers.mailboxes import Mailboxes
    from kubelend.controllers.office import Office
    from kubelend.kube.access import Access

SILENCES = 10
"""Multiple of `--agent-timeout` after which a silent agent's stream is closed. Its session can be claimed by
another agent much sooner, but an agent that only watches should not have to restart its stream often."""


def ledger(settings: BrokerSettings) -> str:
    """Returns the store URL, with the path of `--kubeconfig` filled in if the URL has none."""
    text = settings.ledger
    if not settings.kubeconfig or not text.startswith(KUBERNETES):
        return text
    url = urlsplit(text.removeprefix(KUBERNETES))
    if url.path:
        return text
    return f"{KUBERNETES}{settings.kubeconfig}{f'?{url.query}' if url.query else ''}"


@asynccontextmanager
async def office(settings: BrokerSettings, broker: Broker, terms: Terms) -> AsyncIterator[Office]:
    """Opens the controller manager, for the namespace and cluster of the store."""
    # Imported here: a broker without custom resources does not load the Kubernetes client.
    from kubelend.controllers.office import Office
    from kubelend.kube.client import Client

    access, namespace = _place(settings)
    async with Client.open(access) as client:
        yield Office(broker, client, namespace, terms)


@asynccontextmanager
async def mailboxes(
    settings: BrokerSettings,
    broker: Broker,
    terms: Terms,
    speakers: Speakers,
    granting: Granting | None,
) -> AsyncIterator[Mailboxes]:
    """Opens the cluster namespaces, with their own connections. The store may be elsewhere."""
    silence = SILENCES * settings.agent_timeout
    from kubelend.controllers.mailbox_pen import Means
    from kubelend.controllers.mailboxes import Mailboxes
    from kubelend.kube.client import Client

    access, namespace = _place(settings)
    async with Client.open(access) as client:
        means = Means(client, broker, terms, speakers, granting, silence)
        yield Mailboxes(means, namespace)


def _place(settings: BrokerSettings) -> tuple[Access, str]:
    text = ledger(settings)
    is_elsewhere = not text.startswith(KUBERNETES)
    place = kube_places.parse(
        settings.kubeconfig if is_elsewhere else text.removeprefix(KUBERNETES)
    )
    access = place.access()
    return access, place.namespace_for(access, settings.http_namespace)
