"""What the ledger holds shows in the text that Prometheus reads: names, labels, and base units."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

import make
from kubelend.broker import metrics
from kubelend.core.events import WorkingSet
from kubelend.core.ledger import Ledger

GI = 1024**3
AMOUNTS = ("capacity", "allocatable", "reserved", "available")


def samples(ledger, now=make.T0):
    """Every sample by name and labels; fails on a family or a sample that comes twice."""
    found = {}
    text = b"".join(metrics.fleet_metrics_text(metrics.fleet_snapshot(ledger, now))).decode()
    types = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types))
    for family in text_string_to_metric_families(text):
        assert family.documentation
        assert family.type == "gauge"
        for sample in family.samples:
            key = (sample.name.removeprefix("kubelend_"), *sample.labels.values())
            assert key not in found, f"{key} comes twice"
            found[key] = sample.value
    return found


def amounts(ledger, cluster, resource):
    found = samples(ledger)
    return tuple(found.get((f"cluster_{kind}", cluster, resource)) for kind in AMOUNTS)


# -- reservations


def test_reservations_show_by_phase_and_reason():
    desk = make.desk(a="cpu=4,memory=8Gi")
    desk.reserve("cpu=1,memory=1Gi")
    desk.activate(desk.reserve("cpu=1,memory=1Gi"))
    desk.release(desk.reserve("cpu=1,memory=1Gi"))
    desk.reserve("cpu=4,memory=1Gi", wait=make.HOUR)
    found = samples(desk.ledger)
    assert {key[1:]: n for key, n in found.items() if key[0] == "reservations" and n} == {
        ("Reserved", "Locked"): 1,
        ("Active", "InUse"): 1,
        ("Released", "ReleasedByRequester"): 1,
        ("Pending", "Waiting"): 1,
    }
    assert found["pending_requests",] == 1


def test_a_forgotten_reservation_shows_no_more():
    desk = make.desk(a="cpu=4,memory=8Gi")
    desk.release(desk.reserve("cpu=1,memory=1Gi"))
    desk.pass_time(2 * make.RETENTION)
    desk.expire()
    assert samples(desk.ledger)["reservations", "Released", "ReleasedByRequester"] == 0


def test_a_restored_ledger_shows_the_same():
    desk = make.desk(a="cpu=4,memory=8Gi", b="cpu=2,memory=4Gi,gpu=1")
    desk.reserve("cpu=1,memory=1Gi")
    desk.release(desk.reserve("cpu=1,memory=1Gi"))
    desk.reserve("cpu=9,memory=1Gi", wait=make.HOUR)
    restored = samples(Ledger.restore(desk.kept()))
    assert restored == {key: n for key, n in samples(desk.ledger).items() if key in restored}
    assert {key[:1] for key in restored} == {key[:1] for key in samples(desk.ledger)}


# -- clusters


def test_amounts_are_in_cores_bytes_and_devices():
    desk = make.desk(
        a=make.advertisement("a", "cpu=10,memory=8Gi,gpu=2", allocated="cpu=1050m,memory=1Gi")
    )
    desk.reserve("cpu=500m,memory=256Mi,gpu=1")
    assert amounts(desk.ledger, "a", "cpu") == (10, 10, 0.5, 8.45)
    assert amounts(desk.ledger, "a", "memory") == (8 * GI, 8 * GI, GI / 4, 7 * GI - GI / 4)
    assert amounts(desk.ledger, "a", "gpu") == (2, 2, 1, 1)
    assert amounts(desk.ledger, "a", "storage") == (None, None, None, None)


def test_cpu_and_memory_show_also_where_there_is_none():
    desk = make.desk(a="gpu=1,storage=5Gi")
    assert amounts(desk.ledger, "a", "cpu") == (0, 0, 0, 0)
    assert amounts(desk.ledger, "a", "memory") == (0, 0, 0, 0)
    assert amounts(desk.ledger, "a", "storage") == (5 * GI, 5 * GI, 0, 5 * GI)


def test_extended_resources_show_by_their_kubernetes_name():
    desk = make.desk(a="cpu=4,memory=8Gi,example.com/fpga=3,hugepages-2Mi=1Gi")
    desk.reserve("cpu=1,memory=1Gi,example.com/fpga=2")
    assert amounts(desk.ledger, "a", "example.com/fpga") == (3, 3, 2, 1)
    assert amounts(desk.ledger, "a", "hugepages-2Mi") == (GI, GI, 0, GI)


def test_a_resource_that_was_withdrawn_shows_while_it_is_lent():
    desk = make.desk(a="cpu=4,memory=8Gi,example.com/fpga=1,gpu=1")
    desk.reserve("cpu=1,memory=1Gi,example.com/fpga=1,gpu=1")
    desk.advertise("a", "cpu=4,memory=8Gi")
    assert amounts(desk.ledger, "a", "example.com/fpga") == (0, 0, 1, 0)
    assert amounts(desk.ledger, "a", "gpu") == (0, 0, 1, 0)


def test_all_amounts_of_a_cluster_have_the_same_labels():
    desk = make.desk(a="cpu=4,memory=8Gi,example.com/fpga=1", b="cpu=1,gpu=1,storage=1Gi")
    found = samples(desk.ledger)
    labels = [{key[1:] for key in found if key[0] == f"cluster_{kind}"} for kind in AMOUNTS]
    assert labels == [labels[0]] * 4
    assert len(labels[0]) == 7


def test_a_cluster_that_outgrew_its_promise_shows_nothing_available_and_counts():
    desk = make.desk(a="cpu=4,memory=8Gi", b="cpu=4,memory=8Gi")
    desk.reserve("cpu=3,memory=1Gi", pinned="a")
    desk.advertise("a", make.advertisement("a", "cpu=4,memory=8Gi", allocated="cpu=2"))
    assert amounts(desk.ledger, "a", "cpu") == (4, 4, 3, 0)
    assert samples(desk.ledger)["clusters_overcommitted",] == 1


def test_every_cluster_has_one_state():
    desk = make.desk(**dict.fromkeys("abcd", "cpu=1,memory=1Gi"))
    desk.cordon("a")
    desk.cordon("b")
    desk.pass_time(make.STALE_AFTER)
    desk.advertise("b", "cpu=1,memory=1Gi")
    desk.advertise("c", "cpu=1,memory=1Gi")
    found = samples(desk.ledger, desk.now)
    states = {key[1]: n for key, n in found.items() if key[0] == "clusters"}
    assert states == {"active": 1, "cordoned": 1, "stale": 2}
    active = {key[1]: n for key, n in found.items() if key[0] == "cluster_active"}
    assert active == {"a": 0, "b": 1, "c": 1, "d": 0}


def test_states_show_before_the_first_cluster():
    found = samples(make.ledger())
    assert [found["clusters", state] for state in ("active", "cordoned", "stale")] == [0, 0, 0]
    assert found["clusters_overcommitted",] == 0
    assert found["pending_requests",] == 0


def test_a_removed_cluster_shows_no_more():
    desk = make.desk(a="cpu=4,memory=8Gi", b="cpu=4,memory=8Gi")
    desk.remove("a")
    assert {key[1] for key in samples(desk.ledger) if key[0].startswith("cluster_")} == {"b"}


@pytest.mark.parametrize("name", ['quo"te', "back\\slash", "line\nbreak", "ümläut", 'all\\"\n'])
def test_no_name_breaks_the_text(name):
    ledger = Ledger.restore(WorkingSet([make.cluster(name), make.cluster("plain")], [], 1))
    assert amounts(ledger, name, "cpu") == (4, 4, 0, 4)
    assert amounts(ledger, "plain", "cpu") == (4, 4, 0, 4)


# -- the snapshot


def test_a_snapshot_does_not_move_with_the_ledger():
    desk = make.desk(a="cpu=4,memory=8Gi")
    desk.reserve("cpu=1,memory=1Gi")
    snapshot = metrics.fleet_snapshot(desk.ledger, desk.now)
    before = metrics.fleet_metrics_text(snapshot)
    desk.reserve("cpu=1,memory=1Gi")
    desk.advertise("b", "cpu=4,memory=8Gi")
    desk.remove("b")
    assert metrics.fleet_metrics_text(snapshot) == before
    assert metrics.fleet_metrics_text(metrics.fleet_snapshot(desk.ledger, desk.now)) != before


def test_ten_thousand_clusters_all_show():
    offer = make.resources("cpu=64,memory=256Gi,gpu=4")
    known = [make.cluster(f"cluster-{number:05}", offer) for number in range(10_000)]
    found = samples(Ledger.restore(WorkingSet(known, [], 1)))
    assert sum(key[0] == "cluster_available" for key in found) == 30_000
    assert found["clusters", "active"] == 10_000
    assert found["cluster_available", "cluster-09999", "cpu"] == 64
    assert found["cluster_active", "cluster-00000"] == 1
