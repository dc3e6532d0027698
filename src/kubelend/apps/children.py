"""Broker and agent child processes, started with the `kubelend` command.

They listen on free ports, which are read from their logs.
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
from kubelend.apps.programs import SupervisedProcess

_READY_POLL = 0.02
"""Seconds between two readiness probes: the maximum error of a measured start time. Each probe costs the
process CPU time while it is being measured."""


class _LogLine(msgspec.Struct, frozen=True):
    """The fields of a log line that are used here."""

    event: str = ""
    component: str = ""
    port: int = 0
    reservations: int = 0


class ChildProcess(SupervisedProcess):
    """A running `kubelend` process."""

    error_lines = 1  # its last line contains the whole error

    def __init__(self, command: str, log: Path, arguments: list[str]) -> None:
        program = [sys.executable, "-P", "-m", "kubelend", command, *arguments]
        super().__init__(command, log, program, _without_settings())

    def wait_until_ready(self) -> float:
        """Waits until /readyz is ok; returns the seconds since the process was started."""
        return self.wait_until(self._is_ready, _READY_POLL)

    def port_of(self, component: str) -> int:
        """Returns the port of a listener, or 0 while it is not open."""
        listening = (line for line in self._log_lines() if line.event == "Listening")
        return next((line.port for line in listening if line.component == component), 0)

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

    def _log_lines(self) -> Iterator[_LogLine]:
        for line in self.log.read_bytes().splitlines():
            # The last line may be incomplete, and tracebacks are not JSON.
            with suppress(msgspec.MsgspecError):
                yield msgspec.json.decode(line, type=_LogLine)


class BrokerProcess(ChildProcess):
    """A running broker."""

    def __init__(self, log: Path, arguments: list[str]) -> None:
        super().__init__("broker", log, arguments)

    @property
    def port(self) -> int:
        """The port of the REST interface."""
        return self.port_of("api")

    @property
    def url(self) -> str:
        return f"https://localhost:{self.port}"

    def loaded_reservations(self) -> int:
        """Returns the number of reservations that it loaded from its store."""
        return next(
            line.reservations for line in self._log_lines() if line.event == "Ledger loaded"
        )


class AgentProcess(ChildProcess):
    """A running agent."""

    def __init__(self, log: Path, arguments: list[str], objects: Path) -> None:
        super().__init__("agent", log, arguments)
        self.objects = objects
        """Directory with the objects of its cluster."""


def _without_settings() -> dict[str, str]:
    """Returns the environment without the user's KUBELEND_ variables, which are for another broker."""
    return {
        name: text
        for name, text in os.environ.items()
        if not name.startswith(flags.VARIABLE_PREFIX)
    }
