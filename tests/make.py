"""Builders with defaults, so that a test names only what it is about; and a runner of commands.

    runner = make.runner(a="cpu=4,memory=8Gi", b="cpu=2,memory=4Gi")
    held = runner.reserve("cpu=3,memory=1Gi", requester="r")
    runner.pass_time(make.HOUR)
    runner.expire()
    assert runner.available("a") == make.resources("cpu=4,memory=8Gi")

Amounts are texts ("cpu=500m,memory=1Gi,example.com/fpga=2") or ready vectors; prices are decimal texts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from kubelend.core import commands, failover, prices, quotas
from kubelend.core import resources as amounts
from kubelend.core.commands import Command, Result, WaitLimits
from kubelend.core.events import Archived, Change, ClusterDeleted, Event, RecordDeleted, WorkingSet
from kubelend.core.explanations import NoFit
from kubelend.core.failover import ProviderMonitor
from kubelend.core.filters import PlacementQuery
from kubelend.core.ledger import Ledger
from kubelend.core.lending import LendingPolicy
from kubelend.core.lifecycle import Phase, Reason
from kubelend.core.members import Member, Token
from kubelend.core.models import (
    REGION_LABEL,
    Advertisement,
    Cluster,
    ClusterId,
    Constraints,
    HoldReport,
    Limits,
    Quota,
    Request,
    RequestKey,
    Reservation,
    ReservationId,
)
from kubelend.core.prices import Prices
from kubelend.core.resources import Resources

T0 = datetime(2026, 1, 1, 12, tzinfo=UTC)
NO_TIME = timedelta()
MOMENT = timedelta.resolution
SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)
STALE_AFTER = 10 * MINUTE
RETENTION = 24 * HOUR

R = ClusterId("r")
"""Who asks, if nobody else is named."""

Amounts = str | Resources


def resources(text: Amounts) -> Resources:
    if isinstance(text, Resources):
        return text
    return amounts.parse_requested(dict(part.split("=") for part in text.split(",") if part))


def caps(text: str) -> dict[str, int]:
    return amounts.parse_caps(dict(part.split("=") for part in text.split(",") if part))


def policy(
    *,
    allow: Iterable[str] = (),
    deny: Iterable[str] = (),
    keep_back: Amounts = "",
    max_lent: str = "",
    max_per_requester: str = "",
    hours: Iterable[str] = (),
) -> LendingPolicy:
    return LendingPolicy(
        tuple(allow),
        tuple(deny),
        resources(keep_back),
        caps(max_lent),
        caps(max_per_requester),
        tuple(hours),
    )


def quota(
    text: str = "", *, reservations: int | None = None, budget: str = "", currency: str = "USD"
) -> Quota:
    money = prices.parse_price(budget, "budget") if budget else None
    return Quota(caps(text), reservations, money, currency)


def price_list(currency: str = "USD", **per_hour: str) -> Prices:
    """`price_list(cpu="0.05", memory="0.01")`, per core-hour and GB-hour."""
    return Prices(
        currency, **{name: prices.parse_price(text, name) for name, text in per_hour.items()}
    )


def advertisement(
    cluster: str = "a",
    allocatable: Amounts = "cpu=4,memory=8Gi",
    *,
    allocated: Amounts = "",
    labels: Mapping[str, str] | None = None,
    region: str | None = None,
    prices: Prices | None = None,
    valid_for: timedelta | None = None,
    sent_at: datetime = T0,
    policy: LendingPolicy | None = None,
) -> Advertisement:
    return Advertisement(
        cluster=ClusterId(cluster),
        capacity=resources(allocatable),
        allocatable=resources(allocatable),
        allocated=resources(allocated),
        sent_at=sent_at,
        prices=prices,
        labels=dict(labels or {}) | ({REGION_LABEL: region} if region else {}),
        valid_for=valid_for,
        policy=policy,
    )


def cluster(
    id: str = "a",
    allocatable: Amounts = "cpu=4,memory=8Gi",
    *,
    received_at: datetime = T0,
    cordon: str | None = None,
    **fields,
) -> Cluster:
    """A record as the ledger would have made it; `fields` are those of `advertisement`."""
    offer = advertisement(id, allocatable, **fields)
    return Cluster(offer, received_at, received_at + STALE_AFTER, cordon)


def request(
    wanted: Amounts = "cpu=1,memory=1Gi",
    requester: str = "r",
    *,
    duration: timedelta = HOUR,
    priority: int = 0,
    wait: timedelta = NO_TIME,
    policy: str = "headroom",
    weights: Mapping[str, float] | None = None,
    labels: Mapping[str, str] | None = None,
    region: str | None = None,
    pinned: str | None = None,
    excluded: Iterable[str] = (),
    max_price: str | None = None,
    currency: str = "",
    key: str | None = None,
    failover: bool = True,
) -> Request:
    return Request(
        requester=ClusterId(requester),
        resources=resources(wanted),
        duration=duration,
        priority=priority,
        wait=wait,
        policy=policy,
        weights=dict(weights or {}),
        constraints=Constraints(
            labels=dict(labels or {}) | ({REGION_LABEL: region} if region else {}),
            pinned=None if pinned is None else ClusterId(pinned),
            excluded=tuple(ClusterId(name) for name in excluded),
            max_price=None if max_price is None else prices.parse_price(max_price, "maxPrice"),
            currency=currency,
        ),
        key=None if key is None else RequestKey(key),
        failover=failover,
    )


def question(wanted: Amounts | Request = "cpu=1,memory=1Gi", *, now: datetime = T0, **fields):
    """What the decision is asked; `fields` are those of `request`."""
    asked = wanted if isinstance(wanted, Request) else request(wanted, **fields)
    return PlacementQuery(asked, now)


def reservation(id: str = "rsv-1", asked: Request | None = None, **fields) -> Reservation:
    return Reservation(
        ReservationId(id), asked or request(), fields.pop("created_at", T0), **fields
    )


def held(number: int, asked: Request, target: str = "a") -> Reservation:
    """One of many that a store is filled with, each with its own number as ticket and revision."""
    return reservation(
        f"rsv-{number:04d}",
        asked,
        phase=Phase.RESERVED,
        reason=Reason.LOCKED,
        target=ClusterId(target),
        reserved_at=T0,
        expires_at=T0 + asked.duration,
        ticket=number + 1,
        revision=number + 1,
    )


def ledger(**clusters: Amounts | Advertisement) -> Ledger:
    """A ledger with these clusters, all advertised at T0."""
    return runner(**clusters).ledger


def runner(**clusters: Amounts | Advertisement) -> CommandRunner:
    made = CommandRunner()
    for name, offer in clusters.items():
        made.advertise(name, offer)
    return made


class Recorder(Ledger):
    """A ledger that also remembers every event, for replays."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []

    def apply(self, event: Event) -> Change:
        change = super().apply(event)
        self.events.append(event)
        return change


class CommandRunner:
    """Runs commands as the broker does: one after the other, at a time that moves by hand."""

    def __init__(self, ledger: Recorder | None = None, now: datetime = T0) -> None:
        self.ledger = ledger or Recorder()
        self.now = now
        self.changes: list[Change] = []
        self.max_waiting = 100
        self._ids = (ReservationId(f"rsv-{number}") for number in itertools.count(1))

    def run(self, command: Command[Result]) -> Result:
        answer, changes = commands.run_command(self.ledger, command, self.now)
        self.changes += changes
        return answer

    def pass_time(self, duration: timedelta) -> None:
        self.now += duration

    # -- commands

    def advertise(
        self, name: str, offer: Amounts | Advertisement = "cpu=4,memory=8Gi", **fields
    ) -> Cluster:
        if not isinstance(offer, Advertisement):
            offer = advertisement(name, offer, sent_at=self.now, **fields)
        return self.run(commands.advertise(self.ledger, offer, STALE_AFTER, self.now))

    def ask(self, wanted: Amounts | Request, **fields) -> ReservationId | NoFit:
        """Reserve, and give back the answer as it is; `fields` are those of `request`."""
        asked = wanted if isinstance(wanted, Request) else request(wanted, **fields)
        return self.ask_as(next(self._ids), asked)

    def ask_as(self, name: ReservationId, asked: Request) -> ReservationId | NoFit:
        """By the name that an object has which somebody else has made."""
        limits = WaitLimits(self.max_waiting, self.max_waiting)
        return self.run(commands.reserve(self.ledger, asked, name, limits, self.now))

    def reserve(self, wanted: Amounts | Request, **fields) -> ReservationId:
        """Reserve what must be placed or queued."""
        answer = self.ask(wanted, **fields)
        assert not isinstance(answer, NoFit), str(answer.explanation)
        return answer

    def refused(self, wanted: Amounts | Request, **fields) -> str:
        """Ask for what must not fit; gives the explanation."""
        answer = self.ask(wanted, **fields)
        assert isinstance(answer, NoFit), f"placed as {answer}"
        return str(answer.explanation)

    def release(self, found: ReservationId, reason: Reason = Reason.BY_REQUESTER) -> None:
        self.run(commands.release(self.ledger, found, reason, self.now))

    def activate(self, found: ReservationId) -> None:
        self.run(commands.activate(self.ledger, found, self.now))

    def renew(self, found: ReservationId, duration: timedelta) -> None:
        self.run(commands.renew(self.ledger, found, duration, self.now))

    def acknowledge(
        self, found: ReservationId, provider: str, held: HoldReport | None = None
    ) -> None:
        self.run(commands.acknowledge(self.ledger, found, ClusterId(provider), held, self.now))

    def refuse(self, found: ReservationId, provider: str, why: str = "no") -> None:
        self.run(commands.refuse(self.ledger, found, ClusterId(provider), why, self.now))

    def cordon(self, name: str, why: str = "maintenance") -> Cluster:
        return self.run(commands.cordon(self.ledger, ClusterId(name), why, self.now))

    def uncordon(self, name: str) -> Cluster:
        return self.run(commands.uncordon(self.ledger, ClusterId(name), self.now))

    def drain(self, name: str, why: str = "maintenance") -> list[ReservationId]:
        return self.run(commands.drain(self.ledger, ClusterId(name), why, self.now))

    def remove(self, name: str) -> None:
        self.run(commands.remove_cluster(self.ledger, ClusterId(name), self.now))

    def withdraw(self, name: str) -> None:
        self.run(commands.withdraw_offer(self.ledger, ClusterId(name), self.now))

    def retire(self, found: ReservationId) -> None:
        self.run(commands.purge_reservation(self.ledger, found, Reason.DELETED, self.now))

    def limit(self, name: str, wanted: LendingPolicy | None = None, **fields) -> None:
        """Set a policy for a provider; `fields` are those of `policy`."""
        wanted = wanted or policy(**fields)
        self.run(commands.set_policy(self.ledger, ClusterId(name), wanted, self.now))

    def allot(self, name: str, wanted: Quota | str = "", **fields) -> None:
        """Set a quota for a requester; `fields` are those of `quota`."""
        wanted = wanted if isinstance(wanted, Quota) else quota(wanted, **fields)
        self.run(commands.set_quota(self.ledger, ClusterId(name), wanted, self.now))

    def lift(self, name: str) -> None:
        """Let no quota hold for a requester any more."""
        self.run(commands.clear_quota(self.ledger, ClusterId(name), self.now))

    def expire(self, retention: timedelta = RETENTION) -> None:
        self.run(commands.expire_reservations(self.ledger, retention, self.now))

    def monitor(self, lost_after: timedelta = 5 * MINUTE) -> ProviderMonitor:
        """What a broker that starts now knows of the silence of others."""
        return ProviderMonitor(lost_after, self.ledger, self.now)

    def fail_over(self, monitor: ProviderMonitor) -> list[Cluster]:
        """Look once for providers that fell silent; gives those that are given up."""
        return self.run(failover.fail_over(self.ledger, monitor, self.now))

    def run_failover(self, monitor: ProviderMonitor, duration: timedelta) -> list[Cluster]:
        """Let time pass for a broker that looks around all the while."""
        until, given_up = self.now + duration, []
        while self.now < until:
            self.pass_time(min(5 * SECOND, until - self.now))
            given_up += self.fail_over(monitor)
        return given_up

    # -- queries

    def question(self, wanted: Amounts | Request, **fields) -> PlacementQuery:
        """What a decision is asked about a request made now."""
        asked = wanted if isinstance(wanted, Request) else request(wanted, **fields)
        return quotas.query_for_request(self.ledger, asked, self.now)

    def __getitem__(self, found: ReservationId) -> Reservation:
        return self.ledger.reservation(found)

    def target(self, found: ReservationId) -> str | None:
        return self[found].target

    def available(self, name: str) -> Resources:
        return self.ledger.available(ClusterId(name))

    def reserved(self, name: str) -> Resources:
        return self.ledger.reserved(ClusterId(name))

    def waiting(self) -> list[ReservationId]:
        return [waiter.id for waiter in self.ledger.waiting()]

    def nominations(self) -> dict[str, str]:
        """Who waits for which cluster."""
        return {
            w.id: w.nominated_cluster
            for w in self.ledger.waiting()
            if w.nominated_cluster is not None
        }

    def kept(self) -> WorkingSet:
        """The working set that a store would have after all changes."""
        return kept(self.changes, self.ledger.revision)


def kept(changes: Iterable[Change], revision: int) -> WorkingSet:
    clusters: dict[str, Cluster] = {}
    reservations: dict[str, Reservation] = {}
    documents: dict[tuple[str, str], Member | Token | Limits] = {}
    for change in changes:
        match change:
            case Cluster():
                clusters[change.id] = change
            case Reservation():
                reservations[change.id] = change
            case ClusterDeleted():
                del clusters[change.cluster]
            case Archived():
                del reservations[change.reservation]
            case Member() | Token() | Limits():
                documents[type(change).__name__.lower(), change.id] = change
            case RecordDeleted():
                documents.pop((change.kind, change.id), None)
    few = list(documents.values())
    return WorkingSet(
        list(clusters.values()),
        list(reservations.values()),
        revision,
        [found for found in few if isinstance(found, Member)],
        [found for found in few if isinstance(found, Token)],
        [found for found in few if isinstance(found, Limits)],
    )


def state(ledger: Ledger) -> dict[str, object]:
    """All that a ledger answers, as plain values: ledgers with equal states are interchangeable."""
    fleet, names = ledger.fleet, _resource_names(ledger)
    known = sorted({*ledger.clusters, *(r.requester for r in ledger.reservations.values())})
    columns = {
        name: (fleet.free(name), fleet.ceiling(name), fleet.free_and_allocatable(name))
        for name in names
    }
    ranks = [(waiter.request.priority, waiter.ticket) for waiter in ledger.waiting()]
    return {
        "revision": ledger.revision,
        "clusters": dict(ledger.clusters),
        "reservations": dict(ledger.reservations),
        "reserved": {name: ledger.reserved(name) for name in known},
        "lent": {name: [found.id for found in ledger.lent_by(name)] for name in known},
        "touching": {name: sorted(found.id for found in ledger.by_cluster(name)) for name in known},
        "by key": {
            (found.requester, key): same and same.id
            for found in ledger.reservations.values()
            if (key := found.request.key) is not None
            for same in [ledger.by_key(found.requester, key)]
        },
        "waiting": [waiter.id for waiter in ledger.waiting()],
        "members": dict(ledger.member_index.members),
        "tokens": dict(ledger.member_index.tokens),
        "limits": dict(ledger.limit_index.limits),
        "lending": {name: ledger.limit_index.effective_policy(name) for name in known},
        "accounts": {
            name: (
                found.held,
                found.held_count,
                found.pending,
                found.pending_count,
                found.daily_spend.steps(),
            )
            for name, found in ledger.quota_usages.by_requester.items()
        },
        "loans": {name: dict(ledger.fleet.lent_by_requester.for_requester(name)) for name in known},
        "ids": list(fleet.ids),
        "labels": list(fleet.labels),
        "columns": {name: _plain(column) for name, column in columns.items()},
        "rows": _plain((fleet.valid_until, fleet.uncordoned, fleet.currency, fleet.rates)),
        "withheld": {name: _plain(fleet.available(name)) for name in names},
        "shares": {name: _plain(fleet.requester_cap_left(name, R)) for name in names},
        "admits": None
        if fleet.policy_columns is None
        else _plain(fleet.policy_columns.requester_mask(R, len(fleet))),
        "nominations": (
            fleet.nomination_count,
            [_plain(fleet.not_nominated_above(*rank)) for rank in ranks],
        ),
    }


def _resource_names(ledger: Ledger) -> list[str]:
    offered = (
        name for c in ledger.clusters.values() for name in c.advertisement.allocatable.extended
    )
    asked = (name for r in ledger.reservations.values() for name in r.request.resources.extended)
    return ["cpu", "memory", "gpu", "storage", *sorted({*offered, *asked})]


def _plain(values: Any) -> Any:
    """Arrays as lists, however deep, so that `==` compares them."""
    if values is None:
        return None
    return [_plain(value) for value in values] if isinstance(values, tuple) else values.tolist()
