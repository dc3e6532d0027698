"""Brokers and agents as child processes of a trial, started as anybody would: by the command.

Their ports are free ones, and their logs say which.
"""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from kubelend.apps import flags
from kubelend.core.errors import Unavailable

_READY_WITHIN = 60.0
_STOPPED_WITHIN = 30.0
_POLL = 0.002


class _Line(msgspec.Struct, frozen=True):
    """What is read of a line of the log."""

    event: str = ""
    what: str = ""
    port: int = 0
    reservations: int = 0


class Child:
    """A running process of ours."""

    def __init__(self, command: str, log: Path, arguments: list[str]) -> None:
        self._command = command
        self._log = log
        self.started_at = time.perf_counter()
        with log.open("wb") as stream:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "kubelend", command, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stream,
                env=_environment(),
                # A group of its own: Ctrl-C at the terminal is for us, and we stop it in good order.
                process_group=0,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def wait_until_ready(self) -> float:
        """Wait for /readyz to say ok; gives the seconds since the process was started."""
        while not self._is_ready():
            waited = time.perf_counter() - self.started_at
            if not self.is_running or waited > _READY_WITHIN:
                raise Unavailable(f"the {self._command} did not start", hint=self.last_words())
            time.sleep(_POLL)
        return time.perf_counter() - self.started_at

    def stop(self) -> int:
        """Let it finish, and wait for that; gives its exit code. Stopping again does nothing."""
        if self.is_running:
            self._process.terminate()
        try:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOPPED_WITHIN)
        finally:
            if self.is_running:
                self._process.kill()
        return self._process.wait()

    def kill(self) -> None:
        """As a power cut would."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def port_of(self, what: str) -> int:
        """0 as long as it does not listen."""
        listening = (line for line in self._lines() if line.event == "listening")
        return next((line.port for line in listening if line.what == what), 0)

    def last_words(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        return lines[-1] if lines else "it said nothing"

    def _is_ready(self) -> bool:
        port = self.port_of("probes")
        if not port:
            return False
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
        try:
            connection.request("GET", "/readyz")
            return connection.getresponse().status == http.HTTPStatus.OK
        except OSError:
            return False
        finally:
            connection.close()

    def _lines(self) -> Iterator[_Line]:
        for line in self._log.read_bytes().splitlines():
            # The last may be half written, and a crash writes lines that are no JSON.
            with suppress(msgspec.MsgspecError):
                yield msgspec.json.decode(line, type=_Line)


class BrokerProcess(Child):
    """A running broker."""

    def __init__(self, log: Path, arguments: list[str]) -> None:
        super().__init__("broker", log, arguments)

    @property
    def port(self) -> int:
        """Of the REST interface."""
        return self.port_of("api")

    @property
    def url(self) -> str:
        return f"https://localhost:{self.port}"

    def loaded(self) -> int:
        """How many reservations it found in its store."""
        return next(line.reservations for line in self._lines() if line.event == "ready")


class AgentProcess(Child):
    """A running agent."""

    def __init__(self, log: Path, arguments: list[str], objects: Path) -> None:
        super().__init__("agent", log, arguments)
        self.objects = objects
        """The directory of its cluster's objects."""


def _environment() -> dict[str, str]:
    """Without the person's own settings, which are meant for another broker."""
    return {name: text for name, text in os.environ.items() if not name.startswith(flags.PREFIX)}
