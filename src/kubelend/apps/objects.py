"""The broker's objects in Kubernetes, for its composition root: where they are, and who looks after them."""

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
"""For so many times `--agent-timeout` an agent listens to its mailbox and says nothing until it is taken to
be gone. Its place is free much sooner; but one that only listens is not to begin anew all the time."""


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
    """In the same cluster, over connections of their own. The ledger may be elsewhere."""
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
