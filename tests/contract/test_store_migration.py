"""A store is copied whole into an empty one of either kind, backed up and restored; or not at all."""

import asyncio
import re
from contextlib import closing
from pathlib import Path

import pytest
import yaml

import kube_broker
import kube_stores
import kubectl_lend
import make
from clocks import Clock
from kubelend.cli import main
from kubelend.cli.output import ExitCode
from kubelend.core import audit_log
from kubelend.core.audit_log import Actor, AuditEntry
from kubelend.core.errors import InvalidSettings, StoreFailed
from kubelend.core.events import AuditLogTruncated
from kubelend.core.lifecycle import Role
from kubelend.core.members import Token, TokenId
from kubelend.kube.leader_election import LEASES, Lease, LeaseSpec
from kubelend.stores import backup, factory
from kubelend.stores.kubernetes import objects
from kubelend.stores.kubernetes.head import BLOCK_LINES
from kubelend.stores.sqlite import SqliteStore
from kubelend.wire.broker_objects import Reservation
from kubelend.wire.objects import Metadata

NOW = make.T0
OPERATIONS = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
KINDS = ["sqlite", pytest.param("kubernetes", marks=pytest.mark.kube)]
TOKEN = Token(TokenId("abc"), "d1", Role.VIEWER, make.T0, "alice", make.T0, 5, "paris", revision=4)
NAMES = [f"rsv-{number}" for number in range(1, 5)]
LINES = BLOCK_LINES + 50
"""In the first commit; the log is truncated in the middle of its second block."""


def now():
    return NOW


def entries(count):
    return [AuditEntry(NOW, Actor("alice", "admin"), "Cordoned", str(n)) for n in range(count)]


@pytest.fixture
def source(tmp_path):
    """Live, ended and archived reservations, a cordon, documents, and an audit log without its beginning."""
    path = tmp_path / "source.db"
    runner = make.runner(a="cpu=4,memory=8Gi", b="cpu=4,memory=8Gi")
    archived = runner.reserve("cpu=1,memory=1Gi")
    runner.release(archived)
    runner.pass_time(2 * make.RETENTION)
    runner.expire()
    for name in ("a", "b"):
        runner.advertise(name)
    runner.activate(runner.reserve("cpu=1,memory=1Gi", pinned="a"))
    runner.reserve("cpu=2,memory=1Gi", pinned="b")
    runner.release(runner.reserve("cpu=1,memory=1Gi"))
    runner.cordon("b")
    runner.allot("r", "cpu=8")
    with closing(SqliteStore.open(path)) as store:
        store.commit(entries(LINES), 0)
        (last,) = store.audit_lines(LINES - 11, 1)
        cut = AuditLogTruncated(last.number), audit_log.truncation_entry(last, NOW, NOW)
        store.commit([*cut, *runner.changes, TOKEN], runner.ledger.revision)
        assert store.archived(archived) is not None
    return str(path)


@pytest.fixture(params=KINDS)
def empty(request, tmp_path):
    """The URL of an empty store."""
    if request.param == "sqlite":
        return str(tmp_path / "target.db")
    return kube_stores.Place(request.getfixturevalue("kube")).url


def state(url):
    return kube_stores.stored_state(factory.open_store(url), NAMES)


def chain_faults(url):
    with closing(factory.open_readonly(url)) as store:
        start, end = store.audit_log_bounds()
        return list(audit_log.verify_chain(store.audit_lines(0, 10_000), start, end))


def run(*arguments):
    return main.run([str(each) for each in arguments])


def test_all_of_a_store_is_copied_and_back(source, empty, tmp_path, capsys):
    before = state(source)
    assert run("migrate-store", source, empty) == ExitCode.OK
    assert "copied 2 clusters, 3 reservations and 1 archived ones" in capsys.readouterr().out
    assert state(source) == state(empty) == before
    back = str(tmp_path / "back.db")
    backup.migrate(empty, back, now)
    assert state(back) == before
    for url in (empty, back):
        assert factory.audit_store(url).violations == []
        assert chain_faults(url) == []
    with pytest.raises(InvalidSettings, match="is not empty"):
        backup.migrate(source, empty, now)
    assert state(empty) == before


def test_audit_log_of_the_copy_goes_on_and_is_truncated(source, empty):
    backup.migrate(source, empty, now)
    with closing(factory.open_store(empty)) as store:
        revision = store.load().revision
        first, end = store.audit_log_bounds()
        store.commit(entries(BLOCK_LINES), revision)
        assert store.audit_log_bounds()[1].number == end.number + BLOCK_LINES
    assert chain_faults(empty) == []
    with closing(factory.open_store(empty)) as store:
        store.load()
        for number in (first.number + 3, first.number + BLOCK_LINES):
            (last,) = store.audit_lines(number - 1, 1)
            cut = AuditLogTruncated(number), audit_log.truncation_entry(last, NOW, NOW)
            store.commit(cut, revision)
            assert store.audit_lines(0, 1)[0].number == number + 1
    assert chain_faults(empty) == []


def test_store_in_use_is_neither_copied_nor_replaced(source, empty):
    with (
        closing(SqliteStore.open(Path(source))),
        pytest.raises(StoreFailed, match="in use by another broker"),
    ):
        backup.migrate(source, empty, now)
    backup.migrate(source, empty, now)


def test_empty_and_missing_stores_are_not_copied(tmp_path, empty):
    missing = tmp_path / "none.db"
    with pytest.raises((InvalidSettings, StoreFailed), match="does not exist"):
        backup.migrate(str(missing), empty, now)
    SqliteStore.open(missing).close()
    with pytest.raises(InvalidSettings, match="is empty"):
        backup.migrate(str(missing), empty, now)


# -- only in Kubernetes


@pytest.fixture
def place(kube):
    return kube_stores.Place(kube)


def test_led_store_is_neither_source_nor_target(source, place, tmp_path):
    lease = Lease(Metadata("kubelend-broker", place.namespace), LeaseSpec("broker-0", 15))
    place.run(lambda client: client.create(LEASES, lease))
    with pytest.raises(StoreFailed, match="broker-0 still leads"):
        backup.migrate(source, place.url, now, make.SECOND)
    assert place.find(objects.LEDGER_RECORDS, "head") is None
    place.edit(LEASES, "kubelend-broker", {"spec": {"holderIdentity": ""}})
    backup.migrate(source, place.url, now)
    place.edit(LEASES, "kubelend-broker", {"spec": {"holderIdentity": "broker-0"}})
    with pytest.raises(StoreFailed, match="broker-0 still leads"):
        backup.migrate(place.url, str(tmp_path / "other.db"), now, make.SECOND)


def test_missing_namespace_is_reported_at_once(source, place):
    with pytest.raises(StoreFailed, match=r"missing-one.*not found"):
        backup.migrate(source, place.url.replace(place.namespace, "missing-one"), now)


def test_reservation_deleted_with_its_object_is_closed_in_the_copy(source, place, tmp_path):
    backup.migrate(source, place.url, now)
    with closing(factory.open_store(place.url)) as store:  # the last commit would bring it back
        store.commit(entries(1), store.load().revision)
    place.delete(objects.STORED_RESERVATIONS, "rsv-3", force=True)
    assert [str(one) for one in factory.audit_store(place.url).deleted] == ["rsv-3"]
    back = str(tmp_path / "back.db")
    backup.migrate(place.url, back, now)
    found = factory.audit_store(back)
    assert (found.violations, "rsv-3" in found.ledger.reservations) == ([], False)
    assert chain_faults(back) == []


def test_backup_of_objects_is_restored_into_a_namespace_or_a_file(source, place, kube, tmp_path):
    backup.migrate(source, place.url, now)
    before, made = state(place.url), tmp_path / "made"
    assert run("backup", made, "--store", place.url) == ExitCode.OK
    assert run("restore", made, "--store", place.url) == ExitCode.USAGE, "it is not empty"
    elsewhere = kube_stores.Place(kube)
    for url in (elsewhere.url, str(tmp_path / "restored.db")):
        assert run("restore", made, "--store", url) == ExitCode.OK
        assert state(url) == before
    assert factory.audit_store(elsewhere.url).violations == []


def test_store_is_restored_in_place_as_documented(source, place, kube, tmp_path):
    backup.migrate(source, place.url, now)
    before = state(place.url)
    made = tmp_path / "made"
    assert run("backup", made, "--store", place.url) == ExitCode.OK
    content = yaml.safe_load(kube.admin_kubeconfig.read_text())
    content["contexts"][0]["context"]["namespace"] = place.namespace
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(content))
    [block] = re.findall(r"```bash\n(  kubectl get reservations.*?)```", OPERATIONS, re.DOTALL)
    text = block.replace("FILE", str(made)).replace(" --grant-key PATH", "")
    user = kubectl_lend.user(kube.assets, tmp_path / "kubeconfig", tmp_path)
    done = user.run("bash", "-euo", "pipefail", "-c", text)
    assert (done.code, "restored" in done.out) == (0, True), done.err
    assert state(place.url) == before


async def test_broker_serves_what_was_copied(source, place, kube, tmp_path):
    """Reservations have objects, also those that users had applied in another cluster."""
    async with kube_broker.running(kube, place.namespace) as broker:
        await broker.advertise("lender", "8")
        await broker.reserve("mine", "2")
        await broker.reserved("mine")
    between = str(tmp_path / "between.db")
    elsewhere = kube_stores.Place(kube)
    await asyncio.to_thread(backup.migrate, place.url, between, now)
    await asyncio.to_thread(backup.migrate, between, elsewhere.url, now)
    async with kube_broker.running(kube, elsewhere.namespace, Clock()) as broker:
        await broker.reserved("mine")
        await broker.available("lender", "6")
        await broker.delete(Reservation, "mine")
        await broker.available("lender", "8")
    assert await asyncio.to_thread(chain_faults, elsewhere.url) == []
