"""A broken file is reported, and never answered from."""

import shutil
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import make
from kubelend.core.errors import InvalidSettings, StoreFailed
from kubelend.core.events import Archived
from kubelend.core.lifecycle import Phase
from kubelend.stores.sqlite import SqliteStore

OLD = [
    make.reservation(f"old-{number}", phase=Phase.RELEASED, finished_at=make.T0)
    for number in range(50)
]


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A file with some of everything, all of it written back from the log."""
    path = tmp_path_factory.mktemp("sound") / "store.db"
    clusters = [make.cluster(f"cluster-{number}", region="eu") for number in range(50)]
    reservations = [make.reservation(f"rsv-{number}") for number in range(200)]
    with closing(SqliteStore.open(path)) as store:
        store.commit([*clusters, *reservations, *OLD], 300)
        store.commit([Archived(found.id) for found in OLD], 350)
    return path


def look(path):
    """All that a broker is told at its start, and all that an audit can ask for."""
    with closing(SqliteStore.open(path)) as store:
        working_set = store.load()
    with closing(SqliteStore.open_readonly(path)) as store:
        return working_set, store.load(), [store.archived(found.id) for found in OLD]


def assert_right_or_refused(content: bytes, truth) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "store.db"
        path.write_bytes(content)
        try:
            found, refusal = look(path), None
        except (StoreFailed, InvalidSettings) as problem:
            found, refusal = truth, str(problem)
        assert found == truth
        assert refusal is None or str(path) in refusal


@given(data=st.data())
@settings(max_examples=200)
def test_flipped_bits_anywhere_never_give_a_wrong_answer(sound, data):
    content = bytearray(sound.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(content) - 1))
        content[position] ^= data.draw(st.integers(1, 255))
    assert_right_or_refused(bytes(content), look(sound))


@given(data=st.data())
@settings(max_examples=50)
def test_stretch_of_zeros_never_gives_a_wrong_answer(sound, data):
    content = bytearray(sound.read_bytes())
    start = data.draw(st.integers(0, len(content) - 1))
    length = min(data.draw(st.sampled_from([16, 512, 4096, 65536])), len(content) - start)
    content[start : start + length] = bytes(length)
    assert_right_or_refused(bytes(content), look(sound))


@given(data=st.data())
@settings(max_examples=50)
def test_file_cut_short_never_gives_a_wrong_answer(sound, data):
    content = sound.read_bytes()
    assert_right_or_refused(content[: data.draw(st.integers(0, len(content) - 1))], look(sound))


def swap_roots(path, mine, others):
    """Make one table or index read another's pages, each of which is sound in itself."""
    with closing(sqlite3.connect(path)) as shell, shell:
        shell.execute("PRAGMA writable_schema = ON")
        shell.execute(
            "UPDATE sqlite_schema SET rootpage ="
            " (SELECT rootpage FROM sqlite_schema WHERE name = ?) WHERE name = ?",
            (others, mine),
        )


@pytest.mark.parametrize(
    "mine, others, opener",
    [
        # Rows of the archive have the right shape and checksums, and would come back to life.
        ("reservations", "archive", SqliteStore.open),
        # An index that misses rows lets the next change of each add a second one.
        ("sqlite_autoindex_clusters_1", "sqlite_autoindex_meta_1", SqliteStore.open),
        ("sqlite_autoindex_archive_1", "sqlite_autoindex_clusters_1", SqliteStore.open_readonly),
    ],
)
def test_sound_rows_in_the_wrong_place_are_no_data(sound, tmp_path, mine, others, opener):
    path = tmp_path / "store.db"
    shutil.copy(sound, path)
    swap_roots(path, mine, others)
    with closing(opener(path)) as store, pytest.raises(StoreFailed, match="it is damaged"):
        store.load()


def test_damage_is_told_with_the_path_and_what_to_do(sound, tmp_path):
    path = tmp_path / "store.db"
    shutil.copy(sound, path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(StoreFailed) as told:
        look(path)
    assert str(told.value).startswith(f"the store {path} cannot be used: it is damaged")
    assert told.value.hint.startswith("restore a backup, and remove the -wal and -shm")
