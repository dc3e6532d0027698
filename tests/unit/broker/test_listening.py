"""Who wants to hear of what has become durable; and records that are written once more."""

import pytest

import make
from kubelend.core.errors import Conflict
from kubelend.core.lifecycle import Reason
from kubelend.core.models import Cluster, Reservation, ReservationId

MINE = ReservationId("mine")

pytestmark = pytest.mark.broker("service", fails=True, offers={"a": ("4", "8Gi")})


async def test_listeners_hear_of_what_is_durable_and_of_a_ledger_that_was_read_anew(broker, store):
    heard = []
    broker.listeners.append(
        lambda changes: heard.append(
            None if changes is None else [one for one in changes if isinstance(one, Reservation)]
        )
    )
    held = await broker.reserve(make.request())
    assert heard == [[held]]
    await broker.load()
    assert heard == [[held], None]


async def test_reservation_may_have_a_name_of_its_own(broker):
    held = await broker.reserve(make.request(key="one"), MINE)
    assert held.id == MINE
    assert await broker.reserve(make.request(key="one"), MINE) == held
    with pytest.raises(Conflict, match="mine already exists"):
        await broker.reserve(make.request(key="two"), MINE)
    await broker.release_and_archive(MINE, Reason.DELETED)
    assert (await broker.reserve(make.request(key="two"), MINE)).id == MINE


async def test_record_is_written_once_more_as_it_is(broker, store):
    held = await broker.reserve(make.request())
    before = store.commits
    await broker.rewrite_record(held)
    assert store.commits == before + 1
    revision = broker.current()[0].revision
    released = await broker.release(held.id, Reason.BY_ADMIN)
    before = store.commits
    await broker.rewrite_record(held)
    assert store.commits == before
    assert broker.current()[0].reservation(held.id) == released
    assert broker.current()[0].revision == revision + 1


async def test_withdrawn_cluster_is_gone_from_the_store(broker, store):
    (known,) = (one for one in broker.current()[0].clusters.values() if isinstance(one, Cluster))
    await broker.withdraw(known.id)
    await broker.load()
    assert not broker.current()[0].clusters
