"""Failover from an unreachable provider, seen by both sides over their streams, and in the audit log."""

import pytest

import make

STEP = 5 * make.SECOND

pytestmark = pytest.mark.broker(stale_after=make.MINUTE, lost_after=make.MINUTE)


async def fall_silent(broker, *speaking):
    """Two minutes in which everybody else speaks."""
    for _ in range(2 * make.MINUTE // STEP):
        broker.clock.pass_time(STEP)
        for one in speaking:
            await one.advertise("4")
        await broker.expire()


async def test_requester_is_sent_on_and_the_provider_hears_of_it_when_it_is_back(broker):
    paris, oslo, r = (broker.cluster(name) for name in ("paris", "oslo", "r"))
    await paris.advertise("8")
    await oslo.advertise("4")
    made = await r.reserve()
    assert made["targetClusterID"] == "paris"
    async with r.stream() as stream:
        _, use = await stream.events(2)
        await fall_silent(broker, oslo)
        moved = await stream.event()
    assert moved.told == ("requester", "Use", made["id"])
    assert moved.data["message"] == "Use oslo for 1 CPU / 1Gi Memory"
    assert moved.data["reservation"]["status"]["message"] == (
        "Resources locked in cluster oslo. Moved from paris, unreachable since 12:00:00 UTC"
    )
    async with paris.stream(after=use.id) as stream:
        assert (await stream.event()).told == ("provider", "Withdraw", made["id"])


async def test_move_is_in_the_journal_as_the_brokers(broker):
    paris, oslo, r = (broker.cluster(name) for name in ("paris", "oslo", "r"))
    await paris.advertise("8")
    await oslo.advertise("4")
    await r.reserve()
    await fall_silent(broker, oslo)
    line = (await broker.viewer().read("audit"))["lines"][0]
    assert (line["actor"]["name"], line["action"]) == ("broker", "Placed")
    assert line["before"] == {"reason": "Locked", "target": "paris"}
    assert line["after"] == {"reason": "Moved", "target": "oslo"}


async def test_what_fits_nowhere_else_is_counted_and_logged(broker, log):
    paris, oslo, r = (broker.cluster(name) for name in ("paris", "oslo", "r"))
    await paris.advertise("8")
    await oslo.advertise("4")
    made = await r.reserve("6")
    await fall_silent(broker, oslo)
    status = (await r.read("reservations", made["id"]))["status"]
    assert (status["phase"], status["reason"]) == ("Reserved", "ProviderSilent")
    assert status["message"] == (
        "Stays in cluster paris, unreachable since 12:00:00 UTC; no other cluster fits yet"
    )
    kept = {"phase": "Reserved", "reason": "ProviderSilent"}
    assert broker.metric("kubelend_reservations", **kept) == 1
    line = (await broker.viewer().read("audit"))["lines"][0]
    assert (line["action"], line["after"]) == ("FailoverBlocked", {"reason": "ProviderSilent"})
    (logged,) = log.lines("Provider unreachable, failing over its reservations")
    assert logged["cluster"] == "paris"
    await paris.advertise("8")
    broker.clock.pass_time(make.SECOND)
    await broker.expire()
    back = (await r.read("reservations", made["id"]))["status"]
    assert (back["reason"], back["message"]) == ("Locked", "Resources locked in cluster paris")


async def test_zero_leaves_everything_where_it_is(start):
    broker = await start(stale_after=make.MINUTE, lost_after=make.NO_TIME)
    paris, oslo, r = (broker.cluster(name) for name in ("paris", "oslo", "r"))
    await paris.advertise("8")
    await oslo.advertise("4")
    made = await r.reserve()
    await fall_silent(broker, oslo)
    assert (await r.read("reservations", made["id"]))["targetClusterID"] == "paris"
