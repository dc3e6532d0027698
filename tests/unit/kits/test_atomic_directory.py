"""Files that belong together: exchanged in one step, whatever happens in between."""

import os
import stat
import subprocess
import sys

import pytest

from kubelend.core.errors import InvalidSettings
from kubelend.kits.files import AtomicDirectory

NAMES = ("tls.crt", "tls.key", "ca.crt")
OLD = {name: f"old {name}".encode() for name in NAMES}
NEW = {name: f"new {name}".encode() for name in NAMES}


@pytest.fixture
def directory(tmp_path):
    """As `kubelend ca issue` leaves one: plain files."""
    return written(tmp_path / "certs")


def written(directory):
    directory.mkdir(mode=0o700)
    for name, content in OLD.items():
        (directory / name).write_bytes(content)
    (directory / "tls.key").chmod(0o600)
    return directory


def seen(directory):
    return {name: (directory / name).read_bytes() for name in NAMES}


def exchange(directory, contents=NEW):
    generations = AtomicDirectory(directory, NAMES)
    generations.switch_to(generations.stage(contents))


def hidden(directory):
    return sorted(path.name for path in directory.glob(".generation-*"))


def test_all_files_change(directory):
    exchange(directory)
    assert seen(directory) == NEW


def test_what_is_staged_is_not_seen(directory):
    staged = AtomicDirectory(directory, NAMES).stage(NEW)
    assert seen(directory) == OLD
    assert seen(staged) == NEW


def test_only_the_generation_in_use_is_kept(directory):
    for turn in range(3):
        exchange(directory, dict.fromkeys(NAMES, b"%d" % turn))
    assert len(hidden(directory)) == 1
    assert set(seen(directory).values()) == {b"2"}


def test_modes_stay_as_they_were(directory):
    (directory / "tls.key").chmod(0o640)
    exchange(directory)
    modes = [stat.S_IMODE((directory / name).stat().st_mode) for name in NAMES]
    assert modes == [0o644, 0o640, 0o644]


def test_a_directory_that_moves_takes_its_files_along(directory):
    exchange(directory)
    moved = directory.rename(directory.with_name("moved"))
    assert seen(moved) == NEW


def test_a_file_that_somebody_wrote_over_is_taken_up_again(directory):
    exchange(directory)
    (directory / "ca.crt").unlink()
    (directory / "ca.crt").write_bytes(b"by hand")
    assert AtomicDirectory(directory, NAMES).write_problem() == ""
    exchange(directory, OLD)
    assert seen(directory) == OLD
    assert (directory / "ca.crt").is_symlink()


# -- a crash


_CRASH = """
import os, sys
from pathlib import Path
from kubelend.kits.files import AtomicDirectory

directory, fatal, changes = Path(sys.argv[1]), int(sys.argv[2]), 0
names = ("tls.crt", "tls.key", "ca.crt")
events = {"os.mkdir", "os.rename", "os.symlink", "os.link", "os.remove", "os.rmdir", "os.chmod"}

def count(event, arguments):
    global changes
    writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_CREAT
    if event in events or writes:
        changes += 1
        if changes == fatal:
            os._exit(9)

files = AtomicDirectory(directory, names)
content = b"new " if b"old" in (directory / "tls.crt").read_bytes() else b"old "
sys.addaudithook(count)
files.switch_to(files.stage({name: content + name.encode() for name in names}))
print(changes)
"""


def crash(directory, fatal):
    """An exchange by a process that ends, without a word, before its n-th change of the disk."""
    return subprocess.run(
        [sys.executable, "-c", _CRASH, directory, str(fatal)],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("first", [True, False], ids=["plain files", "links"])
def test_a_crash_at_any_moment_leaves_all_old_files_or_all_new_ones(tmp_path, first):
    outcomes = []
    for fatal in range(1, 100):
        directory = written(tmp_path / str(fatal))
        if not first:
            exchange(directory, OLD)
        done = crash(directory, fatal)
        found = seen(directory)
        assert found in (OLD, NEW), fatal
        outcomes.append(found == NEW)
        # The next one finds nothing in its way, and cleans up.
        exchange(directory, dict.fromkeys(NAMES, b"later"))
        assert set(seen(directory).values()) == {b"later"}
        assert len(hidden(directory)) == 1
        if done.returncode == 0:
            break
        assert done.returncode == 9, done.stderr
    # The number of moments is not the point, but that there were many, on both sides of the change.
    assert len(outcomes) > 15
    assert outcomes == sorted(outcomes)
    assert outcomes.count(True) > 1


# A link may be followed just before its generation goes: once more, and it leads to the next one.
_READ = """
import sys, pathlib

def read(path):
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return path.read_bytes()

print("ready", flush=True)
for _ in range(3000):
    for path in map(pathlib.Path, sys.argv[1:]):
        assert read(path).split()[1].decode() == path.name
"""


def test_a_reader_all_the_while_sees_each_file_whole(directory):
    exchange(directory, OLD)
    reader = subprocess.Popen(
        [
            sys.executable,
            "-c",
            _READ,
            *(str(directory / name) for name in NAMES),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with reader:
        assert reader.stdout is not None
        reader.stdout.readline()
        while reader.poll() is None:
            exchange(directory, NEW)
            exchange(directory, OLD)
        assert reader.returncode == 0, reader.communicate()[1]


# -- whose files they are


def test_plain_files_of_our_own_can_be_exchanged(directory):
    assert AtomicDirectory(directory, NAMES).write_problem() == ""
    exchange(directory)
    assert AtomicDirectory(directory, NAMES).write_problem() == ""


def test_a_mounted_secret_is_left_to_whoever_mounts_it(directory, tmp_path):
    mount = tmp_path / "mount"
    mount.mkdir()
    (mount / "..data").symlink_to(directory)
    for name in NAMES:
        (mount / name).symlink_to(f"..data/{name}")
    assert "managed by another program" in AtomicDirectory(mount, NAMES).write_problem()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_key_of_another_user_is_left_alone(directory):
    os.chown(directory / "tls.key", 65534, -1)
    assert "belongs to another user" in AtomicDirectory(directory, NAMES).write_problem()


def test_a_directory_that_cannot_be_written_is_said_so(directory):
    directory.chmod(0o555)
    before = os.geteuid()
    if before == 0:
        os.chown(directory, 65534, -1)
        os.seteuid(65534)
    try:
        assert "is not writable" in AtomicDirectory(directory, NAMES).write_problem()
        with pytest.raises(InvalidSettings, match="cannot be replaced: Permission denied"):
            AtomicDirectory(directory, NAMES).stage(NEW)
    finally:
        os.seteuid(before)
        directory.chmod(0o755)


def test_a_missing_file_is_an_obstacle(directory):
    (directory / "ca.crt").unlink()
    assert "ca.crt is missing" in AtomicDirectory(directory, NAMES).write_problem()


def test_one_at_a_time(directory):
    generations = AtomicDirectory(directory, NAMES)
    with generations.try_lock() as first:
        with generations.try_lock() as second:
            assert (first, second) == (True, False)
        with generations.try_lock() as third:
            assert not third
    with generations.try_lock() as later:
        assert later
