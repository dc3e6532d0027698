"""The count of reservations by phase and reason follows every change, and the audit watches over it."""

import make
from kubelend.core import audit
from kubelend.core.ledger import Ledger
from kubelend.core.lifecycle import Phase, Reason


def counted(desk):
    return {key: number for key, number in desk.ledger.phase_counts.items() if number}


def test_a_reservation_counts_once_whatever_happens_to_it():
    desk = make.desk(a="cpu=4,memory=8Gi")
    held = desk.reserve("cpu=1,memory=1Gi")
    assert counted(desk) == {(Phase.RESERVED, Reason.LOCKED): 1}
    desk.acknowledge(held, "a")
    desk.activate(held)
    desk.renew(held, 5 * make.HOUR)
    assert counted(desk) == {(Phase.ACTIVE, Reason.IN_USE): 1}
    desk.release(held)
    assert counted(desk) == {(Phase.RELEASED, Reason.BY_REQUESTER): 1}
    desk.pass_time(2 * make.RETENTION)
    desk.expire()
    assert counted(desk) == {}
    assert audit.invariant_violations(desk.ledger) == []


def test_a_move_changes_the_reason():
    desk = make.desk(a="cpu=4,memory=8Gi", b="cpu=4,memory=8Gi")
    desk.reserve("cpu=1,memory=1Gi")
    desk.drain("a")
    assert counted(desk) == {(Phase.RESERVED, Reason.MOVED): 1}


def test_a_restored_ledger_counts_the_same():
    desk = make.desk(a="cpu=4,memory=8Gi")
    desk.release(desk.reserve("cpu=1,memory=1Gi"))
    desk.reserve("cpu=1,memory=1Gi")
    desk.reserve("cpu=4,memory=1Gi", wait=make.HOUR)
    assert Ledger.restore(desk.kept()).phase_counts == desk.ledger.phase_counts


def test_the_audit_finds_a_wrong_count():
    desk = make.desk(a="cpu=4,memory=8Gi")
    desk.reserve("cpu=1,memory=1Gi")
    desk.ledger.phase_counts[Phase.RESERVED, Reason.LOCKED] += 1
    assert audit.invariant_violations(desk.ledger) == [
        "the count of Reserved with reason Locked is 2, not 1"
    ]
