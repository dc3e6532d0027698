"""Replicates the leader's commits to followers: every version of the head contains one commit.

Implements the broker's port `Replica`. Writes nothing, and watches only the head.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, closing
from typing import TypeVar

from kubelend.core.errors import StoreFailed
from kubelend.core.events import Archived, Change, ClusterDeleted, RecordDeleted
from kubelend.core.models import ClusterId, ReservationId
from kubelend.core.records import CommittedChanges, WorkingSet
from kubelend.kube.access import KubeConfig
from kubelend.kube.client import Client
from kubelend.kube.watching import Deleted, Listed, list_and_watch
from kubelend.stores import kube_failures, kube_head, kube_loading, kube_projection
from kubelend.stores.kube_head import HeadState, RecordWrite
from kubelend.stores.kube_keeping import HeadRecord
from kubelend.stores.kube_objects import HEAD_NAME, LEDGER_RECORDS
from kubelend.stores.kube_sights import ObjectCache
from kubelend.stores.kubernetes import KubernetesStore
from kubelend.wire.broker_objects import LedgerRecord

QueryResult = TypeVar("QueryResult")


class KubernetesReplica:
    """Follows the store of one namespace, commit by commit."""

    def __init__(self, access: KubeConfig, namespace: str) -> None:
        self._access = access
        self._namespace = namespace

    async def follow(self) -> AsyncGenerator[WorkingSet | CommittedChanges, None]:
        with kube_failures.translate_api_errors(self._access.server, self._namespace):
            async with Client.open(self._access) as client:
                heads = list_and_watch(
                    client,
                    LEDGER_RECORDS,
                    self._namespace,
                    fields=f"metadata.name={HEAD_NAME}",
                    report=_raise_watch_error,
                )
                async with aclosing(heads), aclosing(self._commits(client, heads)) as commits:
                    async for commit in commits:
                        yield commit

    async def query(self, query: Callable[[KubernetesStore], QueryResult]) -> QueryResult:
        return await asyncio.to_thread(self._query, query)

    def _query(self, query: Callable[[KubernetesStore], QueryResult]) -> QueryResult:
        with closing(KubernetesStore.open_readonly(self._access, self._namespace)) as store:
            return query(store)

    async def _commits(
        self, client: Client, heads: AsyncGenerator[object, None]
    ) -> AsyncGenerator[WorkingSet | CommittedChanges, None]:
        epoch, sequence = 0, 0
        async for found in heads:
            if isinstance(found, Deleted):
                raise kube_failures.head_deleted_error()
            if isinstance(found, Listed) and not found.objects:
                continue  # no broker has led here yet
            if isinstance(found, LedgerRecord):
                state = kube_head.state_from_object(found)
                if state.epoch <= epoch and state.sequence <= sequence:
                    continue  # already replicated
                if (state.epoch, state.sequence) == (epoch, sequence + 1) and not state.elsewhere:
                    sequence = state.sequence
                    yield CommittedChanges(list(_replicated_changes(state)), state.revision)
                    continue
            # Also after a change of leader, which does not report what was deleted before it loaded.
            head = HeadRecord(client, self._namespace)
            cache = ObjectCache(client, self._namespace, head)
            records, sequence = await kube_loading.snapshot(head, cache)
            epoch = head.state.epoch
            yield records


def _raise_watch_error(error: str) -> None:
    """Ends the watch instead of retrying: meanwhile the follower has to report that it cannot replicate."""
    if error:
        raise StoreFailed(error)


def _replicated_changes(state: HeadState) -> Iterator[Change]:
    for write in state.changes.writes:
        yield from _replicated_change(write)


def _replicated_change(write: RecordWrite) -> Iterator[Change]:
    if write.text:
        yield kube_projection.decode_record_text(write.kind, write.text)
    if write.text and not write.is_archived:
        return
    match write.kind:
        case "cluster":
            yield ClusterDeleted(ClusterId(write.id))
        case "reservation":
            yield Archived(ReservationId(write.id))
        case "member" | "token" | "limits":
            yield RecordDeleted(write.kind, write.id)
