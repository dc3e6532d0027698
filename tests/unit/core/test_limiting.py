"""Limits are set, audited, stored, cleared and restored."""

import pytest

import make
from kubelend.core import audit_log, commands, errors
from kubelend.core.audit_log import AuditEntry
from kubelend.core.events import RecordDeleted
from kubelend.core.ledger import Ledger
from kubelend.core.models import ClusterId, Limits

A = ClusterId("a")
POLICY = make.policy(allow=["team-*"], keep_back="cpu=2", max_lent="gpu=0", hours=["08:00-18:00"])
QUOTA = make.quota("cpu=32", reservations=5, budget="50", currency="EUR")


def last(desk, count=2):
    """The changes that the last command left."""
    return desk.changes[-count:]


def test_limits_are_stored_and_audited():
    desk = make.desk(a="cpu=4,memory=8Gi")
    desk.limit("a", POLICY)
    stored, entry = last(desk)
    assert stored == Limits(A, POLICY, revision=desk.ledger.revision)
    assert isinstance(entry, AuditEntry)
    assert (entry.action, entry.subject) == ("PolicySet", "limits/a")
    assert (entry.before, entry.after) == (None, stored)
    desk.allot("a", QUOTA)
    both, entry = last(desk)
    assert both == Limits(A, POLICY, QUOTA, desk.ledger.revision)
    assert isinstance(entry, AuditEntry)
    assert (entry.action, entry.before) == ("QuotaSet", stored)


def test_cluster_need_not_have_advertised_yet():
    desk = make.Desk()
    desk.limit("a", deny=["r"])
    desk.advertise("a")
    assert desk.refused("cpu=1,memory=1Gi") == "0/1 cluster fits: 1 RequesterDenied"


def test_what_is_set_outlives_the_cluster():
    desk = make.desk(a="cpu=4,memory=8Gi")
    desk.limit("a", deny=["r"])
    desk.remove("a")
    desk.advertise("a")
    assert desk.refused("cpu=1,memory=1Gi") == "0/1 cluster fits: 1 RequesterDenied"


def test_the_same_again_is_no_event():
    desk = make.Desk()
    for _ in range(2):
        desk.limit("a", POLICY)
        desk.allot("a", QUOTA)
    assert desk.ledger.revision == 2


@pytest.mark.parametrize("lift", ["with nothing", "by name"])
def test_limits_that_are_lifted_leave_nothing(lift):
    desk = make.Desk()
    desk.limit("a", POLICY)
    desk.allot("a", QUOTA)
    if lift == "by name":
        desk.run(commands.clear_policy(desk.ledger, A, desk.now))
    else:
        desk.limit("a", make.policy())
    desk.lift("a")
    change, entry = last(desk)
    assert change == RecordDeleted("limits", "a")
    assert isinstance(entry, AuditEntry)
    assert entry.after is None
    assert desk.kept().limits == []
    assert make.state(Ledger.restore(desk.kept())) == make.state(desk.ledger)


@pytest.mark.parametrize("clear", [commands.clear_policy, commands.clear_quota])
def test_what_is_not_set_cannot_be_cleared(clear):
    desk = make.desk(a="cpu=4,memory=8Gi")
    with pytest.raises(errors.NotFound):
        desk.run(clear(desk.ledger, A, desk.now))
    assert desk.ledger.revision == 1


def test_changed_policy_of_an_advertisement_is_reported_once():
    desk = make.Desk()
    for policy in (None, None, POLICY, POLICY, None):
        desk.advertise("a", policy=policy)
    audited = [
        audit_log.audited_fields(c.after)
        for c in desk.changes
        if isinstance(c, AuditEntry) and c.after
    ]
    assert [facts.get("policy") for facts in audited] == [None, POLICY, None]


def test_restored_ledger_has_the_same_limits():
    desk = make.desk(a="cpu=4,memory=8Gi", b="cpu=4,memory=8Gi")
    desk.reserve("cpu=1,memory=1Gi", pinned="a")
    desk.limit("a", make.policy(max_per_requester="cpu=2", deny=["x"], hours=["08:00-18:00"]))
    desk.advertise("b", policy=POLICY)
    desk.allot("r", QUOTA)
    restored = Ledger.restore(desk.kept())
    assert make.state(restored) == make.state(desk.ledger)
    assert restored.fleet.lent_by_requester.for_requester(make.R) == {
        "a": make.resources("cpu=1,memory=1Gi")
    }
