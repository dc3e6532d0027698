"""Starts and stops the lab in the background (`lab up`, `lab down`).

`start_lab` starts one background process (`lab.supervisor`), which leads the process group of all others,
and reads its output until everything runs. A signal to the group ends whatever is left of it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress

from kubelend.core.errors import InvalidSettings, Unavailable
from kubelend.envtest import assets, network_namespace, waiting
from kubelend.kits import tasks
from kubelend.lab import hosts
from kubelend.lab.state import LabDirectory, LabState

READY = "ready\n"
"""The last line of the output of a lab that has started."""
INVALID_SETTINGS = 2
"""Exit code of the background process if the settings are invalid. Its last log line is the error."""

_STOP_TIMEOUT = 60.0
_KILL_TIMEOUT = 10.0


def start_lab(
    home: LabDirectory,
    on_output: Callable[[str], object],
    *,
    uses_kind: bool = False,
    uses_liqo: bool = False,
    has_third_agent: bool = False,
) -> LabState | None:
    """Starts the lab and calls `on_output` with each line; returns None if it is already running.

    If the start fails or is interrupted, also by Ctrl-C, everything is stopped again.
    """
    check_prerequisites(uses_kind=uses_kind, uses_liqo=uses_liqo)
    chosen = {"--kind": uses_kind, "--liqo": uses_liqo, "--third-agent": has_third_agent}
    flags = [flag for flag, is_set in chosen.items() if is_set]
    with tasks.signals_as_interrupt():
        if home.is_running():
            return None
        # What is left of a lab that has crashed or failed to start.
        stop_lab(home)
        home.create()
        try:
            return _start_and_wait(home, on_output, flags)
        except FileExistsError:
            return None
        except KeyboardInterrupt:
            home.remove()
            raise


def check_prerequisites(*, uses_kind: bool = False, uses_liqo: bool = False) -> None:
    """Raises if a required program is missing, before anything is started."""
    if uses_kind:
        hosts.check_kind()
    else:
        assets.locate_assets()
    if uses_liqo:
        assets.find_liqo_assets()
        network_namespace.check_permitted()


def stop_lab(home: LabDirectory, *, timeout: float = _STOP_TIMEOUT) -> bool:
    """Stops everything, also after a crash, and removes the directory; returns whether there was a lab.

    After `timeout` seconds, processes that have not stopped are killed.
    """
    if not home.exists():
        return False
    _end_processes(home, timeout)
    home.remove()
    return True


def _start_and_wait(
    home: LabDirectory, on_output: Callable[[str], object], flags: list[str]
) -> LabState:
    is_ready = False
    supervisor: subprocess.Popen[str] | None = None
    try:
        # A signal between start and PID file would leave the process running.
        with tasks.defer_signals():
            supervisor = _start_supervisor(home, flags)
        is_ready = _copy_output(supervisor, on_output)
        if not is_ready:
            raise _start_error(home, supervisor.wait())
    finally:
        if supervisor is not None and not is_ready:
            with tasks.defer_signals():
                _end_processes(home)
    found = home.read_state()
    if found is None:
        raise Unavailable("the clusters were stopped again by another command")
    return found


def _start_supervisor(home: LabDirectory, flags: list[str]) -> subprocess.Popen[str]:
    program = [sys.executable, "-P", "-m", "kubelend.lab.supervisor", str(home.directory)]
    with home.log.open("wb") as log:
        supervisor = subprocess.Popen(
            [*program, *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            # Process group and directory identify its processes after a crash.
            cwd=home.directory,
            start_new_session=True,
        )
    try:
        home.write_pid(supervisor.pid)
    except FileExistsError:
        supervisor.kill()
        supervisor.communicate()
        raise
    return supervisor


def _copy_output(supervisor: subprocess.Popen[str], on_output: Callable[[str], object]) -> bool:
    """Returns whether the lab is ready; if not, the process has ended or is ending."""
    assert supervisor.stdout is not None  # noqa: S101 - for the type checker
    with supervisor.stdout as lines:
        for line in lines:
            if line == READY:
                return True
            on_output(line)
    return False


def _start_error(home: LabDirectory, code: int) -> Unavailable | InvalidSettings:
    if code == 0 or not home.exists():
        return Unavailable("the clusters were stopped again by another command")
    *_, message = home.log.read_text("utf-8", "replace").splitlines() or [f"exit code {code}"]
    if code == INVALID_SETTINGS:
        return InvalidSettings(message)
    return Unavailable(message, hint=f"see the logs in {home.directory}")


def _end_processes(home: LabDirectory, timeout: float = _STOP_TIMEOUT) -> None:
    """Asks the background process to stop everything, kills what is left, and deletes kind's clusters."""
    if home.is_running():
        with suppress(ProcessLookupError, Unavailable):
            os.kill(home.pid, signal.SIGTERM)
            # A suspended process would not handle the signal.
            os.kill(home.pid, signal.SIGCONT)
            waiting.wait_until(lambda: not home.is_running(), "not stopped", timeout)
    if home.processes():
        with suppress(ProcessLookupError):
            os.killpg(home.pid, signal.SIGKILL)
        waiting.wait_until(lambda: not home.processes(), "the processes did not end", _KILL_TIMEOUT)
    record = home.read_state()
    if record is not None and record.kind:
        hosts.delete_kind_clusters(home, record.kind)
