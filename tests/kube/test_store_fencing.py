"""Of two brokers that have the store open, only the later one changes anything, whenever the other wakes."""

import threading
from contextlib import closing, suppress

import pytest
from msgspec.structs import replace

import kube_stores
import make
from kube_stores import Gate, stored_state
from kubelend.core.audit_log import Actor, AuditEntry
from kubelend.core.errors import StoreFailed
from kubelend.core.events import Archived, ClusterDeleted, RecordDeleted
from kubelend.core.lifecycle import Phase, Reason, Role
from kubelend.core.members import Token, TokenId
from kubelend.core.models import ClusterId, ReservationId
from kubelend.stores.kubernetes.objects import (
    LEDGER_RECORDS,
    STORED_ADVERTISEMENTS,
    STORED_RESERVATIONS,
)

NAMES = ["rsv-1", "rsv-2", "rsv-3"]
TOKEN = Token(TokenId("abc"), "d1", Role.VIEWER, make.T0, "alice", make.T0, 5)
TOLD = AuditEntry(make.T0, Actor("alice", "admin"), "Cordoned", "cluster/a")
HELD = make.reservation("rsv-1", phase=Phase.RESERVED, target=ClusterId("a"), reserved_at=make.T0)
OVER = make.reservation("rsv-2", phase=Phase.RELEASED, reason=Reason.EXPIRED, finished_at=make.T0)


def versions(place):
    """Of all objects: any write changes one."""

    async def look(client):
        return {
            (resource.plural, found.metadata.name): found.metadata.resource_version
            for resource in (STORED_ADVERTISEMENTS, STORED_RESERVATIONS, LEDGER_RECORDS)
            for found in (await client.list(resource, place.namespace)).objects
        }

    return place.run(look)


def test_store_is_fenced_when_a_newer_one_is_opened(place):
    with closing(place.open()) as older, closing(place.open()) as newer:
        before = versions(place)
        with pytest.raises(StoreFailed, match="is the writer now"):
            older.commit([make.cluster("b")], 1)
        for call in (older.load, lambda: older.commit([make.cluster("b")], 1)):
            with pytest.raises(StoreFailed, match="another broker has written"):
                call()
        assert versions(place) == before
        assert newer.load().clusters == []


def test_reader_does_not_fence_the_writer_and_writes_nothing(place):
    with closing(place.open()) as store:
        store.commit([make.cluster("a"), HELD, TOLD], 1)
        before = versions(place)
        with closing(place.open_readonly()) as reader:
            assert [found.id for found in reader.load().reservations] == ["rsv-1"]
            assert len(reader.audit_lines(0, 9)) == 1
            assert reader.archived(ReservationId("rsv-1")) is None
        assert versions(place) == before
        store.commit([OVER], 2)


BASE = [make.cluster("a"), make.cluster("b"), HELD, OVER, TOKEN]
MADE = [
    make.cluster("c"),
    make.reservation("rsv-3"),
    Token(TokenId("new"), "d2", Role.VIEWER, make.T0, "alice", make.T0),
    TOLD,
]
CHANGED = [
    make.cluster("a", "cpu=9,memory=9Gi"),
    replace(HELD, target=ClusterId("b")),
    replace(TOKEN, uses_left=4),
    TOLD,
]
ENDED = [Archived(OVER.id), ClusterDeleted(ClusterId("b")), RecordDeleted("token", "abc"), TOLD]
"""What a broker is about to write when it falls asleep."""
MEANWHILE = [
    ClusterDeleted(ClusterId("a")),
    ClusterDeleted(ClusterId("c")),
    make.cluster("b", "cpu=7,memory=7Gi"),
    replace(HELD, phase=Phase.ACTIVE, target=ClusterId("b")),
    make.reservation("rsv-3", message="newer"),
    RecordDeleted("token", "abc"),
    RecordDeleted("token", "new"),
    replace(OVER, message="back again"),
    TOLD,
]
"""What another one writes then: of each record something else, or nothing at all."""


def asleep(place, changes, after):
    """A commit that stops before one of its writes; gives the gate, and the thread that it waits in."""
    gate = Gate()
    store = place.open(kube_stores.connecting(gate.around))
    store.load()
    gate.left = after

    def commit():
        with closing(store), suppress(StoreFailed):
            store.commit(changes, 2)

    thread = threading.Thread(target=commit)
    thread.start()
    return gate, thread


def overtake(newer):
    """With one commit more, so that whoever opens the store next does not repeat what was done meanwhile."""
    newer.load()
    newer.commit(MEANWHILE, 3)
    newer.commit([TOLD], 3)


def woken(gate, thread):
    gate.opened.set()
    thread.join(30)
    assert not thread.is_alive()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "changes, after",
    [
        *(pytest.param(MADE, after, id=f"made, {after}") for after in range(1, 8)),
        *(pytest.param(CHANGED, after, id=f"changed, {after}") for after in range(1, 7)),
        *(pytest.param(ENDED, after, id=f"ended, {after}") for after in range(1, 5)),
    ],
)
def test_suspended_broker_undoes_nothing_when_it_resumes(place, changes, after):
    with closing(place.open()) as first:
        first.commit(BASE, 1)
    gate, thread = asleep(place, changes, after)
    try:
        assert gate.reached.wait(30), "the commit has fewer writes"
        with closing(place.open()) as newer:
            overtake(newer)
    finally:
        woken(gate, thread)
    found = stored_state(place.open(), NAMES)
    assert found == stored_state(place.open_readonly(), NAMES)
    records, revision, archived, lines, _ = found
    clusters, reservations, _, tokens, _ = records
    assert (revision, clusters.keys(), tokens) == (3, {"b"}, {})
    assert clusters["b"] == MEANWHILE[2]
    assert reservations == {"rsv-1": MEANWHILE[3], "rsv-3": MEANWHILE[4], "rsv-2": MEANWHILE[7]}
    assert not any(archived.values())
    # Its own commit was kept whole before the other's, or not at all.
    assert len(lines) == (2 if after == 1 else 3)


def test_placeholders_of_a_suspended_broker_are_deleted_by_the_next_load(place):
    with closing(place.open()) as first:
        first.commit(BASE, 1)
    gate, thread = asleep(place, MADE, 2)
    try:
        assert gate.reached.wait(30)
        with closing(place.open()) as newer:
            overtake(newer)
            before = versions(place)
    finally:
        woken(gate, thread)
    with closing(place.open()) as last:
        last.load()
    assert versions(place).keys() == before.keys()
