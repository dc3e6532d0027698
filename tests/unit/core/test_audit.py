"""The audit: invariants of a ledger, the chained log, and the replay of the log against the store."""

from datetime import timedelta

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

import make
from kubelend.core import audit, audit_log, commands, enrolment, errors
from kubelend.core.accounts import CostInterval
from kubelend.core.audit import MAX_CLOCK_SKEW, AuditLogReplay
from kubelend.core.audit_log import (
    BROKER_ACTOR,
    CHAIN_START,
    Actor,
    AuditEntry,
    AuditLine,
)
from kubelend.core.events import ClusterRemoved, Nominated, RetentionExpired, WorkingSet
from kubelend.core.ledger import Ledger
from kubelend.core.lifecycle import FINAL, Phase, Reason, Role
from kubelend.core.members import Certificate, Member, MembershipStatus, Token, TokenId, member_id
from kubelend.core.models import Cluster, ClusterId, Limits, ReservationId

A, B = ClusterId("a"), ClusterId("b")


@pytest.fixture
def runner():
    made = make.runner(a="cpu=4,memory=8Gi,example.com/fpga=2", b="cpu=4,memory=8Gi")
    made.reserve("cpu=2,memory=1Gi,example.com/fpga=1", requester="r", key="k")
    made.release(made.reserve("cpu=1,memory=1Gi"))
    made.reserve("cpu=9,memory=1Gi", wait=make.HOUR)
    return made


def restored(runner, **fields):
    """The ledger of a store in which somebody changed the first reservation."""
    clusters, (first, *others), revision, *_ = runner.kept()
    return Ledger.restore(WorkingSet(clusters, [replace(first, **fields), *others], revision))


@pytest.mark.parametrize("fixture", ["runner", "limited"])
def test_sound_ledger_has_no_violations(request, fixture):
    runner = request.getfixturevalue(fixture)
    for ledger in (runner.ledger, Ledger.restore(runner.kept()), Ledger()):
        assert audit.invariant_violations(ledger) == []


@pytest.mark.parametrize(
    "fields, sentence",
    [
        ({"target": None}, "rsv-1: is Reserved without a target and an expiry"),
        ({"expires_at": None}, "rsv-1: is Reserved without a target and an expiry"),
        ({"target": ClusterId("r")}, "rsv-1: has its requester as provider"),
        ({"phase": Phase.PENDING}, "rsv-1: is Pending without a wait timeout"),
        ({"phase": Phase.FAILED}, "rsv-1: is Failed without a finish time"),
        ({"request": make.request("")}, "rsv-1: requests no resources"),
        ({"revision": 99}, "rsv-1: revision 99 is ahead of the ledger's 6"),
    ],
    ids=str,
)
def test_record_that_cannot_be_is_found(runner, fields, sentence):
    assert sentence in audit.invariant_violations(restored(runner, **fields))


def test_shared_key_is_found(runner):
    clusters, reservations, revision, *_ = runner.kept()
    twin = replace(reservations[0], id="rsv-twin", phase=Phase.FAILED, finished_at=make.T0)
    ledger = Ledger.restore(WorkingSet(clusters, [*reservations, twin], revision))
    assert audit.invariant_violations(ledger) == ["r: 2 reservations share the idempotency key 'k'"]


def test_cluster_that_is_not_kept_for_its_waiter_is_found():
    runner = make.runner(a="cpu=4,memory=8Gi")
    runner.reserve("cpu=1,memory=1Gi")
    waiter = runner.reserve("cpu=4,memory=1Gi", wait=make.HOUR)
    assert audit.invariant_violations(runner.ledger) == []
    runner.ledger.fleet.set_nomination(ClusterId("a"), None)
    sentence = "the fleet has 0 nominations for 1 waiting requests"
    assert audit.invariant_violations(runner.ledger) == [sentence]
    runner.ledger.apply(ClusterRemoved(runner.now, ClusterId("a")))
    assert f"{waiter}: a is not nominated for it" in audit.invariant_violations(runner.ledger)


class Forgetful(Ledger):
    """Counts nothing as reserved: what the Go system did when an advertisement was recreated."""

    def reserved(self, cluster):
        return make.resources("")


def test_reserved_that_is_not_the_sum_is_found(runner):
    (found,) = audit.invariant_violations(Forgetful.restore(runner.kept()))[:1]
    assert found.startswith("a: reserved is {'cpu': '0', 'memory': '0'}, its live reservations are")


@pytest.fixture
def limited(runner):
    """The same with a policy and a quota, set after the first loans were made."""
    runner.advertise("b", "cpu=4,memory=8Gi", prices=make.price_list(cpu="1"))
    runner.limit("a", keep_back="cpu=1", max_lent="cpu=3", max_per_requester="cpu=3")
    runner.allot("r", "cpu=20", budget="100")
    runner.reserve("cpu=1,memory=1Gi", pinned="b")
    return runner


def usage(ledger):
    return ledger.quota_usages.by_requester[make.R]


def set_free(ledger, cluster, amounts):
    free = ledger.available(ClusterId(cluster)) + make.resources(amounts)
    ledger.fleet.set_free(ClusterId(cluster), free, free)


def forget_lent(ledger, name):
    ledger.fleet.lent_by_requester.remove(A, ledger.reservation(name))


MISCOUNTED = "r: the quota usage is not the sum of its reservations"
NOT_COVERED = "the quota usage does not cover exactly the requesters with a quota"
NOT_LENT = "the amounts lent per requester are not the sums of its reservations"
LOCKED = {(Phase.FAILED, Reason.LOCKED): 1}


@pytest.mark.parametrize(
    "spoil, sentence",
    [
        *(
            (lambda ledger, name=name: set_free(ledger, "b", f"{name}=1"), f"{name} free, not ")
            for name in ("cpu", "memory", "gpu", "storage", "example.com/fpga")
        ),
        (lambda ledger: set_free(ledger, "a", ""), "a: the fleet has 2000 cpu free, not 1000"),
        (lambda ledger: usage(ledger).daily_spend.add(CostInterval(0, 1, 1)), MISCOUNTED),
        (lambda ledger: setattr(usage(ledger), "pending_count", 7), MISCOUNTED),
        (lambda ledger: setattr(usage(ledger), "held", make.resources("cpu=1")), MISCOUNTED),
        (lambda ledger: ledger.quota_usages.by_requester.clear(), NOT_COVERED),
        (lambda ledger: forget_lent(ledger, "rsv-1"), NOT_LENT),
        (lambda ledger: ledger.fleet.remove(B), "does not contain the clusters of the ledger"),
        (
            lambda ledger: ledger.phase_counts.update(LOCKED),
            "Failed with reason Locked is 1, not 0",
        ),
    ],
)
def test_index_that_does_not_follow_from_the_records_is_found(limited, spoil, sentence):
    spoil(limited.ledger)
    (found,) = audit.invariant_violations(limited.ledger)
    assert sentence in found


def test_overcommitted_cluster_is_named_and_is_no_violation(runner):
    assert audit.overcommitted_clusters(runner.ledger) == []
    runner.advertise("a", "cpu=4,memory=8Gi,example.com/fpga=2", allocated="cpu=3")
    assert audit.overcommitted_clusters(runner.ledger) == ["a"]
    assert audit.invariant_violations(runner.ledger) == []


ALICE = Actor("alice", "admin", "192.0.2.1")
NAMED = ReservationId("an-object")


def entry(number):
    return AuditEntry(make.T0, ALICE, "Cordoned", f"cluster/{number}")


def chained(count):
    lines = audit_log.chain_entries([entry(number) for number in range(1, count + 1)], CHAIN_START)
    return lines, lines[-1].head


def audit_lines(runner):
    entries = [change for change in runner.changes if isinstance(change, AuditEntry)]
    return audit_log.chain_entries(entries, CHAIN_START)


def decoded(runner):
    return [audit_log.decode_line(line) for line in audit_lines(runner)]


def breaks(lines, start, end):
    return list(audit_log.verify_chain(lines, start, end))


def with_third(lines, line):
    return [*lines[:2], line, *lines[3:]]


def with_one_more(lines):
    return [*lines, *audit_log.chain_entries([entry(6)], lines[-1].head)]


MODIFIED = ["line 3 was modified", "line 4 was modified"]
TOO_LONG = "the audit log ends with line 6, which is not the recorded line 5"


@pytest.mark.parametrize(
    "spoil, expected",
    [
        (lambda lines: lines, []),
        (lambda lines: lines[:2] + lines[3:], ["line 3 is missing"]),
        (lambda lines: lines[3:], ["lines 1 to 3 are missing"]),
        (lambda lines: lines[:3], ["lines 4 to 5 are missing"]),
        (lambda lines: with_third(lines, lines[2]._replace(text=b"{}")), MODIFIED[:1]),
        (lambda lines: with_third(lines, AuditLine(3, b"{}", bytes(32))), MODIFIED),
        (with_one_more, [TOO_LONG]),
    ],
    ids=["none", "one gone", "first gone", "last gone", "changed", "exchanged", "inserted"],
)
def test_every_change_of_the_lines_breaks_the_chain(spoil, expected):
    lines, end = chained(5)
    assert [line.number for line in lines] == [1, 2, 3, 4, 5]
    assert breaks(spoil(lines), CHAIN_START, end) == expected


def test_line_that_is_chained_anew_breaks_the_next_one():
    """Whoever changes a line and its digest has to change all that follow, and where it ends."""
    assert breaks([], CHAIN_START, CHAIN_START) == []
    lines, end = chained(3)
    (forged,) = audit_log.chain_entries([entry(9)], lines[0].head)
    assert breaks([lines[0], forged, lines[2]], CHAIN_START, end) == ["line 3 was modified"]
    anew = audit_log.chain_entries([entry(3)], forged.head)
    assert breaks([lines[0], forged, *anew], CHAIN_START, end) == [
        "the audit log ends with line 3, which is not the recorded line 3"
    ]


def test_only_a_truncation_with_its_own_entry_is_none_of_missing_lines():
    """Whoever takes lines out at the front can write where the chain stood, but not the line about it."""
    lines, end = chained(5)
    sentence = "lines up to {} are missing, and no line records their truncation"
    assert breaks(lines[3:], lines[2].head, end) == [sentence.format(3)]
    made = audit_log.truncation_entry(lines[2], make.T0, make.T0)
    rest = [*lines[3:], *audit_log.chain_entries([made], end)]
    assert breaks(rest, lines[2].head, rest[-1].head) == []
    assert breaks(rest[1:], rest[0].head, rest[-1].head) == [sentence.format(4)]


def test_line_has_actor_action_before_and_after():
    runner = make.CommandRunner()
    runner.advertise("a", region="eu")
    held = runner.reserve("cpu=1,memory=1Gi")
    runner.release(held)
    seen, made, released = decoded(runner)
    assert (seen.action, seen.subject, seen.actor.name) == ("Advertised", "cluster/a", "broker")
    assert made.before == {}
    assert made.after["phase"] == "Reserved"
    assert made.after["target"] == "a"
    assert made.after["resources"] == {"cpu": 1000, "memory": 1 << 30}
    assert released.before == {"phase": "Reserved", "reason": "Locked"}
    assert released.after == {"phase": "Released", "reason": "ReleasedByRequester"}


def test_advertisement_with_new_amounts_only_is_not_audited():
    runner = make.CommandRunner()
    runner.advertise("a", "cpu=4,memory=8Gi")
    runner.pass_time(timedelta(seconds=30))
    runner.advertise("a", "cpu=2,memory=4Gi")
    assert [line.action for line in decoded(runner)] == ["Advertised"]
    runner.advertise("a", "cpu=2,memory=4Gi", region="eu")
    assert decoded(runner)[-1].after == {"labels": {"topology.kubernetes.io/region": "eu"}}


@pytest.mark.parametrize(
    "event",
    [Nominated(make.T0, NAMED, None), RetentionExpired(make.T0, NAMED)],
    ids=lambda event: type(event).__name__,
)
def test_housekeeping_is_not_audited(event):
    found = make.reservation(NAMED)
    assert commands.audit_entry(ALICE, event, found, found) is None


def test_digest_of_a_token_is_in_no_line():
    token = Token(TokenId("abc"), "d1ge57", Role.CLUSTER, make.T0, "alice", make.T0)
    created = AuditEntry(make.T0, ALICE, "TokenCreated", "token/abc", None, token)
    (line,) = audit_log.chain_entries([created], CHAIN_START)
    assert b"d1ge57" not in line.text
    assert b"usesLeft" in line.text


MEMBER = replace(
    Member(Role.CLUSTER, "a", MembershipStatus.REVOKED, make.T0, "old", "new"),
    token=TokenId("abc"),
    certificate=Certificate("1", make.T0, make.T0, "ca"),
    revoked_at=make.T0,
    reason="why",
    forget_at=make.T0,
)
PRICES = make.price_list(cpu="1")


@pytest.mark.parametrize(
    "record, names",
    [
        (
            make.reservation(target="a", expires_at=make.T0, acknowledged_at=make.T0),
            "phase reason requester resources target expiresAt acknowledgedAt",
        ),
        (
            make.cluster(cordon="why", region="eu", prices=PRICES, policy=make.policy()),
            "cordon labels prices policy",
        ),
        (
            Cluster(replace(make.advertisement(), endpoint="https://a"), make.T0, make.T0),
            "endpoint",
        ),
        (MEMBER, "status key pendingKey reason certificate revokedAt forgetAt token"),
        (
            Token(TokenId("abc"), "d1ge57", Role.CLUSTER, make.T0, "alice", make.T0, name="a"),
            "role name usesLeft expiresAt",
        ),
        (Limits(ClusterId("a"), make.policy(), make.quota()), "policy quota"),
    ],
    ids=["reservation", "cluster", "reachable cluster", "member", "token", "limits"],
)
def test_line_has_what_was_decided_of_each_kind(record, names):
    assert list(audit_log.audited_fields(record)) == names.split()


def differences(records, lines, *, complete_until=None, start=None, end=None):
    """What a replay of these lines finds; by default they are the whole audit log."""
    start = lines[0].number - 1 if start is None else start
    end = lines[-1].number if end is None else end
    until = end if complete_until is None else complete_until
    replay = AuditLogReplay(Ledger.restore(records), until)
    for line in lines:
        replay.feed(line)
    return [*replay.missing().values(), *replay.violations(start, end)]


def without(history, *names):
    kept = history.kept()
    return kept._replace(reservations=[one for one in kept.reservations if one.id not in names])


def with_changed(history, name, **fields):
    changed = [replace(one, **fields) for one in history.kept().reservations if one.id == name]
    others = without(history, name)
    return others._replace(reservations=[*others.reservations, *changed])


@pytest.fixture
def history():
    """One reservation of each phase."""
    made = make.runner(a="cpu=4,memory=8Gi", b="cpu=4,memory=8Gi")
    made.reserve("cpu=1", pinned="b")
    made.activate(made.reserve("cpu=1", pinned="a"))
    made.reserve("cpu=9", wait=make.HOUR)
    made.release(made.reserve("cpu=1"))
    return made


def test_reservation_that_is_not_over_and_not_there_is_lost(history):
    """Wherever it has moved."""
    moved = history.reserve("cpu=1", excluded="b")
    history.advertise("c")
    history.refuse(moved, "a")
    lines, gone = audit_lines(history), "in the audit log, but is missing in the store"
    for name, what in ((moved, "Reserved on c"), ("rsv-2", "Active on a"), ("rsv-3", "Pending")):
        assert differences(without(history, name), lines) == [f"{name}: it is {what} {gone}"]


@pytest.mark.parametrize(
    "name, fields, logged, stored",
    [
        ("rsv-1", {"phase": Phase.ACTIVE}, "is Reserved on b", "is Active on b"),
        ("rsv-1", {"target": A}, "is Reserved on b", "is Reserved on a"),
        ("rsv-3", {"phase": Phase.RELEASED, "finished_at": make.T0}, "is Pending", "is Released"),
        ("rsv-4", {"phase": Phase.RESERVED}, "is Released on a", "is Reserved on a"),
    ],
    ids=["in use", "elsewhere", "over", "back again"],
)
def test_record_that_differs_is_found(history, name, fields, logged, stored):
    expected = f"{name}: it {logged} in the audit log, but {stored} in the store"
    assert differences(with_changed(history, name, **fields), audit_lines(history)) == [expected]


def test_live_reservation_without_an_entry_is_found(history):
    kept, later = history.kept(), history.now + make.SECOND
    fields = {"phase": Phase.RESERVED, "target": B, "expires_at": later + make.HOUR}
    secret = make.reservation("rsv-secret", created_at=later, **fields)
    records = kept._replace(reservations=[*kept.reservations, secret])
    assert differences(records, audit_lines(history)) == [
        "rsv-secret: it is Reserved on b in the store, but the audit log has no entry for it"
    ]


def test_of_a_reservation_older_than_the_lines_only_what_they_contain_is_compared(history):
    history.pass_time(make.MINUTE)
    before = len(audit_lines(history))
    history.renew(ReservationId("rsv-1"), 2 * make.HOUR)
    lines = audit_lines(history)[before:]
    assert differences(history.kept(), lines) == []
    # Neither its phase nor its provider is in the lines.
    assert differences(with_changed(history, "rsv-1", phase=Phase.ACTIVE, target=A), lines) == []
    assert differences(without(history, "rsv-1", "rsv-2", "rsv-3"), lines) == [
        "rsv-1: it is present in the audit log, but is missing in the store"
    ]
    over = with_changed(history, "rsv-1", phase=Phase.RELEASED, finished_at=history.now)
    assert differences(over, lines) == [
        "rsv-1: it is present in the audit log, but is Released on b in the store"
    ]


@pytest.mark.parametrize(
    "younger_by, is_found",
    [(make.NO_TIME, False), (MAX_CLOCK_SKEW, False), (MAX_CLOCK_SKEW + make.SECOND, True)],
)
def test_reservation_without_an_entry_may_be_older_than_the_truncation(
    history, younger_by, is_found
):
    history.pass_time(younger_by)
    history.advertise("a")
    held = history.reserve("cpu=1")
    last = audit_lines(history)[-1]
    # The lines of its birth are lost, and another one is the first that is left.
    first = AuditEntry(history.now - younger_by, BROKER_ACTOR, "x", "cluster/x")
    (line,) = audit_log.chain_entries([first], CHAIN_START)
    found = differences(history.kept(), [line._replace(number=last.number + 1)])
    expected = f"{held}: it is Reserved on a in the store, but the audit log has no entry for it"
    assert found == ([expected] if is_found else [])


@pytest.mark.parametrize(
    "lines", [slice(1, None), slice(None, -1), slice(0, 0)], ids=["first", "last", "all"]
)
def test_missing_lines_are_reported(history, lines):
    whole = audit_lines(history)
    found = differences(history.kept(), whole[lines], start=0, end=len(whole))
    assert "lines of the audit log are missing: see `kubelend audit verify`" in found


def test_undecodable_line_is_reported(history):
    lines = audit_lines(history)
    lines[3] = lines[3]._replace(text=b"{")
    found = differences(history.kept(), lines)
    assert found == ["line 4 of the audit log cannot be decoded: see `kubelend audit verify`"]


def test_state_from_before_a_truncation_is_dropped_with_it(history):
    """The line of an end may be among those that were truncated while they were read."""
    born = audit_lines(history)
    history.release(ReservationId("rsv-1"))
    last = len(audit_lines(history))
    history.reserve("cpu=1")
    lines = [*born, *audit_lines(history)[last:]]
    history.pass_time(2 * make.RETENTION)
    kept = without(history, "rsv-1")
    assert differences(kept, lines, start=last) == []
    assert "lines of the audit log are missing" in differences(kept, lines, start=0)[0]


def test_what_changes_while_the_store_is_read_is_not_compared(history):
    before, earlier = len(audit_lines(history)), history.kept()
    history.release(ReservationId("rsv-1"))
    history.reserve("cpu=1")
    later = history.kept()
    for records in (earlier, later):
        assert differences(records, audit_lines(history), complete_until=before) == []
    assert differences(earlier, audit_lines(history)) != []
    lost = earlier._replace(reservations=earlier.reservations[:1])
    assert len(differences(lost, audit_lines(history), complete_until=before)) == 2


def admit(history, name="berlin"):
    ledger, now, policy = history.ledger, history.now, enrolment.JoinPolicy()
    token = Token(TokenId("abc"), "0" * 64, Role.CLUSTER, now, "alice", now + make.HOUR)
    history.run(enrolment.create_token(ledger, token, policy, now))
    applicant = enrolment.Applicant(Role.CLUSTER, name, "k1")
    decision = enrolment.decide_join(ledger, applicant, token, policy, now)
    history.run(enrolment.join_member(ledger, decision, None, now))


def revoke(history, name="berlin"):
    fields = {"reason": "lost", "by": "alice", "release": True, "now": history.now}
    history.run(enrolment.revoke_member(history.ledger, Role.CLUSTER, name, **fields))


def test_member_that_was_revoked_must_be_there_and_revoked(history):
    admit(history)
    earlier = history.kept().members
    revoke(history)
    for members, stored in (((), "is missing"), (earlier, "is Pending")):
        assert differences(history.kept()._replace(members=members), audit_lines(history)) == [
            f"member/cluster/berlin: it is Revoked in the audit log, but {stored} in the store"
        ]


def test_token_that_was_removed_must_be_gone_and_no_other(history):
    admit(history)
    tokens = history.kept().tokens
    assert differences(history.kept()._replace(tokens=()), audit_lines(history)) == [
        "token/abc: it is present in the audit log, but is missing in the store"
    ]
    history.run(enrolment.delete_token(history.ledger, TokenId("abc"), history.now))
    assert differences(history.kept(), audit_lines(history)) == []
    assert differences(history.kept()._replace(tokens=tokens), audit_lines(history)) == [
        "token/abc: it was removed in the audit log, but is present in the store"
    ]


def pick(history, number):
    known = sorted(history.ledger.reservations)
    return known[number % len(known)] if known else ReservationId("no-such")


STEPS = {
    "advertise": lambda r, n: r.advertise("abc"[n % 3], f"cpu={n},memory=8Gi"),
    "reserve": lambda r, n: r.ask("cpu=1", requester="rsa"[n % 3]),
    "wait": lambda r, n: r.ask(f"cpu={n + 1}", wait=make.HOUR, priority=n % 3),
    "apply": lambda r, n: r.ask_as(NAMED, make.request(f"cpu={n + 1}", wait=make.HOUR)),
    "delete": lambda r, _: r.retire(NAMED),
    "activate": lambda r, n: r.activate(pick(r, n)),
    "renew": lambda r, n: r.renew(pick(r, n), 2 * make.HOUR),
    "release": lambda r, n: r.release(pick(r, n)),
    "acknowledge": lambda r, n: r.acknowledge(pick(r, n), r.target(pick(r, n))),
    "refuse": lambda r, n: r.refuse(pick(r, n), r.target(pick(r, n))),
    "drain": lambda r, n: r.drain("abc"[n % 3]),
    "uncordon": lambda r, n: r.uncordon("abc"[n % 3]),
    "withdraw": lambda r, n: r.withdraw("abc"[n % 3]),
    "admit": lambda r, n: admit(r, "abr"[n % 3]),
    "accept": lambda r, n: r.run(
        enrolment.approve_member(r.ledger, Role.CLUSTER, "abr"[n % 3], "", "alice", r.now)
    ),
    "revoke": lambda r, n: revoke(r, "abr"[n % 3]),
    "remove": lambda r, n: r.run(
        enrolment.remove_member(r.ledger, Role.CLUSTER, "abr"[n % 3], "alice", r.now)
    ),
    "wipe": lambda r, _: r.run(enrolment.collect_expired(r.ledger, r.now)),
    "time": lambda r, n: r.pass_time(n * n * make.MINUTE),
    "expire": lambda r, n: r.expire(make.RETENTION if n % 2 else make.NO_TIME),
    "failover": lambda r, _: r.run_failover(r.monitor(make.SECOND), 10 * make.SECOND),
}
steps = st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 9)), max_size=40)


def runner_after(done):
    history = make.runner(a="cpu=4,memory=8Gi", b="cpu=4,memory=8Gi")
    for name, number in done:
        try:
            STEPS[name](history, number)
        except errors.KubelendError:
            continue  # it was refused, and nothing has happened
    return history


@given(done=steps)
@example(done=[("apply", 1), ("delete", 0), ("apply", 9), ("failover", 0)])
@example(done=[("reserve", 0), ("release", 0), ("time", 9), ("time", 9), ("expire", 0)])
def test_sound_log_agrees_with_its_records_wherever_it_was_truncated(done):
    history = runner_after(done)
    kept, lines = history.kept(), audit_lines(history)
    for first in range(len(lines)):
        assert differences(kept, lines[first:]) == []


@given(done=steps)
@example(done=[("reserve", 0), ("admit", 2), ("time", 1)])
@example(done=[("apply", 1), ("delete", 0), ("apply", 9)])
def test_each_missing_live_record_is_reported_by_its_name(done):
    history = runner_after(done)
    kept, lines = history.kept(), audit_lines(history)
    for found in kept.reservations:
        expected = [] if found.phase in FINAL else [found.id]
        missing = differences(without(history, found.id), lines)
        assert [one.partition(":")[0] for one in missing] == expected
    for member in kept.members:
        rest = [one for one in kept.members if one != member]
        (missing,) = differences(kept._replace(members=rest), lines)
        assert missing.startswith(f"member/{member_id(member.role, member.name)}: ")
