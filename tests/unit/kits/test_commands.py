"""A program's last words: one line, printable, and without secrets."""

import sys
from datetime import timedelta

import pytest

from kubelend.core.errors import Unavailable
from kubelend.kits import subprocesses

TOKEN = "eyJhbGciOiJFUzI1NiJ9.eyJzdWIiOiJhIn0.c2lnbmF0dXJl"
PEM = "-----BEGIN PRIVATE KEY-----\nMIGHAgEAMBMGByqGSM49\n-----END PRIVATE KEY-----"


@pytest.mark.parametrize(
    "said, kept",
    [
        (b"", ""),
        (b"\n \n", ""),
        (b"first\nlast\n\n", "last"),
        (b"\x1b[31m ERRO \x1b[0m no route\r\n", "ERRO no route"),
        (b"bell\x07 and\ttab", "bell and tab"),
        (b"not \xff text", "not \ufffd text"),
        (b"x" * 500, "[redacted]"),
        (f"refused: {TOKEN}".encode(), "refused: [redacted]"),
        (b"at https://me:pass@host/", "at https://[redacted]@host/"),
        (b"Authorization: Bearer abc.def", "Authorization: [redacted]"),
        (b'{"token": "hunter2"}', '{"[redacted]'),
        (b"password=hunter2 is wrong", "[redacted] is wrong"),
        (f"key: {PEM}".encode(), "key:"),
        (f"half a key: {PEM[:50]}".encode(), "half a key:"),
        (b"data " + b"QUJD" * 20, "data [redacted]"),
        (b"rsv-a-cluster-with-a-long-name-0123456789abcdef is gone", None),
    ],
)
def test_last_words_are_one_clean_line(said, kept):
    found = subprocesses.last_error_line(said)
    assert found == (said.decode() if kept is None else kept)


def test_last_words_are_short():
    assert len(subprocesses.last_error_line(b"word " * 100)) == subprocesses.MAX_LINE_LENGTH


async def test_output_is_returned_and_errors_are_not():
    program = "import sys; print('out'); print('err', file=sys.stderr)"
    found = await subprocesses.run_program(
        sys.executable, "-c", program, timeout=timedelta(seconds=10)
    )
    assert found == b"out\n"


async def test_much_output_is_kept_from_the_end():
    program = "import sys; sys.stdout.write('x' * 3_000_000 + 'end')"
    found = await subprocesses.run_program(
        sys.executable, "-c", program, timeout=timedelta(seconds=10)
    )
    assert (len(found), found[-4:]) == (subprocesses.MAX_OUTPUT_BYTES, b"xend")


async def test_a_silent_failure_has_its_status():
    with pytest.raises(Unavailable, match="failed: exit status 3"):
        await subprocesses.run_program(
            sys.executable, "-c", "raise SystemExit(3)", timeout=timedelta(seconds=10)
        )


async def test_a_child_that_is_left_behind_with_the_output_is_not_waited_for():
    program = "import subprocess; subprocess.Popen(['sleep', '600'])"
    with pytest.raises(Unavailable, match="timed out after"):
        await subprocesses.run_program(
            sys.executable, "-c", program, timeout=timedelta(milliseconds=500)
        )
