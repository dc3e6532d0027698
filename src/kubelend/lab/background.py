"""Starts and stops the lab in the background (`lab up`, `lab down`).

`start_lab` launches the supervisor in its own session and reads its progress until everything runs. If that
is interrupted, also by Ctrl-C, the supervisor and all its child processes are stopped.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kubelend.core.errors import InvalidSettings, Unavailable
from kubelend.envtest import assets
from kubelend.kits import tasks
from kubelend.lab import hosts, state
from kubelend.lab.state import LabDirectory, LabReady, LabState, Message, StartFailed

_SUPERVISOR_STOP_TIMEOUT = 60.0


def start_lab(
    home: LabDirectory, on_message: Callable[[Message], None], *, uses_kind: bool
) -> LabState | None:
    """Starts the lab and calls `on_message` with each message; returns None if it is already running."""
    check_prerequisites(uses_kind=uses_kind)
    with tasks.signals_as_interrupt(), _locked_directory(home) as lock:
        if lock is None:
            return None
        clean_up(home)
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
        hosts.check_kind()
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
        with tasks.defer_signals():
            supervisor = _spawn_supervisor(home, lock, uses_kind=uses_kind)
        _read_messages(home, supervisor, on_message)
        is_ready = True
    finally:
        if supervisor is not None and not is_ready:
            with tasks.defer_signals():
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
            message = state.decode_message(line)
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
    clean_up(home)


_STOP_TIMEOUT = 60.0
_LOCK_POLL = 0.05


def stop_lab(home: LabDirectory) -> bool:
    """Stops everything and removes the directory; returns whether there was a lab."""
    if not home.exists():
        return False
    _stop_supervisor(home)
    lock = _wait_for_lock(home, time.monotonic() + _STOP_TIMEOUT)
    try:
        clean_up(home)
        home.remove()
    finally:
        if lock is not None:
            os.close(lock)
    return True


def clean_up(home: LabDirectory) -> None:
    """Stops processes and kind clusters that a crashed supervisor has left behind."""
    record = home.read_state()
    if record is None:
        return
    end_session(record.pid, home.directory)
    if record.kind:
        hosts.delete_kind_clusters(home, record.kind)


def _stop_supervisor(home: LabDirectory) -> None:
    record = _wait_for_state(home)
    # A running supervisor holds the lock; its PID is verified nevertheless.
    if record is not None and record.pid in session_processes(record.pid, home.directory):
        os.kill(record.pid, signal.SIGTERM)
        os.kill(record.pid, signal.SIGCONT)


def _wait_for_state(home: LabDirectory) -> LabState | None:
    """Waits for the state file of a supervisor that has just been started."""
    deadline = time.monotonic() + _STOP_TIMEOUT
    while home.is_locked():
        if (record := home.read_state()) is not None or time.monotonic() > deadline:
            return record
        time.sleep(_LOCK_POLL)
    return None


def _wait_for_lock(home: LabDirectory, deadline: float) -> int | None:
    """Waits for the lock; returns None if the supervisor does not exit, which `clean_up` then kills."""
    while (lock := home.lock()) is None:
        if time.monotonic() > deadline:
            return None
        time.sleep(_LOCK_POLL)
    return lock


_EXIT_POLL = 0.02
_TERM_TIMEOUT = 4.0
_KILL_TIMEOUT = 10.0


def session_processes(session: int, directory: Path) -> list[int]:
    """Returns the running processes, without zombies."""
    return [
        pid
        for pid in _all_pids()
        if _session_of(pid) == session and _has_working_directory(pid, directory)
    ]


def end_session(session: int, directory: Path) -> None:
    """Terminates all processes, and kills those that do not exit in time."""
    found = session_processes(session, directory)
    _send_signal(found, signal.SIGTERM)
    # A suspended process would not handle the signal.
    _send_signal(found, signal.SIGCONT)
    if not _wait_exited(session, directory, _TERM_TIMEOUT):
        _send_signal(session_processes(session, directory), signal.SIGKILL)
        _wait_exited(session, directory, _KILL_TIMEOUT)


def _wait_exited(session: int, directory: Path, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while session_processes(session, directory):
        if time.monotonic() > deadline:
            return False
        time.sleep(_EXIT_POLL)
    return True


def _send_signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _all_pids() -> Iterator[int]:
    return (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())


def _session_of(pid: int) -> int:
    """Returns 0 if the process has exited meanwhile."""
    try:
        return os.getsid(pid)
    except OSError:
        return 0


def _has_working_directory(pid: int, directory: Path) -> bool:
    try:
        place = Path(f"/proc/{pid}/cwd").readlink()
    except OSError:
        return False
    return str(place).removesuffix(" (deleted)") == str(directory.resolve())
