"""What the audit makes of a store in Kubernetes: who deletes an object by force has released it."""

import json
from contextlib import closing

import pytest

import make
from kubelend.cli import main
from kubelend.stores.kubernetes.objects import STORED_RESERVATIONS


@pytest.fixture
def url(place):
    return place.url


def fill(place, desk):
    with closing(place.open()) as store:
        store.commit(desk.changes, desk.ledger.revision)


def remove(place, name):
    async def both(client):
        await client.patch(
            STORED_RESERVATIONS, name, place.namespace, {"metadata": {"finalizers": None}}
        )
        await client.delete(STORED_RESERVATIONS, name, place.namespace)

    place.run(both)


def audit(capsys, url, *flags):
    code = main.run(["audit", "check", "--store", url, *flags])
    return code, capsys.readouterr().out


def test_reservation_that_was_deleted_by_force_is_named_and_no_violation(place, url, capsys):
    desk = make.desk(a="cpu=4,memory=8Gi")
    desk.reserve("cpu=1,memory=1Gi")
    fill(place, desk)
    desk.changes.clear()
    desk.reserve("cpu=1,memory=1Gi")
    fill(place, desk)  # what the last commit wrote is in the head as well
    code, out = audit(capsys, url, "--json")
    assert (code, json.loads(out)["gone"]) == (0, [])
    remove(place, "rsv-1")
    code, out = audit(capsys, url, "--json")
    report = json.loads(out)
    assert (code, report["violations"], report["gone"]) == (0, 0, ["rsv-1"])
    assert "\nDeleted together with their objects, no violation: rsv-1\n" in audit(capsys, url)[1]


def test_record_that_says_otherwise_than_the_journal_is_found(place, url, capsys):
    desk = make.desk(a="cpu=4,memory=8Gi")
    held = desk.reserve("cpu=1,memory=1Gi")
    fill(place, desk)
    desk.activate(held)
    with closing(place.open()) as store:
        store.load()
        store.commit([desk[held]], desk.ledger.revision)  # without its line
    code, out = audit(capsys, url, "--json")
    expected = "it is Reserved on a in the audit log, but is Active on a in the store"
    assert (code, json.loads(out)["details"]) == (8, [f"{held}: {expected}"])
