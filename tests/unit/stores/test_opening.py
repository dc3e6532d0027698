"""What can stand behind `--store`."""

from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest

import make
from kubelend.core.errors import InvalidSettings
from kubelend.core.events import Archived
from kubelend.core.lifecycle import Phase
from kubelend.stores.memory import MemoryStore
from kubelend.stores.opening import check, open_readonly, open_store
from kubelend.stores.sqlite import SqliteStore


def test_memory_is_a_store():
    assert isinstance(open_store("memory:"), MemoryStore)


@pytest.mark.parametrize(
    "form",
    [
        "{path}",
        "sqlite://{path}",
        "sqlite:///{path}",
        "sqlite:{path}",
        "store.db",
        "sqlite:store.db",
    ],
)
def test_file_can_be_named_in_every_usual_way(tmp_path, monkeypatch, form):
    monkeypatch.chdir(tmp_path)
    url = form.format(path=tmp_path / "store.db")
    with closing(open_store(url)) as store:
        assert isinstance(store, SqliteStore)
        store.commit([make.cluster("a")], 1)
        with closing(open_readonly(url)) as beside:
            assert beside.load() == store.load()
    assert (tmp_path / "store.db").is_file()


@pytest.mark.parametrize("path", ["./odd:name.db", "C:x"])
def test_colon_in_a_path_makes_no_kind_of_store(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    open_store(path).close()
    assert Path(path).is_file()


@pytest.mark.parametrize("url", ["postgres://db/kubelend", "kubernetes:", "redis:x"])
@pytest.mark.parametrize("opener", [check, open_store, open_readonly])
def test_unknown_kind_is_refused_with_those_that_are_known(url, opener):
    with pytest.raises(InvalidSettings) as refused:
        opener(url)
    scheme = url.partition(":")[0]
    assert str(refused.value) == (
        f"there is no store of the kind {scheme}:; known are memory:, a path or sqlite:///path"
    )


@pytest.mark.parametrize(
    "url", ["", "sqlite:", "sqlite://", "sqlite:///", "sqlite://host/x", "memory:x"]
)
def test_incomplete_name_is_refused(url):
    for opener in (check, open_store):
        with pytest.raises(InvalidSettings):
            opener(url)


@pytest.mark.parametrize("url", ["memory:", "no/such/place.db", "sqlite:///no/such/place.db"])
def test_checking_a_name_opens_nothing(tmp_path, monkeypatch, url):
    monkeypatch.chdir(tmp_path)
    check(url)
    assert not list(tmp_path.iterdir())


def test_memory_of_another_process_cannot_be_read():
    with pytest.raises(InvalidSettings, match="cannot be read from outside"):
        open_readonly("memory:")


@pytest.mark.parametrize("url", ["memory:", "store.db"])
def test_time_in_the_archive_is_the_callers_choice(tmp_path, monkeypatch, url):
    monkeypatch.chdir(tmp_path)
    old, new = (
        make.reservation(name, phase=Phase.RELEASED, finished_at=make.T0 + after)
        for name, after in {"old": timedelta(), "new": 2 * make.HOUR}.items()
    )
    with closing(open_store(url, archive_for=make.HOUR)) as store:
        store.commit([old, new, Archived(old.id), Archived(new.id)], 1)
        assert (store.archived(old.id), store.archived(new.id)) == (None, new)
