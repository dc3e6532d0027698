"""The audit finds what is broken on purpose, and nothing in a ledger that is not."""

import pytest
from msgspec.structs import replace

import make
from kubelend.core import audit
from kubelend.core.accounts import CostInterval
from kubelend.core.events import ClusterRemoved, WorkingSet
from kubelend.core.ledger import Ledger
from kubelend.core.lifecycle import Phase
from kubelend.core.models import ClusterId


@pytest.fixture
def desk():
    made = make.desk(a="cpu=4,memory=8Gi,example.com/fpga=2", b="cpu=4,memory=8Gi")
    made.reserve("cpu=2,memory=1Gi,example.com/fpga=1", requester="r", key="k")
    made.release(made.reserve("cpu=1,memory=1Gi"))
    made.reserve("cpu=9,memory=1Gi", wait=make.HOUR)
    return made


def restored(desk, **fields):
    """The ledger of a store in which somebody changed the first reservation."""
    clusters, reservations, revision, *_ = desk.kept()
    return Ledger.restore(
        WorkingSet(clusters, [replace(reservations[0], **fields), *reservations[1:]], revision)
    )


def test_sound_ledger_has_no_violations(desk):
    assert audit.invariant_violations(desk.ledger) == []
    assert audit.invariant_violations(Ledger.restore(desk.kept())) == []
    assert audit.invariant_violations(Ledger()) == []


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
def test_record_that_cannot_be_is_found(desk, fields, sentence):
    assert sentence in audit.invariant_violations(restored(desk, **fields))


def test_shared_key_is_found(desk):
    clusters, reservations, revision, *_ = desk.kept()
    twin = replace(reservations[0], id="rsv-twin", phase=Phase.FAILED, finished_at=make.T0)
    ledger = Ledger.restore(WorkingSet(clusters, [*reservations, twin], revision))
    assert audit.invariant_violations(ledger) == ["r: 2 reservations share the idempotency key 'k'"]


def test_cluster_that_is_not_kept_for_its_waiter_is_found():
    desk = make.desk(a="cpu=4,memory=8Gi")
    desk.reserve("cpu=1,memory=1Gi")
    waiter = desk.reserve("cpu=4,memory=1Gi", wait=make.HOUR)
    assert audit.invariant_violations(desk.ledger) == []
    desk.ledger.fleet.set_nomination(ClusterId("a"), None)
    assert audit.invariant_violations(desk.ledger) == [
        "the fleet has 0 nominations for 1 waiting requests"
    ]
    desk.ledger.apply(ClusterRemoved(desk.now, ClusterId("a")))
    assert f"{waiter}: a is not nominated for it" in audit.invariant_violations(desk.ledger)


class Forgetful(Ledger):
    """Counts nothing as reserved: what the Go system did when an advertisement was recreated."""

    def reserved(self, cluster):
        return make.resources("")


def test_reserved_that_is_not_the_sum_is_found(desk):
    (found,) = audit.invariant_violations(Forgetful.restore(desk.kept()))[:1]
    assert found.startswith("a: reserved is {'cpu': '0', 'memory': '0'}, its live reservations are")


@pytest.mark.parametrize("name", ["cpu", "memory", "gpu", "storage", "example.com/fpga"])
def test_index_that_lies_is_found(desk, name):
    free = desk.available("a") + make.resources(f"{name}=1")
    desk.ledger.fleet.set_free(ClusterId("a"), free, free)
    (found,) = audit.invariant_violations(desk.ledger)
    assert found.startswith("a: the fleet has ")
    assert f" {name} free, not " in found


@pytest.fixture
def limited(desk):
    """The same with a policy and a quota, set after the first loans were made."""
    desk.advertise("b", "cpu=4,memory=8Gi", prices=make.price_list(cpu="1"))
    desk.limit("a", keep_back="cpu=1", max_lent="cpu=3", max_per_requester="cpu=3")
    desk.allot("r", "cpu=20", budget="100")
    desk.reserve("cpu=1,memory=1Gi", pinned="b")
    return desk


def test_sound_ledger_with_limits_has_no_violations(limited):
    assert audit.invariant_violations(limited.ledger) == []
    assert audit.invariant_violations(Ledger.restore(limited.kept())) == []


def test_index_that_forgets_what_a_policy_withholds_is_found(limited):
    available = limited.available("a")
    limited.ledger.fleet.set_free(ClusterId("a"), available, available)
    assert audit.invariant_violations(limited.ledger) == [
        "a: the fleet has 2000 cpu free, not 1000"
    ]


def test_account_that_miscounts_is_found(limited):
    account = limited.ledger.quota_usages.get(make.R)
    for spoil in (
        lambda: account.daily_spend.add(CostInterval(0, 1, 1)),
        lambda: setattr(account, "waits", 7),
        lambda: setattr(account, "held", make.resources("cpu=1")),
    ):
        spoil()
        assert audit.invariant_violations(limited.ledger) == [
            "r: the quota usage is not the sum of its reservations"
        ]


def test_account_too_few_is_found(limited):
    limited.ledger.quota_usages.by_requester.clear()
    assert audit.invariant_violations(limited.ledger) == [
        "the quota usage does not cover exactly the requesters with a quota"
    ]


def test_loans_that_are_miscounted_are_found(limited):
    limited.ledger.fleet.lent_by_requester.remove(ClusterId("a"), limited["rsv-1"])
    assert audit.invariant_violations(limited.ledger) == [
        "the amounts lent per requester are not the sums of its reservations"
    ]


def test_index_without_a_cluster_is_found(desk):
    desk.ledger.fleet.remove(ClusterId("b"))
    assert audit.invariant_violations(desk.ledger) == [
        "the fleet does not contain the clusters of the ledger"
    ]


def test_tally_that_is_wrong_is_found(desk):
    desk.ledger.phase_counts[Phase.FAILED, desk.ledger.reservations["rsv-1"].reason] += 1
    assert audit.invariant_violations(desk.ledger) == [
        "the count of Failed with reason Locked is 1, not 0"
    ]


def test_overcommitted_cluster_is_named_and_is_no_violation(desk):
    assert audit.overcommitted_clusters(desk.ledger) == []
    desk.advertise("a", "cpu=4,memory=8Gi,example.com/fpga=2", allocated="cpu=3")
    assert audit.overcommitted_clusters(desk.ledger) == ["a"]
    assert audit.invariant_violations(desk.ledger) == []
