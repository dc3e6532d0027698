"""The replayed audit log and the store agree, or each difference is reported; a sound store has none."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

import make
from kubelend.core import audit_log, enrolment, errors
from kubelend.core.audit import MAX_CLOCK_SKEW, AuditLogReplay
from kubelend.core.audit_log import BROKER_ACTOR, AuditEntry, AuditLine
from kubelend.core.ledger import Ledger
from kubelend.core.lifecycle import FINAL, Phase, Role
from kubelend.core.members import Token, TokenId, member_id
from kubelend.core.models import ClusterId, ReservationId

NAMED = ReservationId("an-object")
A = ClusterId("a")
B = ClusterId("b")


def audit_lines(desk):
    entries = [change for change in desk.changes if isinstance(change, AuditEntry)]
    return audit_log.chain_entries(entries, audit_log.CHAIN_START)


def differences(records, lines, *, complete_until=None, start=None, end=None):
    """What a replay of these lines finds; by default they are the whole audit log."""
    start = lines[0].number - 1 if start is None else start
    end = lines[-1].number if end is None else end
    replay = AuditLogReplay(
        Ledger.restore(records), end if complete_until is None else complete_until
    )
    for line in lines:
        replay.feed(line)
    return [*replay.missing().values(), *replay.violations(start, end)]


def without(desk, *names):
    kept = desk.kept()
    return kept._replace(reservations=[one for one in kept.reservations if one.id not in names])


def with_changed(desk, name, **fields):
    changed = [replace(one, **fields) for one in desk.kept().reservations if one.id == name]
    others = without(desk, name)
    return others._replace(reservations=[*others.reservations, *changed])


@pytest.fixture
def desk():
    """One reservation of each phase."""
    made = make.desk(a="cpu=4,memory=8Gi", b="cpu=4,memory=8Gi")
    made.reserve("cpu=1", pinned="b")
    made.activate(made.reserve("cpu=1", pinned="a"))
    made.reserve("cpu=9", wait=make.HOUR)
    made.release(made.reserve("cpu=1"))
    return made


# -- what is lost


@pytest.mark.parametrize(
    "name, what", [("rsv-1", "Reserved on b"), ("rsv-2", "Active on a"), ("rsv-3", "Pending")]
)
def test_reservation_that_is_not_over_and_not_there_is_lost(desk, name, what):
    expected = f"{name}: it is {what} in the audit log, but is missing in the store"
    assert differences(without(desk, name), audit_lines(desk)) == [expected]


def test_reservation_that_is_over_need_not_be_there(desk):
    assert differences(without(desk, "rsv-4"), audit_lines(desk)) == []
    desk.pass_time(2 * make.RETENTION)
    desk.expire()
    assert differences(desk.kept(), audit_lines(desk)) == []


def test_move_is_followed_to_the_latest_provider(desk):
    held = desk.reserve("cpu=1")
    there = desk.target(held)
    desk.drain(there)
    target = {"a": "b", "b": "a"}[there]
    expected = f"{held}: it is Reserved on {target} in the audit log, but is missing in the store"
    assert differences(without(desk, held), audit_lines(desk)) == [expected]


def test_rejected_request_changes_no_state(desk):
    desk.changes.append(
        AuditEntry(desk.now, BROKER_ACTOR, "release", "reservation/no-such", code="no")
    )
    assert differences(desk.kept(), audit_lines(desk)) == []


# -- what differs


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
def test_record_that_differs_is_found(desk, name, fields, logged, stored):
    expected = f"{name}: it {logged} in the audit log, but {stored} in the store"
    assert differences(with_changed(desk, name, **fields), audit_lines(desk)) == [expected]


def test_live_reservation_without_an_entry_is_found(desk):
    kept, later = desk.kept(), desk.now + make.SECOND
    secret = make.reservation(
        "rsv-secret",
        phase=Phase.RESERVED,
        target=B,
        expires_at=later + make.HOUR,
        created_at=later,
    )
    records = kept._replace(reservations=[*kept.reservations, secret])
    assert differences(records, audit_lines(desk)) == [
        "rsv-secret: it is Reserved on b in the store, but the audit log has no entry for it"
    ]


# -- names that are used again


def test_name_that_was_retired_and_is_used_again_means_the_newer_one(desk):
    desk.ask_as(NAMED, make.request("cpu=1", pinned="a"))
    desk.retire(NAMED)
    assert differences(desk.kept(), audit_lines(desk)) == []
    desk.ask_as(NAMED, make.request("cpu=9", wait=make.HOUR))
    assert differences(desk.kept(), audit_lines(desk)) == []
    expected = "an-object: it is Pending in the audit log, but is missing in the store"
    assert differences(without(desk, NAMED), audit_lines(desk)) == [expected]
    desk.retire(NAMED)
    assert differences(desk.kept(), audit_lines(desk)) == []


# -- a truncated log


def test_of_a_reservation_older_than_the_lines_only_what_they_contain_is_compared(desk):
    desk.pass_time(make.MINUTE)
    before = len(audit_lines(desk))
    desk.renew(ReservationId("rsv-1"), 2 * make.HOUR)
    lines = audit_lines(desk)[before:]
    assert differences(desk.kept(), lines) == []
    # Neither its phase nor its provider is in the lines.
    assert differences(with_changed(desk, "rsv-1", phase=Phase.ACTIVE, target=A), lines) == []
    assert differences(without(desk, "rsv-1", "rsv-2", "rsv-3"), lines) == [
        "rsv-1: it is present in the audit log, but is missing in the store"
    ]
    over = with_changed(desk, "rsv-1", phase=Phase.RELEASED, finished_at=desk.now)
    assert differences(over, lines) == [
        "rsv-1: it is present in the audit log, but is Released on b in the store"
    ]


@pytest.mark.parametrize(
    "younger_by, is_found",
    [(make.NO_TIME, False), (MAX_CLOCK_SKEW, False), (MAX_CLOCK_SKEW + make.SECOND, True)],
)
def test_reservation_without_an_entry_may_be_older_than_the_truncation(desk, younger_by, is_found):
    desk.pass_time(younger_by)
    desk.advertise("a")
    held = desk.reserve("cpu=1")
    last = audit_lines(desk)[-1]
    # The lines of its birth are lost, and another one is the first that is left.
    first = audit_log.chain_entries(
        [AuditEntry(desk.now - younger_by, BROKER_ACTOR, "x", "cluster/x")], audit_log.CHAIN_START
    )
    lines = [AuditLine(last.number + 1, first[0].text, b"")]
    found = differences(desk.kept(), lines)
    assert found == (
        [f"{held}: it is Reserved on a in the store, but the audit log has no entry for it"]
        if is_found
        else []
    )


# -- lines that are missing, and lines that come while the store is read


@pytest.mark.parametrize(
    "lines, is_reported",
    [
        (slice(1, None), True),
        (slice(None, -1), True),
        (slice(0, 0), True),
        (slice(None), False),
    ],
    ids=["first", "last", "all", "none"],
)
def test_missing_lines_are_reported(desk, lines, is_reported):
    whole = audit_lines(desk)
    found = differences(desk.kept(), whole[lines], start=0, end=len(whole))
    sentence = "lines of the audit log are missing: see `kubelend audit verify`"
    assert (sentence in found) is is_reported


def test_undecodable_line_is_reported(desk):
    lines = audit_lines(desk)
    lines[3] = lines[3]._replace(text=b"{")
    found = differences(desk.kept(), lines)
    assert found == ["line 4 of the audit log cannot be decoded: see `kubelend audit verify`"]


def test_state_from_before_a_truncation_is_dropped_with_it(desk):
    """The line of an end may be among those that were truncated while they were read."""
    born = audit_lines(desk)
    desk.release(ReservationId("rsv-1"))
    last = len(audit_lines(desk))
    desk.reserve("cpu=1")
    lines = [*born, *audit_lines(desk)[last:]]
    desk.pass_time(2 * make.RETENTION)
    kept = without(desk, "rsv-1")
    assert differences(kept, lines, start=last) == []
    assert "lines of the audit log are missing" in differences(kept, lines, start=0)[0]


def test_what_changes_while_the_store_is_read_is_not_compared(desk):
    before, earlier = len(audit_lines(desk)), desk.kept()
    desk.release(ReservationId("rsv-1"))
    desk.reserve("cpu=1")
    later = desk.kept()
    for records in (earlier, later):
        assert differences(records, audit_lines(desk), complete_until=before) == []
    assert differences(earlier, audit_lines(desk)) != []
    lost = earlier._replace(reservations=earlier.reservations[:1])
    assert len(differences(lost, audit_lines(desk), complete_until=before)) == 2


# -- members and tokens


def admit(desk, name="berlin"):
    token = Token(TokenId("abc"), "0" * 64, Role.CLUSTER, desk.now, "alice", desk.now + make.HOUR)
    desk.run(enrolment.create_token(desk.ledger, token, enrolment.JoinPolicy(), desk.now))
    applicant = enrolment.Applicant(Role.CLUSTER, name, "k1")
    decision = enrolment.decide_join(
        desk.ledger, applicant, token, enrolment.JoinPolicy(), desk.now
    )
    desk.run(enrolment.join_member(desk.ledger, decision, None, desk.now))


def revoke(desk, name="berlin"):
    desk.run(
        enrolment.revoke_member(
            desk.ledger, Role.CLUSTER, name, reason="lost", by="alice", release=True, now=desk.now
        )
    )


def test_member_that_was_revoked_must_be_there_and_revoked(desk):
    admit(desk)
    earlier = desk.kept().members
    revoke(desk)
    kept, lines = desk.kept(), audit_lines(desk)
    assert differences(kept, lines) == []
    assert differences(kept._replace(members=()), lines) == [
        "member/cluster/berlin: it is Revoked in the audit log, but is missing in the store"
    ]
    assert differences(kept._replace(members=earlier), lines) == [
        "member/cluster/berlin: it is Revoked in the audit log, but is Pending in the store"
    ]


def test_token_that_was_removed_must_be_gone_and_no_other(desk):
    admit(desk)
    tokens = desk.kept().tokens
    assert differences(desk.kept()._replace(tokens=()), audit_lines(desk)) == [
        "token/abc: it is present in the audit log, but is missing in the store"
    ]
    desk.run(enrolment.delete_token(desk.ledger, TokenId("abc"), desk.now))
    assert differences(desk.kept(), audit_lines(desk)) == []
    assert differences(desk.kept()._replace(tokens=tokens), audit_lines(desk)) == [
        "token/abc: it was removed in the audit log, but is present in the store"
    ]


# -- whatever is done


def pick(desk, number):
    known = sorted(desk.ledger.reservations)
    return known[number % len(known)] if known else ReservationId("no-such")


STEPS = {
    "advertise": lambda desk, n: desk.advertise("abc"[n % 3], f"cpu={n},memory=8Gi"),
    "reserve": lambda desk, n: desk.ask("cpu=1", requester="rsa"[n % 3]),
    "wait": lambda desk, n: desk.ask(f"cpu={n + 1}", wait=make.HOUR, priority=n % 3),
    "apply": lambda desk, n: desk.ask_as(NAMED, make.request(f"cpu={n + 1}", wait=make.HOUR)),
    "delete": lambda desk, _: desk.retire(NAMED),
    "activate": lambda desk, n: desk.activate(pick(desk, n)),
    "renew": lambda desk, n: desk.renew(pick(desk, n), 2 * make.HOUR),
    "release": lambda desk, n: desk.release(pick(desk, n)),
    "acknowledge": lambda desk, n: desk.acknowledge(pick(desk, n), desk.target(pick(desk, n))),
    "refuse": lambda desk, n: desk.refuse(pick(desk, n), desk.target(pick(desk, n))),
    "drain": lambda desk, n: desk.drain("abc"[n % 3]),
    "uncordon": lambda desk, n: desk.uncordon("abc"[n % 3]),
    "withdraw": lambda desk, n: desk.withdraw("abc"[n % 3]),
    "admit": lambda desk, n: admit(desk, "abr"[n % 3]),
    "accept": lambda desk, n: desk.run(
        enrolment.accept_member(desk.ledger, Role.CLUSTER, "abr"[n % 3], "", "alice", desk.now)
    ),
    "revoke": lambda desk, n: revoke(desk, "abr"[n % 3]),
    "remove": lambda desk, n: desk.run(
        enrolment.remove_member(desk.ledger, Role.CLUSTER, "abr"[n % 3], "alice", desk.now)
    ),
    "wipe": lambda desk, _: desk.run(enrolment.collect_expired(desk.ledger, desk.now)),
    "time": lambda desk, n: desk.pass_time(n * n * make.MINUTE),
    "expire": lambda desk, n: desk.expire(make.RETENTION if n % 2 else make.NO_TIME),
    "failover": lambda desk, _: desk.run_failover(desk.monitor(make.SECOND), 10 * make.SECOND),
}
steps = st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 9)), max_size=40)


def desk_after(done):
    desk = make.desk(a="cpu=4,memory=8Gi", b="cpu=4,memory=8Gi")
    for name, number in done:
        try:
            STEPS[name](desk, number)
        except errors.KubelendError:
            continue  # it was refused, and nothing has happened
    return desk


@given(done=steps)
@example(done=[("apply", 1), ("delete", 0), ("apply", 9), ("failover", 0)])
def test_sound_log_agrees_with_its_records_wherever_it_was_truncated(done):
    desk = desk_after(done)
    kept, lines = desk.kept(), audit_lines(desk)
    for first in range(len(lines)):
        assert differences(kept, lines[first:]) == []


@given(done=steps)
@example(done=[("reserve", 0), ("admit", 2), ("time", 1)])
def test_each_missing_live_record_is_reported_by_its_name(done):
    desk = desk_after(done)
    kept, lines = desk.kept(), audit_lines(desk)
    for found in kept.reservations:
        expected = [] if found.phase in FINAL else [found.id]
        missing = differences(without(desk, found.id), lines)
        assert [one.partition(":")[0] for one in missing] == expected
    for member in kept.members:
        rest = [one for one in kept.members if one != member]
        (missing,) = differences(kept._replace(members=rest), lines)
        assert missing.startswith(f"member/{member_id(member.role, member.name)}: ")
