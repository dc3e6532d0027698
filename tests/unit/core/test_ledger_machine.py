"""Whatever happens, and in whatever order: the invariants of the design hold after every step.

Hypothesis plays clusters, borrowers, administrators, the passing of time and restarts against one
ledger, and shrinks what breaks it to a few steps.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

import make
import reference
from kubelend.core import audit, errors, waiting
from kubelend.core.decision import NoFit
from kubelend.core.events import Requested
from kubelend.core.filters import Question
from kubelend.core.ledger import Ledger
from kubelend.core.refusals import Refusal
from kubelend.core.resources import Resources

GI = 2**30
CLUSTERS = ["a", "b", "c"]
clusters = st.sampled_from(CLUSTERS)
sizes = st.tuples(st.integers(0, 6), st.integers(1, 4), st.sampled_from([0, 0, 1]))
picks = st.integers(0, 50)
OFFERS = [
    {},
    {},
    {"labels": {"zone": "x"}},
    {"prices": make.price_list(cpu="0.1")},
    {"prices": make.price_list(cpu="0.2"), "labels": {"zone": "x"}},
    {"valid_for": make.MINUTE},
]
WISHES = [
    {},
    {},
    {"labels": {"zone": "x"}},
    {"labels": {"zone": "x"}, "max_price": "0.3"},
    {"policy": "cost"},
    {"policy": "binpack", "excluded": ["b"]},
    {"pinned": "a"},
]
CURED_BY_WAITING = {
    Refusal.INSUFFICIENT_CPU,
    Refusal.INSUFFICIENT_MEMORY,
    Refusal.INSUFFICIENT_EXTENDED,
}


def vector(size):
    cpu, memory, fpga = size
    return Resources(cpu * 1000, memory * GI, 0, 0, {"example.com/fpga": fpga})


def holds(ledger):
    """Every live hold there is, as the records tell it: which reservation, on which cluster."""
    return {
        (found.id, found.target)
        for found in ledger.reservations.values()
        if found.phase in ("Reserved", "Active")
    }


class Watched(make.Recorder):
    """A ledger that looks at every hold in the moment it is taken, whichever event takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.overbooked: list[str] = []

    def apply(self, event):
        before = holds(self)
        change = super().apply(event)
        after = holds(self)
        for found, cluster in after - before:
            self.overbooked += self.shortages(self.reservations[found], cluster, after)
        return change

    def shortages(self, found, cluster, held):
        offer = self.clusters[cluster].advertisement
        promised = sum(
            (self.reservations[other].request.resources for other, on in held if on == cluster),
            start=offer.allocated,
        )
        # What was not asked for may be short already: the cluster's own pods may have taken it.
        asked = dict(found.request.resources.items())
        short = [name for name in asked if promised.amount(name) > offer.allocatable.amount(name)]
        return [f"{found.id} took {name} that {cluster} does not have" for name in short]


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.desk = make.Desk(Watched())
        self.desk.max_waiting = 5

    @property
    def ledger(self) -> Watched:
        assert isinstance(self.desk.ledger, Watched)
        return self.desk.ledger

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
        expected = reference.decide(Question(asked, self.desk.now), self.ledger)
        seen = len(self.ledger.events)
        answer = self.attempt(self.desk.ask, asked)
        if not known:
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
            self.desk.advertise(name, vector(size), labels={"zone": "x"})
            self.desk.reserve(vector((size[0] - 1, 1, 0)), pinned=name)

    @rule(name=clusters, size=sizes, used=st.integers(0, 3), offer=st.sampled_from(OFFERS))
    def advertise(self, name, size, used, offer):
        self.desk.advertise(name, vector(size), allocated=f"cpu={used}", **offer)

    @rule(name=clusters)
    def advertise_again(self, name):
        """The same words at a later time: by far the most common event of a real fleet."""
        if name in self.ledger.clusters:
            self.desk.advertise(name, self.ledger.clusters[name].advertisement)

    @rule(
        size=sizes,
        requester=st.sampled_from(["r", "r", "a"]),
        duration=st.sampled_from([make.MINUTE, make.HOUR]),
        wish=st.sampled_from(WISHES),
    )
    def reserve(self, size, requester, wish, duration):
        fields = {"requester": requester, "duration": duration, **wish}
        self.ask(make.request(vector(size), **fields))

    @rule(
        size=st.tuples(st.integers(1, 5), st.integers(1, 3), st.sampled_from([0, 0, 1])),
        priority=st.integers(0, 2),
        wait=st.sampled_from([make.MINUTE, make.HOUR, make.HOUR]),
        wish=st.sampled_from(WISHES),
    )
    def reserve_or_wait(self, size, priority, wait, wish):
        self.ask(make.request(vector(size), priority=priority, wait=wait, **wish))

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

    @precondition(lambda self: self.ledger.reservations)
    @rule(number=picks, command=st.sampled_from(["release", "release", "activate", "renew"]))
    def borrow_on(self, number, command):
        args = [make.HOUR] if command == "renew" else []
        self.attempt(getattr(self.desk, command), self.pick(number), *args)

    @precondition(lambda self: self.ledger.reservations)
    @rule(
        number=picks,
        command=st.sampled_from(["refuse", "refuse", "acknowledge"]),
        stranger=st.sampled_from([None, None, None, "a"]),
    )
    def lend_on(self, number, command, stranger):
        found = self.pick(number)
        provider = stranger or self.desk.target(found) or "a"
        self.attempt(getattr(self.desk, command), found, provider)

    @rule(
        name=clusters,
        command=st.sampled_from(["cordon", "uncordon", "uncordon", "drain", "remove"]),
    )
    def administer(self, name, command):
        self.attempt(getattr(self.desk, command), name)

    @rule(seconds=st.sampled_from([1, 30, 60, 540]), forget=st.booleans(), swept=st.booleans())
    def pass_time(self, seconds, forget, swept):
        self.desk.pass_time(seconds * make.SECOND)
        if swept:
            self.desk.expire(make.NO_TIME if forget else make.RETENTION)
            deadlines = [found.deadline for found in self.ledger.reservations.values()]
            assert all(deadline is None or deadline > self.desk.now for deadline in deadlines)

    @rule()
    def restart(self):
        restored = Watched.restore(self.desk.kept())
        assert make.state(restored) == make.state(self.ledger)
        restored.events = self.ledger.events
        self.desk.ledger = restored

    # -- what must hold

    @invariant()
    def audit_finds_nothing(self):
        assert audit.violations(self.ledger) == []

    @invariant()
    def no_hold_was_more_than_there_was(self):
        assert self.ledger.overbooked == []

    @invariant()
    def nobody_waits_for_what_is_there(self):
        for waiter in self.ledger.waiting():
            question = waiting.question_of(waiter, self.desk.now)
            assert reference.decide(question, self.ledger) is None

    @invariant()
    def nobody_returns_to_who_refused(self):
        for found in self.ledger.reservations.values():
            been = [*found.left, found.target]
            assert len(set(been)) == len(been)

    @invariant()
    def each_earmark_is_for_one_waiter_and_adds_up_to_something(self):
        kept = [waiter.earmark for waiter in self.ledger.waiting() if waiter.earmark is not None]
        assert len(set(kept)) == len(kept) == self.ledger.fleet.earmarks
        assert all(self.ledger.lent_by(cluster) for cluster in kept)

    @invariant()
    def a_cluster_is_kept_where_and_only_where_it_could_serve(self):
        for waiter in self.ledger.waiting():
            if waiter.earmark is None:
                assert not any(self.could_serve(c, waiter) for c in self.ledger.clusters.values())
            else:
                kept = self.ledger.clusters[waiter.earmark]
                # Going stale is no event: it is noticed when something comes free.
                assert kept.is_stale(self.desk.now) or self.could_serve(kept, waiter)

    def could_serve(self, cluster, waiter) -> bool:
        """Once it lends nothing to anybody else."""
        question = waiting.question_of(waiter, self.desk.now)
        obstacles = set(reference.refusals(question, cluster, self.ledger))
        fits = waiter.request.resources.fits_in(cluster.ceiling)
        return fits and obstacles <= CURED_BY_WAITING

    def teardown(self):
        replayed = Ledger()
        for event in self.ledger.events:
            replayed.apply(event)
        assert make.state(replayed) == make.state(self.ledger)
        self.restart()


LedgerMachine.TestCase.settings = settings(max_examples=400, stateful_step_count=50)
# A failure takes long to shrink, and is worth it: cut short, it says nothing.
TestLedgerMachine = pytest.mark.timeout(600)(LedgerMachine.TestCase)
