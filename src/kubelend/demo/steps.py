"""Clusters, context and steps of the demo. Each step acts, checks its effect and returns lines to print."""

from __future__ import annotations

import asyncio
import time
from datetime import datetime

from kubelend.apps import audits
from kubelend.demo import clusters, telling
from kubelend.demo.clusters import BERLIN, PARIS
from kubelend.demo.stage import ADMIN_NAME, DemoContext, expect
from kubelend.kits import columns
from kubelend.wire import bodies
from kubelend.wire.objects import ProviderInstruction, ReservationInstruction, ResourceRequest

REQUEST_NAME, OVERSIZED_NAME = "training", "too-much"
FAILED, WITHDRAWN = "Failed", "Withdrawn"


async def wait_for_agents(stage: DemoContext) -> list[str]:
    for agent in stage.agents.values():
        await asyncio.to_thread(agent.wait_until_ready)
    async with stage.client(ADMIN_NAME) as admin:
        known = await admin.all_clusters()
    active = sorted(one.advertisement.cluster_id for one in known if one.status.active)
    expect(active == sorted(stage.agents), f"only {', '.join(active)} are active")
    for name in stage.agents:
        stage.available_before[name] = await stage.available(name)
    headers = ("CLUSTER", "REGION", "CPU FREE", "MEMORY FREE", "GPU FREE", "EUR/CORE-HOUR")
    return columns.align_columns(headers, map(_offer_row, known), right=(2, 3, 4, 5))


async def dry_run(stage: DemoContext) -> list[str]:
    async with stage.client(BERLIN) as borrower:
        found = await borrower.explain(clusters.RESERVATION_REQUEST)
    expect(found.fitting == 2, f"expected two clusters to fit, but {found.summary}")
    headers = ("CLUSTER", "FITS", "SCORE", "PRICE PER HOUR", "REASON")
    rows = [_candidate_row(one) for one in found.candidates]
    asked = f"{_amounts_text(clusters.RESERVATION_REQUEST.requested_resources)}: {found.summary}"
    return [*telling.wrap_text(asked), *columns.align_columns(headers, rows, right=(2, 3))]


async def create_request(stage: DemoContext) -> list[str]:
    path = stage.path(BERLIN, ResourceRequest, REQUEST_NAME)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(clusters.REQUEST_MANIFEST, "utf-8")
    stage.requested_at = time.time()
    found = await stage.wait_for(
        BERLIN, ResourceRequest, REQUEST_NAME, lambda one: bool(one.status.reservation_name)
    )
    stage.reservation, stage.provider = (
        found.status.reservation_name,
        found.status.target_cluster_id,
    )
    expect(stage.provider == PARIS, f"expected provider {PARIS}, but got {stage.provider}")
    lines = [f"spec in {path.name}:", *(f"  {line}" for line in clusters.REQUEST_SPEC.splitlines())]
    return [*lines, f"{stage.reservation} is reserved in {stage.provider}"]


async def check_reserved(stage: DemoContext) -> list[str]:
    before, now = stage.available_before[stage.provider], await stage.available(stage.provider)
    expect(before != now, f"{stage.provider} still has {_amounts_text(now)} available")
    return [
        f"available in {stage.provider} before: {_amounts_text(before)}",
        f"available in {stage.provider} now:    {_amounts_text(now)}",
    ]


async def check_instructions(stage: DemoContext) -> list[str]:
    use = await stage.wait_for(
        BERLIN, ReservationInstruction, stage.reservation, lambda one: one.status.delivered
    )
    hold = await _wait_held(stage)
    headers = ("CLUSTER", "INSTRUCTION", "AFTER")
    rows = [
        (BERLIN, use.spec.message, _since_request(stage, use.metadata.creation_timestamp)),
        (
            stage.provider,
            hold.spec.message,
            _since_request(stage, hold.metadata.creation_timestamp),
        ),
    ]
    return columns.align_columns(headers, rows, right=(2,))


async def wait_active(stage: DemoContext) -> list[str]:
    found = await stage.wait_for(
        BERLIN, ResourceRequest, REQUEST_NAME, lambda one: one.status.phase == "Active"
    )
    seconds = _since_request(stage, found.status.last_update_time)
    return [f"{found.status.reservation_name} is Active, {seconds} after the request"]


async def kill_provider(stage: DemoContext) -> list[str]:
    lost, killed_at = stage.provider, time.time()
    await asyncio.to_thread(stage.agents[lost].kill)
    found = await stage.wait_for(
        BERLIN,
        ResourceRequest,
        REQUEST_NAME,
        lambda one: one.status.target_cluster_id not in {"", lost},
    )
    stage.provider = found.status.target_cluster_id
    seconds = telling.format_seconds(time.time() - killed_at)
    return [
        *telling.wrap_text(
            f"{stage.reservation} failed over from {lost} to {stage.provider} after {seconds}"
        ),
        *telling.wrap_text(f"{BERLIN}: {found.status.message}"),
    ]


async def check_new_provider(stage: DemoContext) -> list[str]:
    hold = await _wait_held(stage)
    use = await stage.wait_for(
        BERLIN,
        ReservationInstruction,
        stage.reservation,
        lambda one: one.spec.target_cluster_id == stage.provider,
    )
    return [f"{stage.provider}: {hold.spec.message}", f"{BERLIN}: {use.spec.message}"]


async def reject_oversized_request(stage: DemoContext) -> list[str]:
    path = stage.path(BERLIN, ResourceRequest, OVERSIZED_NAME)
    path.write_text(clusters.OVERSIZED_MANIFEST, "utf-8")
    found = await stage.wait_for(
        BERLIN, ResourceRequest, OVERSIZED_NAME, lambda one: one.status.phase == FAILED
    )
    path.unlink()
    return telling.wrap_text(f"{FAILED}, {found.status.reason}: {found.status.message}")


async def delete_request(stage: DemoContext) -> list[str]:
    deleted_at = time.time()
    stage.path(BERLIN, ResourceRequest, REQUEST_NAME).unlink()
    name = f"{stage.reservation}-provider"
    over = await stage.wait_for(
        stage.provider, ProviderInstruction, name, lambda one: one.status.phase == WITHDRAWN
    )
    await stage.wait_deleted(BERLIN, ResourceRequest, REQUEST_NAME)
    seconds = telling.format_seconds(time.time() - deleted_at)
    return telling.wrap_text(f"{stage.provider}, after {seconds}: {over.status.message}")


async def check_released(stage: DemoContext) -> list[str]:
    for name, before in stage.available_before.items():
        now = await stage.available(name)
        expect(
            name == PARIS or now == before,
            f"{name} has {_amounts_text(now)}, had {_amounts_text(before)}",
        )
    return [
        f"available in {stage.provider}: {_amounts_text(stage.available_before[stage.provider])}, exactly as before"
    ]


async def run_audit(stage: DemoContext) -> list[str]:
    ledger, found, _ = audits.audit_store(str(stage.deployment.store))
    expect(not found, "; ".join(found))
    return telling.wrap_text(
        f"0 violations; clusters: {len(ledger.clusters)}, reservations:"
        f" {len(ledger.reservations)}, revision: {ledger.revision}"
    )


async def stop_processes(stage: DemoContext) -> list[str]:
    living = [agent for name, agent in stage.agents.items() if name != PARIS]
    codes = await asyncio.gather(
        *(asyncio.to_thread(process.stop) for process in (*living, stage.broker))
    )
    expect(not any(codes), f"processes exited with codes {codes}")
    return ["Calls in flight finished, store closed, all exit codes 0"]


async def _wait_held(stage: DemoContext) -> ProviderInstruction:
    name = f"{stage.reservation}-provider"
    return await stage.wait_for(
        stage.provider, ProviderInstruction, name, lambda one: one.status.enforced
    )


def _since_request(stage: DemoContext, moment: datetime | None) -> str:
    """Returns the time since the request was written."""
    return (
        ""
        if moment is None
        else telling.format_seconds(max(moment.timestamp() - stage.requested_at, 0))
    )


def _offer_row(one: bodies.Cluster) -> tuple[str, ...]:
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


def _candidate_row(one: bodies.Candidate) -> tuple[str, ...]:
    return (
        one.cluster_id,
        "yes" if one.fits else "no",
        "" if one.score is None else f"{one.score:.3f}",
        f"{float(one.price_per_hour):.3f} {one.currency}" if one.price_per_hour else "",
        ", ".join(one.refusals),
    )


def _amounts_text(amounts: bodies.Amounts) -> str:
    parts = [f"{amounts.cpu} CPU", f"{amounts.memory} memory"]
    return ", ".join([*parts, f"{amounts.gpu} GPU"] if amounts.gpu else parts)
