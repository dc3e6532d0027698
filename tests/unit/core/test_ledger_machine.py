"""Whatever happens, and in whatever order: the invariants of the design hold after every step.

Hypothesis plays clusters, borrowers, administrators, the passing of time and restarts against one
ledger, and shrinks what breaks it to a few steps.
"""

from collections.abc import Iterator
from datetime import datetime, timedelta

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import make
import reference
from kubelend.core import audit, errors, quotas
from kubelend.core.events import Archived, Change, ClusterDeleted, Event, RecordDeleted, Requested
from kubelend.core.explanations import NoFit
from kubelend.core.ledger import Ledger
from kubelend.core.lifecycle import Rejection
from kubelend.core.models import ClusterId, Reservation, ReservationId
from kubelend.core.resources import Resources
from kubelend.stores import batch as stores_batch

GI = 2**30
CLUSTERS = ["a", "b", "c"]
LOST_AFTER = 20 * make.SECOND
clusters = st.sampled_from(CLUSTERS)
sizes = st.tuples(st.integers(0, 6), st.integers(1, 4), st.sampled_from([0, 0, 1]))
picks = st.integers(0, 50)
NAMED = ReservationId("an-object")
GROUP = 4
"""How many events are committed at a time."""
OFFERS = [
    {},
    {},
    {"labels": {"zone": "x"}},
    {"prices": make.price_list(cpu="0.1")},
    {"prices": make.price_list(cpu="0.2"), "labels": {"zone": "x"}},
    {"valid_for": make.MINUTE},
    {"policy": make.policy(max_lent="cpu=3")},
    {"policy": make.policy(hours=["23:40-00:20"]), "prices": make.price_list(cpu="0.1")},
]
START = make.T0 + 11 * make.HOUR + 30 * make.MINUTE
"""Half an hour before midnight, so that days end and begin."""
POLICIES = [
    {},
    {"allow": ["r"]},
    {"deny": ["r", "s"]},
    {"keep_back": "cpu=2"},
    {"max_lent": "cpu=4,memory=3Gi"},
    {"max_per_requester": "cpu=3"},
    {"max_per_requester": "cpu=2,example.com/fpga=0", "keep_back": "memory=1Gi"},
    {"hours": ["23:00-23:40", "Fri 00:00-00:30"]},
    {"hours": ["23:33-00:10"], "allow": ["?"]},
]
QUOTAS = [
    {},
    {"wanted": "cpu=6"},
    {"wanted": "cpu=12,memory=9Gi", "reservations": 3},
    {"reservations": 2},
    {"budget": "0.2"},
    {"budget": "0.5", "reservations": 4},
    {"budget": "9", "currency": "EUR"},
]
OPTIONS = [
    {},
    {},
    {"labels": {"zone": "x"}},
    {"labels": {"zone": "x"}, "max_price": "0.3"},
    {"policy": "cost"},
    {"policy": "binpack", "excluded": ["b"]},
    {"pinned": "a"},
]
CURED_BY_WAITING = {
    Rejection.INSUFFICIENT_CPU,
    Rejection.INSUFFICIENT_MEMORY,
    Rejection.INSUFFICIENT_EXTENDED,
    Rejection.KEPT_BACK,
    Rejection.LENDING_CAP_REACHED,
}


class CheckedLedger(make.Recorder):
    """Checks every hold in the moment it is taken, whichever event takes it, and records what is wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.overbooked: list[str] = []

    def apply(self, event: Event) -> Change:
        before, ends = holds(self), {r.id: r.expires_at for r in self.reservations.values()}
        change = super().apply(event)
        new = holds(self) - before
        for name, cluster in new:
            found = self.reservations[name]
            self.overbooked += self._shortages(found, cluster)
            self.overbooked += self._breaches(found, cluster, event.at)
            if found.left == ():  # a move takes nothing more of its requester's quota
                self.overbooked += self._excesses(found)
        for found in list(self.reservations.values()):
            longer = found.is_live and ends.get(found.id) not in {None, found.expires_at}
            if longer or any(found.id == name for name, _ in new):
                self.overbooked += self._overspent(found, event.at)
        return change

    def _shortages(self, found: Reservation, cluster: ClusterId) -> Iterator[str]:
        """What was not asked for may be short already: the cluster's own pods may have taken it."""
        offer = self.clusters[cluster].advertisement
        promised = self._loaned(cluster) + offer.allocated
        for name, _ in found.request.resources.items():  # noqa: PERF102 - not a dict
            if promised.amount(name) > offer.allocatable.amount(name):
                yield f"{found.id} took {name} that {cluster} does not have"

    def _breaches(self, found: Reservation, cluster: ClusterId, at: datetime) -> Iterator[str]:
        record, requester = self.clusters[cluster], found.requester
        own = _sum(reference.lent_to(requester, record, self))
        for policy in reference.policies(record, self):
            if policy.allow and not reference.is_named(requester, policy.allow):
                yield f"{cluster} does not lend to {requester}"
            if reference.is_named(requester, policy.deny):
                yield f"{cluster} denies {requester}"
            if not reference.is_open((policy.hours,), at):
                yield f"{cluster} is closed"
            for name, _ in found.request.resources.items():  # noqa: PERF102 - not a dict
                if self.available(cluster).amount(name) < policy.keep_back.amount(name):
                    yield f"{found.id} took {name} that {cluster} keeps back"
                if self._loaned(cluster).amount(name) > policy.max_lent.get(name, 10**20):
                    yield f"{cluster} lends more {name} than it wants to"
                if own.amount(name) > policy.max_per_requester.get(name, 10**20):
                    yield f"{cluster} lends {requester} more {name} than it wants to"

    def _excesses(self, found: Reservation) -> Iterator[str]:
        quota = self.limits(found.requester).quota
        mine = [r for r in self.reservations.values() if r.requester == found.requester]
        live = [one for one in mine if one.is_live]
        if quota is None:
            return
        if quota.reservations is not None and len(live) > quota.reservations:
            yield f"{found.requester} holds more reservations than its quota"
        for name, _ in found.request.resources.items():  # noqa: PERF102 - not a dict
            if _sum(live).amount(name) > quota.amounts.get(name, 10**20):
                yield f"{found.requester} holds more {name} than its quota"

    def _overspent(self, found: Reservation, at: datetime) -> Iterator[str]:
        quota = self.limits(found.requester).quota
        if quota is None or quota.budget is None or not found.hourly:
            return
        if found.currency != quota.currency:
            yield f"{found.id} costs another currency than the budget's"
        day = at.replace(hour=0, minute=0, second=0, microsecond=0)
        while found.expires_at is not None and day < found.expires_at:
            spent = sum(
                reference.spent_on(one, day, quota.currency)
                for one in self.reservations.values()
                if one.requester == found.requester
            )
            if spent > quota.budget:
                yield f"{found.requester} spends {float(spent)} on {day:%d %B}"
            day += timedelta(days=1)

    def _loaned(self, cluster: ClusterId) -> Resources:
        return _sum([r for r in self.reservations.values() if r.is_live and r.target == cluster])


def holds(ledger: Ledger) -> set[tuple[ReservationId, ClusterId]]:
    """Every live hold there is, as the records tell it: which reservation, on which cluster."""
    return {
        (found.id, found.target)
        for found in ledger.reservations.values()
        if found.phase in ("Reserved", "Active") and found.target is not None
    }


def _sum(reservations: list[Reservation]) -> Resources:
    return sum((found.request.resources for found in reservations), Resources())


def vector(size):
    cpu, memory, fpga = size
    return Resources(cpu * 1000, memory * GI, 0, 0, {"example.com/fpga": fpga})


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.runner = make.CommandRunner(CheckedLedger(), START)
        self.runner.max_waiting = 5
        self.looked_at = START
        """When the broker last looked at the clock."""
        self.monitor = self.runner.monitor(LOST_AFTER)

    @property
    def ledger(self) -> CheckedLedger:
        assert isinstance(self.runner.ledger, CheckedLedger)
        return self.runner.ledger

    def pick(self, number):
        known = sorted(self.ledger.reservations)
        return known[number % len(known)]

    def attempt(self, command, *args, **fields):
        """A command may be refused, but then nothing has happened."""
        before = self.ledger.revision
        try:
            return command(*args, **fields)
        except (errors.Conflict, errors.Forbidden, errors.NotFound, errors.QueueFull):
            assert self.ledger.revision == before
            return None

    def ask(self, asked):
        """Whatever is answered at once is what the plain reference decides just before."""
        known = asked.key is not None and self.ledger.by_key(asked.requester, asked.key)
        expected = reference.decide(self.runner.question(asked), self.ledger)
        too_much = reference.exceeds_quota(asked, self.ledger)
        seen = len(self.ledger.events)
        answer = self.attempt(self.runner.ask, asked)
        if not known and too_much:
            assert (answer, len(self.ledger.events)) == (None, seen)
        elif not known:
            first = next(iter(self.ledger.events[seen:]), None)
            placed = first.reservation.target if isinstance(first, Requested) else None
            assert placed == (None if expected is None else expected[0])
            assert isinstance(answer, NoFit) == (expected is None and not asked.wait)
        return answer

    # -- what can happen

    @initialize(size=st.tuples(st.integers(2, 6), st.integers(2, 4), st.just(1)))
    def open(self, size):
        """Most of it is lent from the start, so that waiting is the rule and not the exception."""
        for name in CLUSTERS:
            self.runner.advertise(name, vector(size), labels={"zone": "x"})
            self.runner.reserve(vector((size[0] - 1, 1, 0)), pinned=name)

    @rule(name=clusters, size=sizes, used=st.integers(0, 3), offer=st.sampled_from(OFFERS))
    def advertise(self, name, size, used, offer):
        self.runner.advertise(name, vector(size), allocated=f"cpu={used}", **offer)

    @rule(name=clusters)
    def advertise_again(self, name):
        """The same words at a later time: by far the most common event of a real fleet."""
        if name in self.ledger.clusters:
            self.runner.advertise(name, self.ledger.clusters[name].advertisement)

    @rule(
        size=sizes,
        requester=st.sampled_from(["r", "r", "a"]),
        duration=st.sampled_from([make.MINUTE, make.HOUR]),
        options=st.sampled_from(OPTIONS),
    )
    def reserve(self, size, requester, options, duration):
        fields = {"requester": requester, "duration": duration, **options}
        self.ask(make.request(vector(size), **fields))

    @rule(
        size=st.tuples(st.integers(1, 5), st.integers(1, 3), st.sampled_from([0, 0, 1])),
        priority=st.integers(0, 2),
        wait=st.sampled_from([make.MINUTE, make.HOUR, make.HOUR]),
        options=st.sampled_from(OPTIONS),
    )
    def reserve_or_wait(self, size, priority, wait, options):
        self.ask(make.request(vector(size), priority=priority, wait=wait, **options))

    @rule(key=st.sampled_from("kl"), requester=st.sampled_from("rs"), cpu=st.integers(1, 2))
    def retry(self, key, requester, cpu):
        known = self.ledger.by_key(requester, key)
        asked = make.request(f"cpu={cpu}", requester=requester, key=key, wait=make.MINUTE)
        revision = self.ledger.revision
        try:
            answer = self.ask(asked)
        except errors.KeyReused:
            assert known is not None
            assert known.request != asked
        else:
            assert known is None or (answer == known.id and known.request == asked)
        assert known is None or self.ledger.revision == revision

    @precondition(lambda self: NAMED not in self.ledger.reservations)
    @rule(cpu=st.integers(1, 4), wait=st.sampled_from([make.NO_TIME, make.HOUR]))
    def apply_object(self, cpu, wait):
        """With a name and a key that are used again and again."""
        asked = make.request(f"cpu={cpu},memory=1Gi", key=NAMED, wait=wait)
        self.attempt(self.runner.ask_as, NAMED, asked)

    @rule()
    def delete_object(self):
        self.runner.retire(NAMED)

    @precondition(lambda self: self.ledger.reservations)
    @rule(number=picks, command=st.sampled_from(["release", "release", "activate", "renew"]))
    def borrow_on(self, number, command):
        args = [make.HOUR] if command == "renew" else []
        self.attempt(getattr(self.runner, command), self.pick(number), *args)

    @precondition(lambda self: self.ledger.reservations)
    @rule(
        number=picks,
        command=st.sampled_from(["refuse", "refuse", "acknowledge"]),
        stranger=st.sampled_from([None, None, None, "a"]),
    )
    def lend_on(self, number, command, stranger):
        found = self.pick(number)
        provider = stranger or self.runner.target(found) or "a"
        self.attempt(getattr(self.runner, command), found, provider)

    @rule(
        name=clusters,
        command=st.sampled_from(["cordon", "uncordon", "uncordon", "drain", "remove", "withdraw"]),
    )
    def administer(self, name, command):
        self.attempt(getattr(self.runner, command), name)

    @rule(name=clusters, policy=st.sampled_from(POLICIES))
    def limit(self, name, policy):
        self.runner.limit(name, **policy)

    @rule(name=st.sampled_from(["r", "r", "s", "a"]), quota=st.sampled_from(QUOTAS))
    def allot(self, name, quota):
        if quota:
            self.runner.allot(name, **quota)
        else:
            self.attempt(self.runner.lift, name)

    @rule(seconds=st.sampled_from([1, 30, 60, 540]), forget=st.booleans(), swept=st.booleans())
    def pass_time(self, seconds, forget, swept):
        self.runner.pass_time(seconds * make.SECOND)
        if swept:
            self.looked_at = self.runner.now
            self.runner.expire(make.NO_TIME if forget else make.RETENTION)
            deadlines = [found.deadline for found in self.ledger.reservations.values()]
            assert all(deadline is None or deadline > self.runner.now for deadline in deadlines)

    @rule(silent=clusters, size=sizes, seconds=st.sampled_from([1, 30, 30]))
    def fall_silent(self, silent, size, seconds):
        """What the only silent one lends finds another place, or stays; nothing else is touched."""
        self.runner.pass_time(make.STALE_AFTER)
        for name in sorted(self.ledger.clusters.keys() - {silent}):
            self.runner.advertise(name, vector(size))
        self.looked_at = self.runner.now
        self.runner.expire()
        before = {found.id: found for found in self.ledger.reservations.values() if found.is_live}
        given_up = self.runner.run_failover(self.monitor, seconds * make.SECOND)
        assert {found.id for found in given_up} <= {silent}
        for reservation, held in before.items():
            after = self.runner[reservation]
            moved = held.target == silent and after.left == (*held.left, silent)
            assert moved or (after.target, after.left) == (held.target, held.left)
            assert (after.is_live, after.expires_at) == (True, held.expires_at)

    @rule()
    def restart(self):
        restored = CheckedLedger.restore(self.runner.kept())
        assert make.state(restored) == make.state(self.ledger)
        restored.events = self.ledger.events
        restored.overbooked = self.ledger.overbooked
        self.runner.ledger = restored
        self.monitor = self.runner.monitor(LOST_AFTER)

    # -- what must hold

    @invariant()
    def audit_finds_nothing(self):
        assert audit.invariant_violations(self.ledger) == []

    @invariant()
    def no_hold_was_more_than_there_was(self):
        assert self.ledger.overbooked == []

    @invariant()
    def nobody_waits_for_what_is_there(self):
        for waiter in self.ledger.waiting():
            if self.is_judged(waiter) and not self.is_blocked(waiter):
                question = quotas.query_for_reservation(self.ledger, waiter, self.runner.now)
                assert reference.decide(question, self.ledger) is None

    def is_judged(self, waiter) -> bool:
        """Whether all that time alone has changed for it was looked at: openings, and its budget."""
        quota = self.ledger.limits(waiter.requester).quota
        has_budget = quota is not None and quota.budget is not None
        return self.looked_at == self.runner.now or not (has_budget or self.has_opened())

    def has_opened(self) -> bool:
        return any(
            reference.is_open(hours, self.runner.now)
            and not reference.is_open(hours, self.looked_at)
            for hours in map(self.hours, self.ledger.clusters.values())
        )

    def hours(self, cluster):
        return tuple(policy.hours for policy in reference.policies(cluster, self.ledger))

    def is_blocked(self, waiter) -> bool:
        return reference.exceeds_quota(waiter.request, self.ledger, served=True)

    @invariant()
    def nobody_returns_to_who_refused(self):
        for found in self.ledger.reservations.values():
            been = [*found.left, found.target]
            assert len(set(been)) == len(been)

    @invariant()
    def each_nomination_is_for_one_waiter_and_adds_up_to_something(self):
        kept = [
            waiter.nominated_cluster
            for waiter in self.ledger.waiting()
            if waiter.nominated_cluster is not None
        ]
        assert len(set(kept)) == len(kept) == self.ledger.fleet.nomination_count
        # What opens is noticed by the clock, or when something comes free.
        assert self.has_opened() or all(self.ledger.lent_by(cluster) for cluster in kept)

    @invariant()
    def a_cluster_is_kept_where_and_only_where_it_could_serve(self):
        for waiter in filter(self.is_judged, self.ledger.waiting()):
            if waiter.nominated_cluster is None:
                assert not any(self.could_serve(c, waiter) for c in self.ledger.clusters.values())
            else:
                kept = self.ledger.clusters[waiter.nominated_cluster]
                # Going stale or closing is no event: it is noticed when something comes free.
                is_closed = not reference.is_open(self.hours(kept), self.runner.now)
                stale = kept.is_stale(self.runner.now)
                assert stale or is_closed or self.could_serve(kept, waiter)

    def could_serve(self, cluster, waiter) -> bool:
        """Once it lends nothing to anybody else."""
        question = quotas.query_for_reservation(self.ledger, waiter, self.runner.now)
        obstacles = set(reference.rejections(question, cluster, self.ledger))
        fits = reference.could_serve(waiter, cluster, self.ledger)
        return fits and obstacles <= CURED_BY_WAITING

    def teardown(self):
        replayed, follower, late_follower = Ledger(), Ledger(), Ledger()
        for first in range(0, len(self.ledger.events), GROUP):
            changes = []
            for event in self.ledger.events[first : first + GROUP]:
                changes.append(replayed.apply(event))
                follower.apply_changes(changes[-1:], replayed.revision)
            late_follower.apply_changes(list(as_followed(changes)), replayed.revision)
        assert make.state(replayed) == make.state(self.ledger)
        assert make.state(follower) == make.state(self.ledger)
        assert make.state(late_follower) == make.state(self.ledger)
        self.restart()


def as_followed(changes):
    """What a store's followers see of a group of changes: the last one of each record."""
    batch = stores_batch.fold(changes)
    for name, cluster in batch.clusters.items():
        yield cluster or ClusterDeleted(name)
    yield from batch.reservations.values()
    yield from map(Archived, batch.archived)
    for (kind, id_), document in batch.documents.items():
        yield document or RecordDeleted(kind, id_)


LedgerMachine.TestCase.settings = settings(stateful_step_count=50)
# A failure takes long to shrink, and is worth it: cut short, it says nothing.
TestLedgerMachine = pytest.mark.timeout(600)(LedgerMachine.TestCase)
