"""Files: atomic writes, locks, modes, and the replacement of several files at once."""

import itertools
import os
import resource
import stat
import sys
import threading
import warnings

import pytest

from kubelend.core.errors import InvalidSettings
from kubelend.kits import files
from kubelend.kits.files import AtomicDirectory

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def nobody():
    """Root may read and write everything, so the test is another user for a while."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    yield
    os.seteuid(before)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def touch(path, wanted):
    path.touch()
    path.chmod(wanted)
    return path


# -- one file


@pytest.mark.parametrize("wanted", [0o600, 0o644], ids=oct)
@pytest.mark.parametrize("umask", [0o000, 0o077], ids=oct)
def test_mode_is_as_requested_whatever_the_umask(tmp_path, wanted, umask):
    before = os.umask(umask)
    try:
        files.write_atomic(tmp_path / "key", b"x", mode=wanted)
    finally:
        os.umask(before)
    assert mode(tmp_path / "key") == wanted


def test_existing_file_or_link_is_not_overwritten(tmp_path):
    files.write_atomic(tmp_path / "key", b"first", mode=0o600)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("key", "link"):
        with pytest.raises(InvalidSettings, match=f"{name} already exists; move it away first"):
            files.write_atomic(tmp_path / name, b"second", mode=0o600)
    assert (tmp_path / "key").read_bytes() == b"first"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["key", "link"]


def test_reader_never_sees_half_a_file(tmp_path):
    path, seen = tmp_path / "key", set[bytes]()
    contents = [bytes([letter]) * 200_000 for letter in b"ab"]
    files.write_atomic(path, contents[0], mode=0o644)

    def keep_writing():
        for turn in range(40):
            files.write_atomic(path, contents[turn % 2], mode=0o600, overwrite=True)

    writer = threading.Thread(target=keep_writing)
    writer.start()
    while writer.is_alive():
        seen.add(path.read_bytes())
    writer.join()
    assert seen <= set(contents)
    assert (path.read_bytes(), mode(path)) == (contents[1], 0o600)
    assert list(tmp_path.iterdir()) == [path]


def test_failed_write_leaves_the_old_file_and_no_other(tmp_path):
    (tmp_path / "key").write_bytes(b"first")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(InvalidSettings, match="key cannot be written: File too large"):
            files.write_atomic(tmp_path / "key", b"x" * 5000, mode=0o600, overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "key").read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [tmp_path / "key"]


@pytest.mark.parametrize(
    "call, error",
    [
        (lambda path: files.write_atomic(path, b"x", mode=0o600), "key cannot be written"),
        (lambda path: files.rename_file(path, path), "key cannot be replaced"),
        (files.read_file, "key cannot be read"),
    ],
    ids=["write", "rename", "read"],
)
def test_error_names_the_file_and_the_reason(tmp_path, request, call, error):
    with pytest.raises(InvalidSettings, match="nowhere/key cannot be written: No such file"):
        files.write_atomic(tmp_path / "nowhere" / "key", b"x", mode=0o600)
    touch(tmp_path / "key", 0)
    tmp_path.chmod(0o500)
    request.getfixturevalue("nobody")
    with pytest.raises(InvalidSettings, match=f"{error}: Permission denied; c"):
        call(tmp_path / "key")


def test_missing_empty_and_irregular_files_are_errors_with_a_hint(tmp_path):
    (tmp_path / "empty").write_bytes(b" \n")
    for name, error in ("missing", "is missing; make one"), ("empty", "is empty; make one"):
        with pytest.raises(InvalidSettings) as raised:
            files.read_file(tmp_path / name, hint="make one")
        assert str(raised.value) == f"{tmp_path}/{name} {error}"
    with pytest.raises(InvalidSettings, match="cannot be read: Is a directory; check its owner"):
        files.read_file(tmp_path)


def test_temporary_files_are_removed_and_a_file_takes_the_place_of_another(tmp_path):
    (tmp_path / "key").touch()
    (tmp_path / ".key.0123").touch()
    files.remove_temporary_files(tmp_path / "key")
    assert list(tmp_path.iterdir()) == [tmp_path / "key"]
    (tmp_path / "new").write_text("new")
    files.rename_file(tmp_path / "new", tmp_path / "key")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"key": "new"}


# -- locks


def test_directory_is_locked_by_one_at_a_time_until_an_error(tmp_path):
    with files.lock_directory(tmp_path):
        with (
            pytest.raises(InvalidSettings, match="is locked by another process"),
            files.lock_directory(tmp_path),
        ):
            pass
        assert list(tmp_path.iterdir()) == []
    for _ in range(2):
        with pytest.raises(BlockingIOError, match="another"), files.lock_directory(tmp_path):
            raise BlockingIOError("another")


# -- modes


@pytest.mark.parametrize("exposed", [0o640, 0o604, 0o620, 0o602, 0o666], ids=oct)
def test_key_that_others_can_access_is_reported(tmp_path, exposed):
    assert files.mode_problem(tmp_path / "tls.key") == "", "it is missing"
    for allowed in (0o600, 0o400, 0o700):
        assert files.mode_problem(touch(tmp_path / "own.key", allowed)) == ""
    (tmp_path / "link").symlink_to(touch(tmp_path / "tls.key", exposed))
    for name in ("tls.key", "link"):  # the target of a link counts
        found = files.mode_problem(tmp_path / name, content="a token")
        assert f"{name} holds a token and has mode {exposed:04o}" in found


@as_root
@pytest.mark.parametrize("shared, exposed", [(0o640, False), (0o660, True), (0o644, True)])
def test_key_of_another_owner_may_be_readable_for_our_group(tmp_path, shared, exposed):
    os.chown(touch(tmp_path / "tls.key", shared), 12345, -1)
    assert bool(files.mode_problem(tmp_path / "tls.key")) == exposed


def test_directory_that_others_can_write_is_reported(tmp_path):
    assert files.directory_mode_problem(tmp_path / "none") == ""
    for allowed in (0o700, 0o755, 0o2775, 0o1777):  # owned, shared by a group, or sticky
        tmp_path.chmod(allowed)
        assert files.directory_mode_problem(tmp_path) == ""
    for mode in (0o703, 0o777):
        tmp_path.chmod(mode)
        assert files.directory_mode_problem(tmp_path) == (
            f"{tmp_path} has mode {mode:04o}, so other users can replace files in it;"
            f" chmod o-w {tmp_path}"
        )


# -- several files

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
    atomic = AtomicDirectory(directory, NAMES)
    atomic.switch_to(atomic.stage(contents))


def hidden(directory):
    return sorted(path.name for path in directory.glob(".generation-*"))


def test_staged_files_are_visible_after_the_switch_and_one_generation_remains(directory):
    atomic = AtomicDirectory(directory, NAMES)
    assert atomic.write_problem() == ""
    staged = atomic.stage(NEW)
    assert (seen(directory), seen(staged)) == (OLD, NEW)
    atomic.switch_to(staged)
    assert seen(directory) == NEW
    (directory / "ca.crt").unlink()
    assert "ca.crt is missing" in atomic.write_problem()
    (directory / "ca.crt").write_bytes(b"by hand")  # instead of a link
    assert atomic.write_problem() == ""
    exchange(directory, OLD)
    assert (seen(directory), len(hidden(directory))) == (OLD, 1)
    assert (directory / "ca.crt").is_symlink()


def test_modes_are_retained_and_the_directory_can_be_renamed(directory):
    (directory / "tls.key").chmod(0o640)
    exchange(directory)
    moved = directory.rename(directory.with_name("moved"))
    assert seen(moved) == NEW
    assert [mode(moved / name) for name in NAMES] == [0o644, 0o640, 0o644]


CHANGES = {"os.mkdir", "os.rename", "os.symlink", "os.link", "os.remove", "os.rmdir", "os.chmod"}


def exchange_and_crash(directory, fatal):
    """An exchange by a process that dies with code 9 before its n-th change of the disk; its exit code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about threads, of which it uses none
        pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    numbers = itertools.count(1)

    def count(event, arguments):
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_CREAT
        if (event in CHANGES or writes) and next(numbers) == fatal:
            os._exit(9)

    try:
        sys.addaudithook(count)
        exchange(directory)
        os._exit(0)
    finally:
        os._exit(1)


@pytest.mark.parametrize("first", [True, False], ids=["plain files", "links"])
def test_crash_at_any_moment_leaves_all_old_or_all_new_files(tmp_path, first):
    outcomes = []
    for fatal in range(1, 100):
        directory = written(tmp_path / str(fatal))
        if not first:
            exchange(directory, OLD)
        code = exchange_and_crash(directory, fatal)
        found = seen(directory)
        assert found in (OLD, NEW), fatal
        outcomes.append(found == NEW)
        # The next one finds nothing in its way, and cleans up.
        exchange(directory, dict.fromkeys(NAMES, b"later"))
        assert set(seen(directory).values()) == {b"later"}
        assert len(hidden(directory)) == 1
        if code == 0:
            break
        assert code == 9
    # The number of moments is not the point, but that there were many, on both sides of the change.
    assert len(outcomes) > 15
    assert outcomes == sorted(outcomes)
    assert outcomes.count(True) > 1


def test_files_that_others_manage_are_not_replaced(directory, tmp_path):
    mount = tmp_path / "mount"
    mount.mkdir()
    (mount / "..data").symlink_to(directory)
    for name in NAMES:
        (mount / name).symlink_to(f"..data/{name}")
    assert "managed by another program" in AtomicDirectory(mount, NAMES).write_problem()
    if os.geteuid() == 0:
        os.chown(directory / "tls.key", 65534, -1)
        assert "belongs to another user" in AtomicDirectory(directory, NAMES).write_problem()


def test_directory_without_write_permission_is_reported(directory, request):
    directory.chmod(0o555)
    if os.geteuid() == 0:
        os.chown(directory, 65534, -1)
    request.getfixturevalue("nobody")
    assert "is not writable" in AtomicDirectory(directory, NAMES).write_problem()
    with pytest.raises(InvalidSettings, match="cannot be replaced: Permission denied"):
        AtomicDirectory(directory, NAMES).stage(NEW)


def test_one_writer_at_a_time(directory):
    atomic = AtomicDirectory(directory, NAMES)
    with atomic.try_lock() as first:
        with atomic.try_lock() as second:
            assert (first, second) == (True, False)
        with atomic.try_lock() as third:
            assert not third
    with atomic.try_lock() as later:
        assert later
