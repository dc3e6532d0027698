"""The directory of clusters that run in the background: one supervisor at a time, and nobody else's files."""

import os
import stat

import pytest

from kubelend.core.errors import InvalidSettings
from kubelend.lab.state import LabDirectory, LabState


@pytest.fixture
def home(tmp_path):
    home = LabDirectory(tmp_path / "state" / "clusters")
    home.create()
    return home


def test_only_its_owner_looks_inside(home):
    assert stat.S_IMODE(home.directory.stat().st_mode) == 0o700


def test_record_is_found_again(home):
    assert home.read_state() is None
    record = LabState(7, kind=("a",), clusters={"b": "/c"})
    home.write_state(record)
    assert home.read_state() == record


def test_damaged_record_is_told_with_its_path(home):
    (home.directory / "lab.json").write_text("{")
    with pytest.raises(InvalidSettings, match=r"lab\.json cannot be read"):
        home.read_state()


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
        LabDirectory(tmp_path).create()
    assert (tmp_path / "thesis.tex").exists()


def test_directory_that_is_in_use_is_known_before_there_is_a_record(home):
    """So that of two who start at once, one hears of the other."""
    held = home.lock()
    (home.directory / "supervisor.log").touch()
    home.create()
    assert home.lock() is None
    os.close(held)


def test_clearing_keeps_the_lock_alone(home):
    held = home.lock()
    home.write_state(LabState(7))
    (home.directory / "certs").mkdir()
    home.clear()
    assert [path.name for path in home.directory.iterdir()] == ["kubelend-lab.lock"]
    assert home.is_locked()
    os.close(held)


def test_nothing_is_there_before_somebody_starts_something(tmp_path):
    home = LabDirectory(tmp_path / "none")
    assert not home.exists()
    assert not home.is_locked()
    assert not home.directory.exists()
