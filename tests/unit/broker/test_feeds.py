"""Open streams hold the newest of each reservation, for whom it concerns, until it is read."""

import asyncio

import make
from kubelend.broker.streams import StreamHub
from kubelend.core.events import Archived, ClusterDeleted
from kubelend.core.lifecycle import Phase, Role
from kubelend.core.members import Member, MembershipStatus
from kubelend.core.models import ClusterId, ReservationId
from waiting import PATIENCE

A, B, R = ClusterId("a"), ClusterId("b"), ClusterId("r")


def change(number, revision, *, target="a", left=(), requester="r"):
    return make.reservation(
        f"rsv-{number}",
        make.request(requester=requester),
        phase=Phase.RESERVED,
        target=target,
        left=left,
        revision=revision,
    )


def revisions(news):
    return [found.revision for found in news]


async def test_change_is_read_by_whom_it_concerns_and_nobody_else():
    feeds = StreamHub()
    a, b, r = (feeds.open(cluster, 0) for cluster in (A, B, R))
    feeds.publish([change(1, 1)])
    assert revisions(await a.read(0.01)) == [1]
    assert revisions(await r.read(0.01)) == [1]
    assert await b.read(0.01) == []


async def test_former_provider_hears_of_it_too():
    feeds = StreamHub()
    b = feeds.open(B, 0)
    feeds.publish([change(1, 1, left=(B,))])
    assert revisions(await b.read(0.01)) == [1]


async def test_slow_reader_gets_the_newest_of_each_in_order():
    feeds = StreamHub()
    a = feeds.open(A, 0)
    feeds.publish([change(1, 1), change(2, 2), change(1, 3)])
    feeds.publish([change(3, 4), change(2, 5)])
    assert [(f.id, f.revision) for f in await a.read(1)] == [
        ("rsv-1", 3),
        ("rsv-3", 4),
        ("rsv-2", 5),
    ]
    assert await a.read(0.01) == []


async def test_what_the_opening_told_is_not_told_again():
    feeds = StreamHub()
    a = feeds.open(A, 7)
    feeds.publish([change(1, 6), change(2, 7), change(3, 8)])
    assert revisions(await a.read(1)) == [8]


async def test_reader_is_woken_by_news():
    feeds = StreamHub()
    a = feeds.open(A, 0)
    reading = asyncio.create_task(a.read(60))
    await asyncio.sleep(0)
    feeds.publish([change(1, 1)])
    assert revisions(await reading) == [1]


async def test_every_stream_of_a_cluster_hears_it():
    feeds = StreamHub()
    first, second = feeds.open(A, 0), feeds.open(A, 0)
    feeds.publish([change(1, 1)])
    assert revisions(await first.read(1)) == revisions(await second.read(1)) == [1]


async def test_changes_of_clusters_and_the_archive_are_no_news():
    feeds = StreamHub()
    a = feeds.open(A, 0)
    feeds.publish([make.cluster("a"), ClusterDeleted(A), Archived(ReservationId("rsv-1"))])
    assert await a.read(0.01) == []


async def test_closing_wakes_the_reader_and_leaves_what_is_unread_to_it():
    feeds = StreamHub()
    a = feeds.open(A, 0)
    feeds.publish([change(1, 1)])
    feeds.close(a)
    assert a.closed
    assert revisions(await a.read(60)) == [1]


async def test_count_follows_what_is_open():
    feeds = StreamHub()
    streams = [feeds.open(A, 0), feeds.open(A, 0), feeds.open(R, 0)]
    assert (len(feeds), feeds.count(A), feeds.count(R), feeds.count(B)) == (3, 2, 1, 0)
    feeds.close(streams[0])
    feeds.close(streams[0])
    assert (len(feeds), feeds.count(A)) == (2, 1)
    feeds.close_all()
    assert len(feeds) == 0
    assert all(stream.closed for stream in streams)
    feeds.publish([change(1, 1)])
    assert await streams[1].read(0.01) == []


async def test_streams_of_a_revoked_cluster_end_and_no_others():
    feeds = StreamHub()
    first, second, other = feeds.open(A, 0), feeds.open(A, 0), feeds.open(B, 0)
    feeds.publish([Member(Role.VIEWER, "b", MembershipStatus.REVOKED, make.T0)])
    feeds.publish([Member(Role.CLUSTER, "a", MembershipStatus.ACCEPTED, make.T0)])
    assert len(feeds) == 3
    feeds.publish([Member(Role.CLUSTER, "a", MembershipStatus.REVOKED, make.T0)])
    assert (first.closed, second.closed, other.closed) == (True, True, False)
    assert (feeds.count(A), feeds.count(B)) == (0, 1)


async def test_streams_through_a_revoked_proxy_end_and_no_others():
    feeds = StreamHub()
    through, past, other = feeds.open(A, 0, "edge"), feeds.open(A, 0), feeds.open(B, 0, "core")
    feeds.publish([Member(Role.PROXY, "edge", MembershipStatus.REVOKED, make.T0)])
    assert (through.closed, past.closed, other.closed) == (True, False, False)


async def test_woken_reader_finds_nothing_and_goes_on():
    feeds = StreamHub()
    a = feeds.open(A, 0)
    feeds.wake_all()
    assert await asyncio.wait_for(a.read(2 * PATIENCE), PATIENCE) == []
    assert not a.closed
