"""The steps of the demo. Each does one thing, checks that it happened, and gives the lines to show."""

from __future__ import annotations

import asyncio
import time

from kubelend.core import audit
from kubelend.core.errors import NoCapacity
from kubelend.core.ledger import Ledger
from kubelend.demo import clusters, telling
from kubelend.demo.stage import Stage, expect
from kubelend.kits import columns
from kubelend.stores import opening
from kubelend.wire import bodies

KEY = "demo-1"
WISH = bodies.ReservationRequest(bodies.Quantities("4", "16Gi", gpu="1"), duration="2h")
TOO_MUCH = bodies.ReservationRequest(bodies.Quantities("20", "32Gi", gpu="2"), duration="2h")


async def clusters_advertise(stage: Stage) -> list[str]:
    async with asyncio.timeout(clusters.PATIENCE):
        for member in stage.clusters.values():
            await member.joined.wait()
    known = await stage.admin.all_clusters()
    expect(
        sorted(one.advertisement.cluster_id for one in known if one.status.active)
        == sorted(stage.clusters),
        "not all clusters are active",
    )
    for one in known:
        name = one.advertisement.cluster_id
        stage.before[name] = await stage.available(name)
    headers = ("CLUSTER", "REGION", "CPU FREE", "MEMORY FREE", "GPU FREE", "RATING")
    return columns.aligned(headers, map(_offer, known), right=(2, 3, 4))


async def explain_shows_where_it_fits(stage: Stage) -> list[str]:
    found = await stage.borrower.client.explain(WISH)
    expect(found.fitting == 2, f"expected two clusters to fit, but {found.summary}")
    headers = ("CLUSTER", "FITS", "SCORE", "PRICE PER HOUR", "WHY NOT")
    rows = [_candidate(one) for one in found.candidates]
    asked = f"{_amounts(WISH.requested_resources)} for {WISH.duration}: {found.summary}"
    return [*telling.sentence(asked), *columns.aligned(headers, rows, right=(2, 3))]


async def borrow_locks_the_amount(stage: Stage) -> list[str]:
    best = (await stage.borrower.client.plan(WISH)).candidates[0].cluster_id
    stage.asked_at = time.perf_counter()
    stage.held = await stage.borrower.client.reserve(WISH, key=KEY)
    expect(stage.held.status.phase == "Reserved", f"it is {stage.held.status.phase}")
    expect(stage.held.target_cluster_id == best, f"it went to {stage.held.target_cluster_id}")
    left = await stage.available(best)
    return telling.sentence(
        f"{stage.held.id} is Reserved on {best}, and durable: {_amounts(left)} are left there"
    )


async def provider_hears_of_it(stage: Stage) -> list[str]:
    heard = await stage.lender.hears("Hold", stage.is_held)
    return telling.sentence(
        f"To {stage.lender.name}, {telling.duration(heard.at - stage.asked_at)} after"
        f" {stage.borrower.name} asked: {heard.instruction.message}"
    )


async def provider_acknowledges(stage: Stage) -> list[str]:
    stage.held = await stage.lender.client.acknowledge(stage.held.id)
    expect(stage.held.status.acknowledged_at is not None, "it is not acknowledged")
    heard = await stage.borrower.hears(
        "Use", lambda found: stage.is_held(found) and found.status.acknowledged_at is not None
    )
    return telling.sentence(f"To {stage.borrower.name}, by stream: {heard.instruction.message}")


async def retry_changes_nothing(stage: Stage) -> list[str]:
    again = await stage.borrower.client.reserve(WISH, key=KEY)
    expect(again.id == stage.held.id, f"it became another reservation, {again.id}")
    return [f"The same key, the same reservation: {again.id}"]


async def borrower_starts(stage: Stage) -> list[str]:
    stage.held = await stage.borrower.client.activate(stage.held.id)
    expect(stage.held.status.phase == "Active", f"it is {stage.held.status.phase}")
    return [f"{stage.held.id} is Active"]


async def no_is_explained(stage: Stage) -> list[str]:
    try:
        placed = await stage.borrower.client.reserve(TOO_MUCH)
    except NoCapacity as problem:
        lines = telling.sentence(f"{_amounts(TOO_MUCH.requested_resources)}? {problem.message}")
        expect(bool(problem.hint), "no remedy is given")
        return [*lines, *telling.sentence(f"What would help: {problem.hint}")]
    expect(False, f"it was placed on {placed.target_cluster_id}")
    return []


async def renew_keeps_it_longer(stage: Stage) -> list[str]:
    end = stage.held.status.expires_at
    stage.held = await stage.borrower.client.renew(stage.held.id, "4h")
    later = stage.held.status.expires_at
    if end is None or later is None or later <= end:
        expect(False, f"its end was {end} and is {later}")
        return []
    return [f"It ended at {end:%H:%M:%S} UTC, and now ends at {later:%H:%M:%S} UTC"]


async def release_gives_it_back(stage: Stage) -> list[str]:
    released_at = time.perf_counter()
    stage.held = await stage.borrower.client.release(stage.held.id)
    expect(stage.held.status.phase == "Released", f"it is {stage.held.status.phase}")
    heard = await stage.lender.hears("Withdraw", stage.is_held)
    return telling.sentence(
        f"To {stage.lender.name}, after {telling.duration(heard.at - released_at)}:"
        f" {heard.instruction.message}"
    )


async def capacity_is_back(stage: Stage) -> list[str]:
    for name, before in stage.before.items():
        now = await stage.available(name)
        expect(now == before, f"{name} has {_amounts(now)} free, and had {_amounts(before)}")
    name = stage.lender.name
    return [f"{name} has {_amounts(stage.before[name])} to lend, exactly as before"]


async def audit_finds_nothing(stage: Stage) -> list[str]:
    store = opening.open_readonly(str(stage.trial.store))
    try:
        ledger = Ledger.restore(store.load())
    finally:
        store.close()
    found = audit.violations(ledger)
    expect(not found, "; ".join(found))
    return telling.sentence(
        f"0 violations; clusters: {len(ledger.clusters)}, reservations:"
        f" {len(ledger.reservations)}, revision: {ledger.revision}"
    )


async def broker_stops(stage: Stage) -> list[str]:
    code = await asyncio.to_thread(stage.broker.stop)
    expect(code == 0, f"the broker ended with exit code {code}")
    return ["Calls in flight are finished, the store is closed, exit code 0"]


def _offer(one: bodies.Cluster) -> tuple[str, ...]:
    offer = one.advertisement
    free = offer.resources.available or bodies.Quantities("0", "0")
    gpus = str(free.gpu or 0)
    return offer.cluster_id, offer.region, str(free.cpu), str(free.memory), gpus, one.status.rating


def _candidate(one: bodies.Candidate) -> tuple[str, ...]:
    return (
        one.cluster_id,
        "yes" if one.fits else "no",
        "" if one.score is None else f"{one.score:.3f}",
        f"{float(one.price_per_hour):.3f} {one.currency}" if one.price_per_hour else "",
        ", ".join(one.refusals),
    )


def _amounts(amounts: bodies.Amounts) -> str:
    parts = [f"{amounts.cpu} CPU", f"{amounts.memory} memory"]
    return ", ".join([*parts, f"{amounts.gpu} GPU"] if amounts.gpu else parts)
