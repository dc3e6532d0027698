"""Clusters, context and steps of the demo. Each step acts, checks its effect and returns lines to print."""

from __future__ import annotations

import asyncio
import time
from datetime import datetime

from kubelend.apps import audits
from kubelend.demo import clusters, telling
from kubelend.demo.clusters import BERLIN, PARIS
from kubelend.demo.stage import ADMIN, Stage, expect
from kubelend.kits import columns
from kubelend.wire import bodies
from kubelend.wire.objects import ProviderInstruction, ReservationInstruction, ResourceRequest

NAME, TOO_MUCH = "training", "too-much"
FAILED, WITHDRAWN = "Failed", "Withdrawn"


async def agents_join(stage: Stage) -> list[str]:
    for agent in stage.agents.values():
        await asyncio.to_thread(agent.wait_until_ready)
    async with stage.client(ADMIN) as admin:
        known = await admin.all_clusters()
    active = sorted(one.advertisement.cluster_id for one in known if one.status.active)
    expect(active == sorted(stage.agents), f"only {', '.join(active)} are active")
    for name in stage.agents:
        stage.before[name] = await stage.available(name)
    headers = ("CLUSTER", "REGION", "CPU FREE", "MEMORY FREE", "GPU FREE", "EUR/CORE-HOUR")
    return columns.aligned(headers, map(_offer, known), right=(2, 3, 4, 5))


async def explain_shows_where_it_fits(stage: Stage) -> list[str]:
    async with stage.client(BERLIN) as borrower:
        found = await borrower.explain(clusters.WISH)
    expect(found.fitting == 2, f"expected two clusters to fit, but {found.summary}")
    headers = ("CLUSTER", "FITS", "SCORE", "PRICE PER HOUR", "REASON")
    rows = [_candidate(one) for one in found.candidates]
    asked = f"{_amounts(clusters.WISH.requested_resources)}: {found.summary}"
    return [*telling.sentence(asked), *columns.aligned(headers, rows, right=(2, 3))]


async def user_asks(stage: Stage) -> list[str]:
    path = stage.path(BERLIN, ResourceRequest, NAME)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(clusters.REQUEST, "utf-8")
    stage.asked_at = time.time()
    found = await stage.sees(
        BERLIN, ResourceRequest, NAME, lambda one: bool(one.status.reservation_name)
    )
    stage.reservation, stage.lender = found.status.reservation_name, found.status.target_cluster_id
    expect(stage.lender == PARIS, f"expected provider {PARIS}, but got {stage.lender}")
    lines = [f"spec in {path.name}:", *(f"  {line}" for line in clusters.SPEC.splitlines())]
    return [*lines, f"{stage.reservation} is reserved in {stage.lender}"]


async def amount_is_locked(stage: Stage) -> list[str]:
    before, now = stage.before[stage.lender], await stage.available(stage.lender)
    expect(before != now, f"{stage.lender} still has {_amounts(now)} available")
    return [
        f"available in {stage.lender} before: {_amounts(before)}",
        f"available in {stage.lender} now:    {_amounts(now)}",
    ]


async def both_sides_are_told(stage: Stage) -> list[str]:
    use = await stage.sees(
        BERLIN, ReservationInstruction, stage.reservation, lambda one: one.status.delivered
    )
    hold = await _held(stage)
    headers = ("CLUSTER", "INSTRUCTION", "AFTER")
    rows = [
        (BERLIN, use.spec.message, _after(stage, use.metadata.creation_timestamp)),
        (stage.lender, hold.spec.message, _after(stage, hold.metadata.creation_timestamp)),
    ]
    return columns.aligned(headers, rows, right=(2,))


async def borrower_uses_it(stage: Stage) -> list[str]:
    found = await stage.sees(
        BERLIN, ResourceRequest, NAME, lambda one: one.status.phase == "Active"
    )
    seconds = _after(stage, found.status.last_update_time)
    return [f"{found.status.reservation_name} is Active, {seconds} after the request"]


async def provider_dies(stage: Stage) -> list[str]:
    lost, killed_at = stage.lender, time.time()
    await asyncio.to_thread(stage.agents[lost].kill)
    found = await stage.sees(
        BERLIN,
        ResourceRequest,
        NAME,
        lambda one: one.status.target_cluster_id not in {"", lost},
    )
    stage.lender = found.status.target_cluster_id
    seconds = telling.duration(time.time() - killed_at)
    return [
        *telling.sentence(
            f"{stage.reservation} failed over from {lost} to {stage.lender} after {seconds}"
        ),
        *telling.sentence(f"{BERLIN}: {found.status.message}"),
    ]


async def next_one_holds_it(stage: Stage) -> list[str]:
    hold = await _held(stage)
    use = await stage.sees(
        BERLIN,
        ReservationInstruction,
        stage.reservation,
        lambda one: one.spec.target_cluster_id == stage.lender,
    )
    return [f"{stage.lender}: {hold.spec.message}", f"{BERLIN}: {use.spec.message}"]


async def no_is_explained(stage: Stage) -> list[str]:
    path = stage.path(BERLIN, ResourceRequest, TOO_MUCH)
    path.write_text(clusters.TOO_MUCH, "utf-8")
    found = await stage.sees(
        BERLIN, ResourceRequest, TOO_MUCH, lambda one: one.status.phase == FAILED
    )
    path.unlink()
    return telling.sentence(f"{FAILED}, {found.status.reason}: {found.status.message}")


async def request_is_deleted(stage: Stage) -> list[str]:
    deleted_at = time.time()
    stage.path(BERLIN, ResourceRequest, NAME).unlink()
    name = f"{stage.reservation}-provider"
    over = await stage.sees(
        stage.lender, ProviderInstruction, name, lambda one: one.status.phase == WITHDRAWN
    )
    await stage.misses(BERLIN, ResourceRequest, NAME)
    seconds = telling.duration(time.time() - deleted_at)
    return telling.sentence(f"{stage.lender}, after {seconds}: {over.status.message}")


async def capacity_is_back(stage: Stage) -> list[str]:
    for name, before in stage.before.items():
        now = await stage.available(name)
        expect(
            name == PARIS or now == before, f"{name} has {_amounts(now)}, had {_amounts(before)}"
        )
    return [
        f"available in {stage.lender}: {_amounts(stage.before[stage.lender])}, exactly as before"
    ]


async def audit_finds_nothing(stage: Stage) -> list[str]:
    ledger, found, _ = audits.of(str(stage.trial.store))
    expect(not found, "; ".join(found))
    return telling.sentence(
        f"0 violations; clusters: {len(ledger.clusters)}, reservations:"
        f" {len(ledger.reservations)}, revision: {ledger.revision}"
    )


async def all_stop(stage: Stage) -> list[str]:
    living = [agent for name, agent in stage.agents.items() if name != PARIS]
    codes = await asyncio.gather(
        *(asyncio.to_thread(process.stop) for process in (*living, stage.broker))
    )
    expect(not any(codes), f"processes exited with codes {codes}")
    return ["Calls in flight finished, store closed, all exit codes 0"]


async def _held(stage: Stage) -> ProviderInstruction:
    name = f"{stage.reservation}-provider"
    return await stage.sees(
        stage.lender, ProviderInstruction, name, lambda one: one.status.enforced
    )


def _after(stage: Stage, moment: datetime | None) -> str:
    """Returns the time since the request was written."""
    return "" if moment is None else telling.duration(max(moment.timestamp() - stage.asked_at, 0))


def _offer(one: bodies.Cluster) -> tuple[str, ...]:
    offer = one.advertisement
    free = offer.resources.available or bodies.Quantities("0", "0")
    price = offer.cost.cpu_cost if offer.cost else ""
    return (
        offer.cluster_id,
        offer.region,
        str(free.cpu),
        str(free.memory),
        str(free.gpu or 0),
        price,
    )


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
