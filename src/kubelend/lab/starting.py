"""Starts and stops the lab in the background (`lab up`, `lab down`).

`start` launches the supervisor in its own session and reads its progress until everything runs. If that is
interrupted, also by Ctrl-C, the supervisor and all its child processes are stopped.
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
from kubelend.lab.messages import LabReady, Message, StartFailed
from kubelend.lab.records import LabDirectory, LabState

_SUPERVISOR_STOP_TIMEOUT = 60.0


def start_lab(
    home: LabDirectory, on_message: Callable[[Message], None], *, uses_kind: bool
) -> LabState | None:
    """Starts the lab and calls `hear` with each message; returns None if it is already running."""
    check_prerequisites(uses_kind=uses_kind)
    with interrupts.signals_as_interrupt(), _locked_directory(home) as lock:
        if lock is None:
            return None
        ending.clean_up(home)
        home.clear()
        try:
            _run_supervisor(home, lock, on_message, uses_kind=uses_kind)
        except KeyboardInterrupt:
            home.remove()
            raise
    found = home.read_state()
    if found is None:
        raise Unavailable("the clusters were stopped again by another command")
    return found


def check_prerequisites(*, uses_kind: bool) -> None:
    """Raises if a required program is missing, before anything is started."""
    if uses_kind:
        kind.check_kind()
    else:
        assets.locate_assets()


@contextmanager
def _locked_directory(home: LabDirectory) -> Iterator[int | None]:
    home.create()
    lock = home.lock()
    try:
        yield lock
    finally:
        if lock is not None:
            os.close(lock)


def _run_supervisor(
    home: LabDirectory, lock: int, on_message: Callable[[Message], None], *, uses_kind: bool
) -> None:
    supervisor: subprocess.Popen[bytes] | None = None
    is_ready = False
    try:
        # Ctrl-C between start and assignment would leave the process running.
        with interrupts.defer_signals():
            supervisor = _spawn_supervisor(home, lock, uses_kind=uses_kind)
        _read_messages(home, supervisor, on_message)
        is_ready = True
    finally:
        if supervisor is not None and not is_ready:
            with interrupts.defer_signals():
                _stop_and_clean_up(home, supervisor)


def _spawn_supervisor(home: LabDirectory, lock: int, *, uses_kind: bool) -> subprocess.Popen[bytes]:
    program = [sys.executable, "-P", "-m", "kubelend.lab.supervisor"]
    with home.log.open("wb") as log:
        return subprocess.Popen(
            [*program, str(home.directory), str(lock), *(["--kind"] if uses_kind else [])],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            # Directory and session identify its child processes after a crash.
            cwd=home.directory,
            start_new_session=True,
            pass_fds=(lock,),
        )


def _read_messages(
    home: LabDirectory, supervisor: subprocess.Popen[bytes], on_message: Callable[[Message], None]
) -> None:
    assert supervisor.stdout is not None  # noqa: S101 - for the type checker
    with supervisor.stdout as lines:
        for line in lines:
            message = messages.decode_message(line)
            if isinstance(message, StartFailed):
                raise _start_error(message, home.log)
            if isinstance(message, LabReady):
                return
            on_message(message)
    raise Unavailable("the supervisor exited unexpectedly", hint=f"see {home.log}")


def _start_error(message: StartFailed, log: Path) -> Unavailable | InvalidSettings:
    if message.code == InvalidSettings.code:
        return InvalidSettings(message.message)
    return Unavailable(message.message, hint=f"see the logs in {log.parent}")


def _stop_and_clean_up(home: LabDirectory, supervisor: subprocess.Popen[bytes]) -> None:
    supervisor.terminate()
    try:
        supervisor.wait(_SUPERVISOR_STOP_TIMEOUT)
    except subprocess.TimeoutExpired:
        supervisor.kill()
        supervisor.wait()
    ending.clean_up(home)
