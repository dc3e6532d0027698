"""Backups: made while the broker runs, complete or refused, and restored with the keys of the store."""

import asyncio
import stat
import tarfile

import pytest

import brokers
from callers import offer, request_body
from kubelend.cli import main
from kubelend.cli.output import ExitCode

KEY = "kubelend.db-grants.key"


@pytest.fixture
def store(tmp_path):
    return tmp_path / "kubelend.db"


async def run(*arguments):
    return await asyncio.to_thread(main.run, [str(each) for each in arguments])


async def reserve(broker):
    return (await broker.cluster("r").post("reservations", request_body())).json["id"]


async def test_restored_broker_has_what_it_had_at_the_backup(certificates, tmp_path, store):
    """In another directory, with the same keys; what came later is gone, and there is room for it."""
    async with brokers.child(certificates, tmp_path) as broker:
        await broker.cluster("a").post("advertisements", offer("a", "2"))
        before = await reserve(broker)
        keys = (await broker.cluster("r").get("keys")).json
        assert await run("backup", tmp_path / "made", "--store", store) == ExitCode.OK
        later = await reserve(broker)
        assert await broker.stop() == 0
    assert stat.S_IMODE((tmp_path / "made").stat().st_mode) == 0o600
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    restored = elsewhere / "kubelend.db"
    assert await run("restore", tmp_path / "made", "--store", restored) == ExitCode.OK
    assert (elsewhere / KEY).read_bytes() == (tmp_path / KEY).read_bytes()
    brokers.audited(restored)
    async with brokers.child(certificates, elsewhere) as broker:
        r = broker.cluster("r")
        found = await r.get("reservations", before)
        assert found.status == 200, found
        assert found.json["status"]["phase"] == "Reserved"
        assert (await r.get("reservations", later)).status == 404
        assert (await r.get("keys")).json == keys
        assert await reserve(broker)
        assert await broker.stop() == 0


@pytest.fixture
async def made(certificates, tmp_path, store):
    """A backup, and the store of a broker that has gone on since."""
    async with brokers.child(certificates, tmp_path) as broker:
        await broker.cluster("a").post("advertisements", offer("a"))
        assert await run("backup", tmp_path / "made", "--store", store) == ExitCode.OK
        assert await run("restore", tmp_path / "made", "--store", store, "--yes") != ExitCode.OK
        await reserve(broker)
        assert await broker.stop() == 0
    return tmp_path / "made"


async def test_restore_keeps_what_it_replaces_and_the_broker_accepts_the_older_store(
    made, certificates, tmp_path, store
):
    newer = store.read_bytes()
    assert await run("restore", made, "--store", store) == ExitCode.USAGE, "asks first"
    assert await run("restore", made, "--store", store, "--dry-run") == ExitCode.OK
    assert store.read_bytes() == newer
    assert await run("restore", made, "--store", store, "--yes") == ExitCode.OK
    [kept] = tmp_path.glob("kubelend.db.before-restore-*")
    assert kept.read_bytes() == newer
    assert brokers.audited(store).reservations == {}
    async with brokers.child(certificates, tmp_path) as broker:
        assert await reserve(broker)
        assert await broker.stop() == 0


def cut_short(path):
    path.write_bytes(path.read_bytes()[: -(20 << 10)])


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[content.index(b"SQLite format 3") + 200] ^= 1
    path.write_bytes(content)


def add_a_path(path):
    with tarfile.open(path, "a") as tar:
        tar.add(__file__, "../outside")


async def test_damaged_backup_is_refused_and_nothing_is_changed(made, store, capsys):
    newer, content = store.read_bytes(), made.read_bytes()
    for damage, reason in (
        (cut_short, "is not a complete backup"),
        (flip_a_bit, "does not match its digest"),
        (lambda path: path.write_text("?"), "is not a complete backup"),
        (lambda path: path.unlink(), "does not exist"),
    ):
        made.write_bytes(content)
        damage(made)
        capsys.readouterr()
        assert await run("restore", made, "--store", store, "--yes") == ExitCode.USAGE
        assert reason in capsys.readouterr().err
        assert store.read_bytes() == newer


async def test_members_outside_of_the_manifest_are_not_extracted(made, store, tmp_path):
    add_a_path(made)
    assert await run("restore", made, "--store", store, "--yes") == ExitCode.OK
    assert not list(tmp_path.rglob("outside"))


async def test_backup_that_exists_is_not_overwritten(made, store, capsys):
    content = made.read_bytes()
    assert await run("backup", made, "--store", store) == ExitCode.USAGE
    assert "already exists" in capsys.readouterr().err
    assert made.read_bytes() == content


async def test_missing_place_of_a_key_is_noticed_before_anything_is_changed(made, store, tmp_path):
    newer = store.read_bytes()
    nowhere = f"--grant-key={tmp_path / 'nowhere' / 'key'}"
    assert await run("backup", tmp_path / "other", "--store", store, nowhere) == ExitCode.USAGE
    assert not (tmp_path / "other").exists()
    assert await run("restore", made, "--store", store, "--yes", nowhere) == ExitCode.USAGE
    assert store.read_bytes() == newer


async def test_damaged_store_is_not_backed_up(made, store, tmp_path, capsys):
    content = bytearray(store.read_bytes())
    at = content.index(b'"cluster":"a"')
    content[at + 12] ^= 1
    store.write_bytes(content)
    assert await run("backup", tmp_path / "other", "--store", store) != ExitCode.OK
    assert not (tmp_path / "other").exists()
    assert "damaged" in capsys.readouterr().err
