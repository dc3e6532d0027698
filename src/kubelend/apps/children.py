"""Brokers and agents as child processes of a trial, started as anybody would: by the command.

Their ports are free ones, and their logs say which.
"""

from __future__ import annotations

import http.client
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from kubelend.apps import flags
from kubelend.apps.programs import Program

_POLL = 0.02
"""Seconds between two looks: each is work for the process, in the very time that is measured, and finds
it ready so much too late at most."""


class _Line(msgspec.Struct, frozen=True):
    """What is read of a line of the log."""

    event: str = ""
    what: str = ""
    port: int = 0
    reservations: int = 0


class Child(Program):
    """A running process of ours."""

    lines_told = 1  # its last line is an error in full

    def __init__(self, command: str, log: Path, arguments: list[str]) -> None:
        program = [sys.executable, "-P", "-m", "kubelend", command, *arguments]
        super().__init__(command, log, program, _environment())

    def wait_until_ready(self) -> float:
        """Wait for /readyz to say ok; gives the seconds since the process was started."""
        return self.wait_until(self._is_ready, _POLL)

    def port_of(self, what: str) -> int:
        """0 as long as it does not listen."""
        listening = (line for line in self._lines() if line.event == "listening")
        return next((line.port for line in listening if line.what == what), 0)

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
        for line in self.log.read_bytes().splitlines():
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
        return next(line.reservations for line in self._lines() if line.event == "Ledger loaded")


class AgentProcess(Child):
    """A running agent."""

    def __init__(self, log: Path, arguments: list[str], objects: Path) -> None:
        super().__init__("agent", log, arguments)
        self.objects = objects
        """The directory of its cluster's objects."""


def _environment() -> dict[str, str]:
    """Without the person's own settings, which are meant for another broker."""
    return {name: text for name, text in os.environ.items() if not name.startswith(flags.PREFIX)}
