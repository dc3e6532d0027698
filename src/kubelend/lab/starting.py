"""`kubelend dev lab up`: starts a supervisor in the background, and listens until all runs.

Whatever ends this before, Ctrl-C too, ends the supervisor and all that it has started.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kubelend.apps import interrupts
from kubelend.core.errors import InvalidSettings, Unavailable
from kubelend.lab import assets, ending, kind, messages
from kubelend.lab.messages import Failed, Message, Ready
from kubelend.lab.records import Home, Record

_GIVES_UP_WITHIN = 60.0


def start(home: Home, hear: Callable[[Message], None], *, uses_kind: bool) -> Record | None:
    """`hear` is told of each step. None if it runs already."""
    check(uses_kind=uses_kind)
    with interrupts.like_ctrl_c(), _claimed(home) as lock:
        if lock is None:
            return None
        ending.sweep(home)
        home.clear()
        try:
            _start(home, lock, hear, uses_kind=uses_kind)
        except KeyboardInterrupt:
            home.remove()
            raise
    found = home.find()
    if found is None:
        raise Unavailable("somebody has ended them at once")
    return found


def check(*, uses_kind: bool) -> None:
    """What is missing is said before anything is started."""
    if uses_kind:
        kind.check()
    else:
        assets.locate()


@contextmanager
def _claimed(home: Home) -> Iterator[int | None]:
    home.make()
    lock = home.lock()
    try:
        yield lock
    finally:
        if lock is not None:
            os.close(lock)


def _start(home: Home, lock: int, hear: Callable[[Message], None], *, uses_kind: bool) -> None:
    supervisor: subprocess.Popen[bytes] | None = None
    is_ready = False
    try:
        # A Ctrl-C between the start and the assignment would leave it running.
        with interrupts.put_off():
            supervisor = _launch(home, lock, uses_kind=uses_kind)
        _listen(home, supervisor, hear)
        is_ready = True
    finally:
        if supervisor is not None and not is_ready:
            with interrupts.put_off():
                _end(home, supervisor)


def _launch(home: Home, lock: int, *, uses_kind: bool) -> subprocess.Popen[bytes]:
    program = [sys.executable, "-P", "-m", "kubelend.lab.supervisor"]
    with home.log.open("wb") as log:
        return subprocess.Popen(
            [*program, str(home.directory), str(lock), *(["--kind"] if uses_kind else [])],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            # Both are how its processes are known as ours, see `lab.sessions`.
            cwd=home.directory,
            start_new_session=True,
            pass_fds=(lock,),
        )


def _listen(
    home: Home, supervisor: subprocess.Popen[bytes], hear: Callable[[Message], None]
) -> None:
    assert supervisor.stdout is not None  # noqa: S101 - for the type checker
    with supervisor.stdout as said:
        for line in said:
            message = messages.decode(line)
            if isinstance(message, Failed):
                raise _refusal(message, home.log)
            if isinstance(message, Ready):
                return
            hear(message)
    raise Unavailable("the supervisor has ended", hint=f"see {home.log}")


def _refusal(message: Failed, log: Path) -> Unavailable | InvalidSettings:
    if message.code == InvalidSettings.code:
        return InvalidSettings(message.message)
    return Unavailable(message.message, hint=f"logs are in {log.parent}")


def _end(home: Home, supervisor: subprocess.Popen[bytes]) -> None:
    supervisor.terminate()
    try:
        supervisor.wait(_GIVES_UP_WITHIN)
    except subprocess.TimeoutExpired:
        supervisor.kill()
        supervisor.wait()
    ending.sweep(home)
