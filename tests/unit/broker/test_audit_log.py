"""The broker's audit log: searched newest first, page by page, and shortened without a gap."""

import asyncio
import contextlib

import pytest

import make
from clocks import Clock
from kubelend.broker.audit_log import LINES_PER_READ, MAX_FULL_ENTRIES, THROTTLE_WINDOW, AuditLog
from kubelend.broker.metrics import Metrics
from kubelend.broker.service import Broker, BrokerRules
from kubelend.core import audit_log
from kubelend.core.audit_log import Actor
from kubelend.core.errors import Forbidden
from kubelend.core.events import AuditLogTruncated
from kubelend.stores.memory import MemoryStore

MALLORY = Actor("mallory", "cluster")


class Scene:
    def __init__(self):
        self.store = MemoryStore()
        self.clock = Clock()
        self.broker = Broker(lambda: self.store, self.clock, BrokerRules(), Metrics())
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


async def test_search_gives_the_newest_first_and_says_where_to_go_on(scene):
    await scene.refuse(25)
    assert await scene.numbers() == ([25, 24, 23, 22, 21, 20, 19, 18, 17, 16], 16)
    assert await scene.numbers(before=16) == ([15, 14, 13, 12, 11, 10, 9, 8, 7, 6], 6)
    assert await scene.numbers(before=6) == ([5, 4, 3, 2, 1], None)


async def test_search_looks_through_more_than_one_portion(scene):
    await scene.refuse(1, action="activate")
    await scene.refuse(2 * LINES_PER_READ)
    assert await scene.numbers(matches=lambda record: record.action == "activate") == ([1], None)


async def test_line_is_shown_once_though_the_audit_log_is_cut_between_two_portions(scene):
    await scene.refuse(2 * LINES_PER_READ)

    def cut_now(record):
        if record.number == 2 * LINES_PER_READ:
            scene.store.commit([AuditLogTruncated(10)], scene.store.load().revision)
        return True

    numbers, before = await scene.numbers(matches=cut_now, limit=2 * LINES_PER_READ)
    assert (numbers, before) == ([*range(2 * LINES_PER_READ, 10, -1)], None)


async def test_empty_audit_log_has_nothing_to_show(scene):
    assert await scene.numbers() == ([], None)


async def test_what_is_too_old_is_cut_off_and_the_chain_stays_whole(scene):
    await scene.refuse(30)
    scene.clock.pass_time(make.HOUR)
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


async def test_nothing_is_cut_before_its_time(scene):
    await scene.refuse(3)
    scene.clock.pass_time(make.HOUR)
    await scene.audit_log.truncate()
    assert scene.store.audit_log_bounds()[0].number == 0


async def test_flood_is_logged_in_full_at_first_and_then_as_a_count(scene):
    for _ in range(MAX_FULL_ENTRIES + 7):
        scene.audit_log.append_rejection(MALLORY, "reserve", "", Forbidden("no"))
    scene.clock.pass_time(THROTTLE_WINDOW)
    await scene.audit_log.truncate()
    await scene.broker.wait_durable()
    found = await scene.audit_log.search(lambda record: True, None, 100)
    assert len(found.lines) == MAX_FULL_ENTRIES + 1
    assert found.lines[0][0].message.startswith("7 more within 60 s")


async def test_what_was_only_counted_is_logged_before_the_end(scene):
    running = asyncio.create_task(scene.audit_log.run())
    await asyncio.sleep(0)
    for _ in range(MAX_FULL_ENTRIES + 7):
        scene.audit_log.append_rejection(MALLORY, "reserve", "", Forbidden("no"))
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    await scene.broker.wait_durable()
    newest, _ = (await scene.audit_log.search(lambda record: True, None, 1)).lines[0]
    assert newest.message.startswith("7 more within 60 s")


async def test_refusal_while_the_store_is_away_is_no_error(scene):
    scene.broker.unready = "without its store"
    scene.audit_log.append_rejection(MALLORY, "reserve", "", Forbidden("no"))
    await scene.audit_log.truncate()
    await scene.broker.wait_durable()
    assert scene.store.audit_log_bounds()[1].number == 0
