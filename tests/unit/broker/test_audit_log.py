"""The audit log: search, truncation, and throttled rejections."""

import asyncio
import contextlib

import pytest
from msgspec.structs import replace

import make
from clocks import Clock
from kubelend.broker.audit_log import (
    LINES_PER_READ,
    MAX_FULL_ENTRIES,
    MAX_FULL_UNAUTHENTICATED,
    MAX_UNAUTHENTICATED_KINDS,
    THROTTLE_WINDOW,
    AuditLog,
    AuditThrottle,
)
from kubelend.broker.metrics import BrokerMetrics
from kubelend.broker.service import Broker, BrokerRules
from kubelend.core import audit_log
from kubelend.core.audit_log import Actor, AuditEntry
from kubelend.core.errors import Forbidden
from kubelend.core.events import AuditLogTruncated
from kubelend.stores.memory import MemoryStore

MALLORY = Actor("mallory", "cluster")


class Scene:
    def __init__(self):
        self.store = MemoryStore()
        self.clock = Clock()
        self.broker = Broker(lambda: self.store, self.clock, BrokerRules(), BrokerMetrics())
        self.audit_log = AuditLog(self.broker, retention=make.HOUR)

    async def refuse(self, count=1, action="renew"):
        """Each from a name of its own, so that none is only counted."""
        for number in range(count):
            actor = Actor(f"mallory-{number}", "cluster")
            self.audit_log.append_rejection(actor, action, "reservation/rsv-1", Forbidden("no"))
        await self.broker.wait_durable()

    async def numbers(self, **search):
        search = {"matches": lambda record: True, "before": None, "limit": 10} | search
        found = await self.audit_log.search(**search)
        return [record.number for record, _ in found.lines], found.before

    def is_whole(self):
        start, end = self.store.audit_log_bounds()
        return not list(audit_log.verify_chain(self.store.audit_lines(0, 1 << 20), start, end))


@pytest.fixture
async def scene():
    made = Scene()
    await made.broker.load()
    yield made
    await made.broker.close()


async def test_search_returns_the_newest_first_and_a_continue_position(scene):
    assert await scene.numbers() == ([], None)
    await scene.refuse(1, action="activate")
    await scene.refuse(24)
    assert await scene.numbers() == ([25, 24, 23, 22, 21, 20, 19, 18, 17, 16], 16)
    assert await scene.numbers(before=16) == ([15, 14, 13, 12, 11, 10, 9, 8, 7, 6], 6)
    assert await scene.numbers(before=6) == ([5, 4, 3, 2, 1], None)
    await scene.refuse(2 * LINES_PER_READ)
    assert await scene.numbers(matches=lambda record: record.action == "activate") == ([1], None)


async def test_line_is_returned_once_despite_a_truncation_between_two_batches(scene):
    await scene.refuse(2 * LINES_PER_READ)

    def cut_now(record):
        if record.number == 2 * LINES_PER_READ:
            scene.store.commit([AuditLogTruncated(10)], scene.store.load().revision)
        return True

    numbers, before = await scene.numbers(matches=cut_now, limit=2 * LINES_PER_READ)
    assert (numbers, before) == ([*range(2 * LINES_PER_READ, 10, -1)], None)


async def test_old_lines_are_truncated_and_the_chain_stays_valid(scene):
    await scene.refuse(30)
    scene.clock.pass_time(make.HOUR)
    await scene.audit_log.truncate()
    assert scene.store.audit_log_bounds()[0].number == 0, "within the retention"
    await scene.refuse(5)
    scene.clock.pass_time(make.SECOND)
    await scene.audit_log.truncate()
    start, end = scene.store.audit_log_bounds()
    assert (start.number, end.number) == (30, 36)
    newest, _ = (await scene.audit_log.search(lambda record: True, None, 1)).lines[0]
    assert (newest.action, newest.subject.partition(":")[0]) == (
        "AuditLogTruncated",
        "audit-log/30",
    )
    assert scene.is_whole()
    assert await scene.numbers() == ([36, 35, 34, 33, 32, 31], None)


@pytest.mark.parametrize("when", ["after a while", "at shutdown"])
async def test_counted_rejections_are_summarized(scene, when):
    running = asyncio.create_task(scene.audit_log.run())
    await asyncio.sleep(0)
    for _ in range(MAX_FULL_ENTRIES + 7):
        scene.audit_log.append_rejection(MALLORY, "reserve", "", Forbidden("no"))
    if when == "after a while":
        scene.clock.pass_time(THROTTLE_WINDOW)
        await scene.audit_log.truncate()
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    await scene.broker.wait_durable()
    found = await scene.audit_log.search(lambda record: True, None, 100)
    assert len(found.lines) == MAX_FULL_ENTRIES + 1
    assert found.lines[0][0].message.startswith("7 more within 60 s")


async def test_rejection_during_a_store_failure_is_dropped(scene):
    scene.broker.unready = "without its store"
    scene.audit_log.append_rejection(MALLORY, "reserve", "", Forbidden("no"))
    await scene.audit_log.truncate()
    await scene.broker.wait_durable()
    assert scene.store.audit_log_bounds()[1].number == 0


# -- throttled rejections


REJECTED = AuditEntry(
    make.T0,
    Actor("mallory", "cluster", "192.0.2.9"),
    "reserve",
    "",
    code="RateLimited",
    message="m",
)

OVER = make.T0 + THROTTLE_WINDOW


@pytest.fixture
def throttle():
    return AuditThrottle()


def unauthenticated(remote, name=""):
    return replace(REJECTED, actor=Actor(name, "applicant", remote))


def counted(summaries):
    return sum(int(found.message.partition(" more within")[0]) for found in summaries)


def test_first_rejections_are_written_and_the_others_counted(throttle):
    admitted = [throttle.admit(REJECTED) for _ in range(MAX_FULL_ENTRIES + 3)]
    assert admitted == [True] * MAX_FULL_ENTRIES + [False] * 3
    assert throttle.pop_summaries(make.T0) == []
    (summary,) = throttle.pop_summaries(OVER)
    assert summary.message == "3 more within 60 s, the last: m"
    assert (summary.at, summary.actor, summary.code) == (OVER, REJECTED.actor, "RateLimited")
    later = replace(REJECTED, at=OVER)
    assert all(throttle.admit(later) for _ in range(MAX_FULL_ENTRIES))
    assert throttle.pop_summaries(OVER + THROTTLE_WINDOW) == [], "none was counted"
    assert throttle.admit(replace(REJECTED, at=OVER + THROTTLE_WINDOW))


def test_kinds_are_counted_apart_by_name_or_network(throttle):
    for who in (
        lambda number: replace(REJECTED, actor=Actor("mallory", "cluster", f"192.0.2.{number}")),
        lambda number: unauthenticated(f"2001:db8::{number:x}"),
    ):
        assert sum(throttle.admit(who(number)) for number in range(50)) == MAX_FULL_ENTRIES
    for other in (
        {"actor": Actor("berlin", "cluster")},
        {"code": "Forbidden"},
        {"action": "renew"},
    ):
        assert throttle.admit(replace(REJECTED, **other))
    assert counted(throttle.pop_summaries(make.T0, is_stopping=True)) == 100 - 2 * MAX_FULL_ENTRIES
    assert throttle.pop_summaries(make.T0, is_stopping=True) == []


def test_unauthenticated_callers_write_few_lines_and_all_are_counted(throttle):
    """One IPv6 network has more addresses than there are lines, and names are free."""
    tries = 20_000
    addresses = [f"2001:db8:{n >> 8:x}:{n & 255:x}::{n}" for n in range(tries)]
    written = sum(throttle.admit(unauthenticated(remote, f"n-{remote}")) for remote in addresses)
    summaries = throttle.pop_summaries(OVER)
    assert written <= MAX_FULL_UNAUTHENTICATED
    assert len(summaries) <= MAX_UNAUTHENTICATED_KINDS + 1
    assert written + counted(summaries) == tries
    assert throttle.admit(REJECTED), "who is authenticated is not suppressed"
