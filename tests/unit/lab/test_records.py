"""The directory of clusters that run in the background: one supervisor at a time, and nobody else's files."""

import os
import stat

import pytest

from kubelend.core.errors import InvalidSettings
from kubelend.lab.records import Home, Record


@pytest.fixture
def home(tmp_path):
    home = Home(tmp_path / "state" / "clusters")
    home.make()
    return home


def test_only_its_owner_looks_inside(home):
    assert stat.S_IMODE(home.directory.stat().st_mode) == 0o700


def test_record_is_found_again(home):
    assert home.find() is None
    record = Record(7, kind=("a",), clusters={"b": "/c"})
    home.keep(record)
    assert home.find() == record


def test_damaged_record_is_told_with_its_path(home):
    (home.directory / "lab.json").write_text("{")
    with pytest.raises(InvalidSettings, match=r"lab\.json cannot be read"):
        home.find()


def test_lock_is_held_by_one_at_a_time_and_ends_with_its_descriptor(home):
    held = home.lock()
    assert home.lock() is None
    assert home.is_locked()
    os.close(held)
    assert not home.is_locked()
    again = home.lock()
    assert again is not None
    os.close(again)


def test_copy_of_the_descriptor_holds_the_lock_on(home):
    """As a supervisor has one, of the command that started it."""
    held = home.lock()
    copy = os.dup(held)
    os.close(held)
    assert home.is_locked()
    os.close(copy)
    assert not home.is_locked()


def test_directory_with_files_of_others_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(InvalidSettings, match="contains other files; use another directory"):
        Home(tmp_path).make()
    assert (tmp_path / "thesis.tex").exists()


def test_directory_that_is_in_use_is_known_before_there_is_a_record(home):
    """So that of two who start at once, one hears of the other."""
    held = home.lock()
    (home.directory / "supervisor.log").touch()
    home.make()
    assert home.lock() is None
    os.close(held)


def test_clearing_keeps_the_lock_alone(home):
    held = home.lock()
    home.keep(Record(7))
    (home.directory / "certs").mkdir()
    home.clear()
    assert [path.name for path in home.directory.iterdir()] == ["kubelend-lab.lock"]
    assert home.is_locked()
    os.close(held)


def test_nothing_is_there_before_somebody_starts_something(tmp_path):
    home = Home(tmp_path / "none")
    assert not home.is_there()
    assert not home.is_locked()
    assert not home.directory.exists()
