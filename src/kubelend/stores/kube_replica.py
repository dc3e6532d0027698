"""Replicates the leader's commits to followers: every version of the head contains one commit.

Implements the broker's port `Replica`. Writes nothing, and watches only the head.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, closing
from typing import TypeVar

from kubelend.core.errors import StoreFailed
from kubelend.core.events import Archived, Change, Dropped, Erased
from kubelend.core.models import ClusterId, ReservationId
from kubelend.core.records import News, Records
from kubelend.kube.access import Access
from kubelend.kube.client import Client
from kubelend.kube.watching import Deleted, Listed, follow
from kubelend.stores import kube_failures, kube_head, kube_loading, kube_projection
from kubelend.stores.kube_head import State, Write
from kubelend.stores.kube_keeping import Keeper
from kubelend.stores.kube_objects import HEAD, LEDGER
from kubelend.stores.kube_sights import Sights
from kubelend.stores.kubernetes import KubernetesStore
from kubelend.wire.broker_objects import LedgerRecord

Answer = TypeVar("Answer")


class KubernetesReplica:
    """Follows the store of one namespace, commit by commit."""

    def __init__(self, access: Access, namespace: str) -> None:
        self._access = access
        self._namespace = namespace

    async def follow(self) -> AsyncGenerator[Records | News, None]:
        with kube_failures.translated(self._access.server, self._namespace):
            async with Client.open(self._access) as client:
                heads = follow(
                    client,
                    LEDGER,
                    self._namespace,
                    fields=f"metadata.name={HEAD}",
                    report=_give_up,
                )
                async with aclosing(heads), aclosing(self._commits(client, heads)) as commits:
                    async for commit in commits:
                        yield commit

    async def ask(self, question: Callable[[KubernetesStore], Answer]) -> Answer:
        return await asyncio.to_thread(self._ask, question)

    def _ask(self, question: Callable[[KubernetesStore], Answer]) -> Answer:
        with closing(KubernetesStore.open_readonly(self._access, self._namespace)) as store:
            return question(store)

    async def _commits(
        self, client: Client, heads: AsyncGenerator[object, None]
    ) -> AsyncGenerator[Records | News, None]:
        epoch, sequence = 0, 0
        async for found in heads:
            if isinstance(found, Deleted):
                raise kube_failures.head_gone()
            if isinstance(found, Listed) and not found.objects:
                continue  # no broker has led here yet
            if isinstance(found, LedgerRecord):
                state = kube_head.state_of(found)
                if state.epoch <= epoch and state.sequence <= sequence:
                    continue  # already replicated
                if (state.epoch, state.sequence) == (epoch, sequence + 1) and not state.elsewhere:
                    sequence = state.sequence
                    yield News(list(_changes(state)), state.revision)
                    continue
            # Also after a change of leader, which does not report what was deleted before it loaded.
            head = Keeper(client, self._namespace)
            cache = Sights(client, self._namespace, head)
            records, sequence = await kube_loading.look(head, cache)
            epoch = head.state.epoch
            yield records


def _give_up(problem: str) -> None:
    """Ends the watch instead of retrying: meanwhile the follower has to report that it cannot replicate."""
    if problem:
        raise StoreFailed(problem)


def _changes(state: State) -> Iterator[Change]:
    for write in state.changes.writes:
        yield from _change(write)


def _change(write: Write) -> Iterator[Change]:
    if write.text:
        yield kube_projection.read(write.kind, write.text)
    if write.text and not write.is_archived:
        return
    match write.kind:
        case "cluster":
            yield Dropped(ClusterId(write.id))
        case "reservation":
            yield Archived(ReservationId(write.id))
        case "member" | "token" | "limits":
            yield Erased(write.kind, write.id)
