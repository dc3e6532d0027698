"""Files that hold keys: whole or not at all, for their owner only, and with errors that help."""

import os
import subprocess
import sys
import threading

import pytest

from kubelend.core.errors import InvalidSettings
from kubelend.kits import files

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def nobody():
    """Root may read and write everything, so the test is somebody else for a while."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    yield
    os.seteuid(before)


def mode(path):
    return path.stat().st_mode & 0o7777


@pytest.mark.parametrize("wanted", [0o600, 0o644], ids=oct)
@pytest.mark.parametrize("umask", [0o000, 0o077], ids=oct)
def test_the_mode_is_as_asked_whatever_the_umask(tmp_path, wanted, umask):
    before = os.umask(umask)
    try:
        files.write_atomic(tmp_path / "key", b"x", mode=wanted)
    finally:
        os.umask(before)
    assert mode(tmp_path / "key") == wanted


def test_an_existing_file_is_kept(tmp_path):
    files.write_atomic(tmp_path / "key", b"first", mode=0o600)
    with pytest.raises(InvalidSettings, match="key already exists; move it away first"):
        files.write_atomic(tmp_path / "key", b"second", mode=0o600)
    assert (tmp_path / "key").read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [tmp_path / "key"]


def test_a_link_to_nowhere_is_kept_too(tmp_path):
    (tmp_path / "key").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InvalidSettings, match="already exists"):
        files.write_atomic(tmp_path / "key", b"x", mode=0o600)
    assert not (tmp_path / "elsewhere").exists()


def test_an_existing_file_is_replaced_if_asked(tmp_path):
    (tmp_path / "key").write_bytes(b"first")
    (tmp_path / "key").chmod(0o644)
    files.write_atomic(tmp_path / "key", b"second", mode=0o600, overwrite=True)
    assert (tmp_path / "key").read_bytes() == b"second"
    assert mode(tmp_path / "key") == 0o600
    assert list(tmp_path.iterdir()) == [tmp_path / "key"]


def test_a_reader_never_sees_half_a_file(tmp_path):
    path = tmp_path / "key"
    contents = [bytes([letter]) * 200_000 for letter in b"ab"]
    files.write_atomic(path, contents[0], mode=0o600)
    done = threading.Event()

    def keep_writing():
        for turn in range(40):
            files.write_atomic(path, contents[turn % 2], mode=0o600, overwrite=True)
        done.set()

    writer = threading.Thread(target=keep_writing)
    writer.start()
    seen = set()
    while not done.is_set():
        seen.add(path.read_bytes())
    writer.join()
    assert seen <= set(contents)


def test_a_write_that_fails_half_way_leaves_the_old_file_and_no_other(tmp_path):
    (tmp_path / "key").write_bytes(b"first")
    script = """
import pathlib, resource, sys
from kubelend.core.errors import InvalidSettings
from kubelend.kits import files
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    files.write_atomic(pathlib.Path(sys.argv[1]), b"x" * 5000, mode=0o600, overwrite=True)
except InvalidSettings as error:
    print(error)
"""
    run = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "key"], check=True, capture_output=True, text=True
    )
    assert "key cannot be written: File too large" in run.stdout
    assert (tmp_path / "key").read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [tmp_path / "key"]


def test_a_directory_that_is_not_there_is_named(tmp_path):
    with pytest.raises(InvalidSettings, match="nowhere/key cannot be written: No such file"):
        files.write_atomic(tmp_path / "nowhere" / "key", b"x", mode=0o600)


def test_a_directory_that_cannot_be_written_to_is_named(tmp_path, request):
    tmp_path.chmod(0o500)
    request.getfixturevalue("nobody")
    with pytest.raises(InvalidSettings, match="key cannot be written: Permission denied"):
        files.write_atomic(tmp_path / "key", b"x", mode=0o600)


def test_a_missing_file_is_named_with_what_to_do(tmp_path):
    with pytest.raises(InvalidSettings) as raised:
        files.read_file(tmp_path / "tls.crt", hint="make one")
    assert str(raised.value) == f"{tmp_path}/tls.crt is missing; make one"


@pytest.mark.parametrize("content", [b"", b" \n"], ids=["nothing", "white space"])
def test_an_empty_file_is_named(tmp_path, content):
    (tmp_path / "tls.crt").write_bytes(content)
    with pytest.raises(InvalidSettings, match=r"tls\.crt is empty"):
        files.read_file(tmp_path / "tls.crt")


def test_what_is_no_file_cannot_be_read(tmp_path):
    with pytest.raises(InvalidSettings, match="cannot be read: Is a directory; check its owner"):
        files.read_file(tmp_path)


def test_a_file_of_another_cannot_be_read(tmp_path, request):
    (tmp_path / "tls.key").touch(mode=0)
    request.getfixturevalue("nobody")
    with pytest.raises(InvalidSettings, match="cannot be read: Permission denied"):
        files.read_file(tmp_path / "tls.key")


@pytest.mark.parametrize("allowed", [0o600, 0o400, 0o700], ids=oct)
def test_a_key_for_its_owner_only_is_not_exposed(tmp_path, allowed):
    (tmp_path / "tls.key").touch()
    (tmp_path / "tls.key").chmod(allowed)
    assert files.mode_problem(tmp_path / "tls.key") == ""


@pytest.mark.parametrize("exposed", [0o640, 0o604, 0o644, 0o620, 0o602, 0o666], ids=oct)
def test_a_key_that_others_can_reach_is_exposed(tmp_path, exposed):
    (tmp_path / "tls.key").touch()
    (tmp_path / "tls.key").chmod(exposed)
    complaint = files.mode_problem(tmp_path / "tls.key")
    assert f"tls.key holds a private key and has mode {exposed:04o}" in complaint


def test_the_mode_behind_a_link_is_what_counts(tmp_path):
    (tmp_path / "real").touch()
    (tmp_path / "real").chmod(0o644)
    (tmp_path / "tls.key").symlink_to(tmp_path / "real")
    assert "mode 0644" in files.mode_problem(tmp_path / "tls.key")


@as_root
@pytest.mark.parametrize("shared, exposed", [(0o640, False), (0o660, True), (0o644, True)])
def test_a_key_of_another_owner_may_be_lent_to_our_group(tmp_path, shared, exposed):
    (tmp_path / "tls.key").touch()
    (tmp_path / "tls.key").chmod(shared)
    os.chown(tmp_path / "tls.key", 12345, -1)
    assert bool(files.mode_problem(tmp_path / "tls.key")) == exposed


def test_a_file_that_is_not_there_is_not_exposed(tmp_path):
    assert files.mode_problem(tmp_path / "tls.key") == ""


def test_a_removed_file_is_gone_and_a_missing_one_is_fine(tmp_path):
    (tmp_path / "key").touch()
    files.remove_file(tmp_path / "key")
    files.remove_file(tmp_path / "key")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_removed_is_named(tmp_path, request):
    (tmp_path / "key").touch()
    tmp_path.chmod(0o500)
    request.getfixturevalue("nobody")
    with pytest.raises(InvalidSettings, match="key cannot be removed: Permission denied"):
        files.remove_file(tmp_path / "key")


def test_a_directory_is_locked_for_one_at_a_time(tmp_path):
    second = files.lock_directory(tmp_path)
    with (
        files.lock_directory(tmp_path),
        pytest.raises(InvalidSettings, match="is locked by another process"),
    ):
        second.__enter__()
    with files.lock_directory(tmp_path):
        assert list(tmp_path.iterdir()) == []


def test_a_lock_is_given_back_by_who_fails(tmp_path):
    with pytest.raises(BlockingIOError, match="another"), files.lock_directory(tmp_path):
        raise BlockingIOError("another")
    with files.lock_directory(tmp_path):
        pass


def test_a_complaint_says_what_the_file_holds(tmp_path):
    (tmp_path / "file").touch(mode=0o644)
    (tmp_path / "file").chmod(0o644)
    assert "file holds a passphrase and has" in files.mode_problem(
        tmp_path / "file", content="a passphrase"
    )
