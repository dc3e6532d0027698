"""`kubelend mailbox`: what an operator applies to the broker's cluster for each cluster that is to come."""

from __future__ import annotations

from typing import Annotated

import typer

from kubelend.cli import output
from kubelend.sources import names
from kubelend.wire import mailbox_manifests, mailboxes


def create(
    *,
    cluster_id: Annotated[
        str,
        typer.Option(help="Whose it is. What is written there counts as said by it.", metavar="ID"),
    ],
    namespace: Annotated[
        str,
        typer.Option(help="Of the cluster namespace; default cluster-ID.", metavar="NAME"),
    ] = "",
    user: Annotated[
        str,
        typer.Option(
            help="A user that the API server knows, instead of a service account of its own.",
            metavar="NAME",
        ),
    ] = "",
) -> None:
    """Print the objects of a mailbox, for `kubectl apply -f -` in the broker's cluster."""
    mailboxes.check_owner(cluster_id)
    place = namespace or f"cluster-{cluster_id.lower()}"
    names.parse(f"{place}/any")
    documents = mailbox_manifests.documents(cluster_id, place, user=user)
    print("---\n".join(map(output.yaml, documents)), end="")
