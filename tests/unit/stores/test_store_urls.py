"""Store URLs: which store they open, and the modes of its files."""

from contextlib import closing
from datetime import timedelta

import pytest

import make
from kubelend.core.errors import InvalidSettings
from kubelend.core.events import Archived
from kubelend.core.lifecycle import Phase
from kubelend.stores.factory import (
    check_store_url,
    is_kubernetes_url,
    open_readonly,
    open_store,
    path_beside,
    store_mode_problems,
)
from kubelend.stores.memory import MemoryStore
from kubelend.stores.sqlite import SqliteStore


@pytest.mark.parametrize(
    "form",
    [
        *("{path}", "sqlite://{path}", "sqlite:///{path}", "sqlite:{path}", "store.db"),
        *("sqlite:store.db", "./odd:name.db", "C:x"),
    ],
)
def test_file_can_be_named_by_path_or_url(tmp_path, monkeypatch, form):
    monkeypatch.chdir(tmp_path)
    url = form.format(path=tmp_path / "store.db")
    check_store_url(url)
    assert not list(tmp_path.iterdir()), "a check opens nothing"
    with closing(open_store(url)) as store:
        assert isinstance(store, SqliteStore)
        store.commit([make.cluster("a")], 1)
        with closing(open_readonly(url)) as beside:
            assert beside.load() == store.load()
    assert (tmp_path / ("store.db" if "store.db" in url else form)).is_file()


@pytest.mark.parametrize("url", ["postgres://db/kubelend", "redis:x"])
@pytest.mark.parametrize("opener", [check_store_url, open_store, open_readonly])
def test_unknown_kind_is_rejected_with_the_known_ones(url, opener):
    with pytest.raises(InvalidSettings) as rejected:
        opener(url)
    scheme = url.partition(":")[0]
    assert str(rejected.value) == (
        f"unknown kind of store {scheme}:; use one of memory:, a path or sqlite:///path, kubernetes:"
    )


@pytest.mark.parametrize(
    "url", ["", "sqlite:", "sqlite://", "sqlite:///", "sqlite://host/x", "memory:x"]
)
def test_incomplete_url_is_rejected(url):
    for opener in (check_store_url, open_store):
        with pytest.raises(InvalidSettings):
            opener(url)


def test_store_without_files_has_no_mode_problem(tmp_path):
    """And memory cannot be read by another process."""
    check_store_url("memory:")
    assert isinstance(open_store("memory:"), MemoryStore)
    for url in ("memory:", "kubernetes:", str(tmp_path / "store.db")):
        assert store_mode_problems(url) == []
        assert is_kubernetes_url(url) is url.startswith("kube")
    assert path_beside("kubernetes:", "grants.key") is None
    with pytest.raises(InvalidSettings, match="cannot be read by another process"):
        open_readonly("memory:")


@pytest.mark.parametrize("url", ["memory:", "store.db"])
def test_archive_retention_is_passed_on(tmp_path, monkeypatch, url):
    monkeypatch.chdir(tmp_path)
    old, new = (
        make.reservation(name, phase=Phase.RELEASED, finished_at=make.T0 + after)
        for name, after in {"old": timedelta(), "new": 2 * make.HOUR}.items()
    )
    with closing(open_store(url, archive_for=make.HOUR)) as store:
        store.commit([old, new, Archived(old.id), Archived(new.id)], 1)
        assert (store.archived(old.id), store.archived(new.id)) == (None, new)


# -- file modes


@pytest.mark.parametrize("name", ["store.db", "store.db-wal", "store.db-shm"])
@pytest.mark.parametrize("mode", [0o644, 0o660, 0o602])
def test_file_that_others_can_access_is_reported_in_one_sentence(tmp_path, name, mode):
    path = tmp_path / "store.db"
    with closing(open_store(str(path))) as store:
        store.commit([make.cluster("a")], 1)
        assert store_mode_problems(str(path)) == []
        (tmp_path / name).chmod(mode)
        assert store_mode_problems(f"sqlite:{path}") == [
            f"{tmp_path / name} holds the ledger and has mode {mode:04o}, so other users can access it;"
            f" chmod 600 {path}*"
        ]
        for file in tmp_path.iterdir():
            file.chmod(0o666)
        assert len(store_mode_problems(str(path))) == 1


def test_directory_in_which_others_can_replace_the_store_is_reported(tmp_path):
    """Through a link too: the directory of its target counts."""
    there = tmp_path / "there"
    there.mkdir()
    there.chmod(0o777)
    (tmp_path / "link.db").symlink_to(there / "store.db")
    open_store(str(there / "store.db")).close()
    for path in (there / "store.db", tmp_path / "link.db"):
        (problem,) = store_mode_problems(str(path))
        assert problem.startswith(f"{there} has mode 0777, so other users can replace")
