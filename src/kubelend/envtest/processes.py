"""Temporary deployments of brokers and agents as child processes, with their own CA, certificates and store.

The demo, the benchmarks, the lab and the tests use them. The processes are started with the `kubelend`
command; only certificates and ports are specific to the deployment.
"""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import ClassVar, TypeVar

import msgspec

from kubelend.apps import flags
from kubelend.core.errors import Unavailable
from kubelend.core.lifecycle import Role
from kubelend.kits import clock, tasks
from kubelend.pki import files, identity
from kubelend.pki.authority import Authority

READY_TIMEOUT = 60.0
_STOP_TIMEOUT = 30.0


class SupervisedProcess:
    """A running process whose stderr is written to a file."""

    error_lines: ClassVar[int] = 5
    """Number of last log lines that an error message contains."""

    def __init__(
        self, name: str, log: Path, command: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        """`name` is used in error messages."""
        self.name = name
        self.log = log
        self.started_at = time.perf_counter()
        with log.open("wb") as stream:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stream,
                env=environment,
                # Its own process group: Ctrl-C reaches only us, and we stop it gracefully.
                process_group=0,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def wait_until(self, is_ready: Callable[[], bool], poll: float) -> float:
        """Polls every `poll` seconds; returns the seconds since the process was started."""
        while not is_ready():
            waited = time.perf_counter() - self.started_at
            if not self.is_running or waited > READY_TIMEOUT:
                raise Unavailable(f"the {self.name} did not start", hint=self.log_tail())
            time.sleep(poll)
        return time.perf_counter() - self.started_at

    def pause(self) -> None:
        """Suspends the process: it keeps its connections and does not respond."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def terminate(self) -> None:
        """Sends SIGTERM without waiting."""
        if self.is_running:
            self._process.terminate()
            # A suspended process would not handle the signal.
            self.resume()

    def stop(self, timeout: float = _STOP_TIMEOUT) -> int:
        """Terminates the process, by force after `timeout` seconds; returns its exit code. Idempotent."""
        self.terminate()
        try:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout)
        finally:
            if self.is_running:
                self._process.kill()
        return self._process.wait()

    def kill(self) -> None:
        """Ends the process with SIGKILL."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def log_tail(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return "\n".join(lines[-self.error_lines :]) or "its log is empty"


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


ChildT = TypeVar("ChildT", bound=ChildProcess)

_CERTIFICATE_LIFETIME = timedelta(days=1)


class TemporaryDeployment:
    """A directory with a CA, the broker's certificate and its store."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.store = directory / "kubelend.db"
        self.log = directory / "broker.log"
        self.authority = Authority.create(
            "kubelend-trial", _CERTIFICATE_LIFETIME, now=clock.utc_now()
        )
        self._broker_certificate = directory / "broker"
        issued = self.authority.issue(
            identity.server_profile(), _CERTIFICATE_LIFETIME, now=clock.utc_now()
        )
        files.save_credentials(self._broker_certificate, issued)

    def certificate(self, name: str, role: Role = Role.CLUSTER) -> Path:
        """Issues a certificate unless it exists; returns its directory."""
        directory = self.directory / "certs" / name
        if directory.exists():
            return directory
        issued = self.authority.issue(
            identity.client_profile(name, role), _CERTIFICATE_LIFETIME, now=clock.utc_now()
        )
        files.save_credentials(directory, issued)
        return directory

    def broker(self, *arguments: str) -> AbstractContextManager[BrokerProcess]:
        """Starts the broker with additional flags; stops it at exit."""
        return _stopping_at_exit(
            lambda: BrokerProcess(self.log, [*self._broker_flags(), *arguments])
        )

    def agent(
        self, name: str, broker: BrokerProcess, simulation: Path, *arguments: str
    ) -> AbstractContextManager[AgentProcess]:
        """Starts the agent of a simulated cluster. Its objects stay for the next agent of this name."""
        objects = self.directory / "objects" / name
        objects.mkdir(parents=True, exist_ok=True)
        needed = [
            f"--broker-url={broker.url}",
            f"--broker-cert-path={self.certificate(name)}",
            "--source=simulated",
            f"--simulation={simulation}",
            f"--objects-dir={objects}",
            "--health-probe-bind-address=127.0.0.1:0",
            "--metrics-bind-address=0",
        ]
        log = self.directory / f"agent-{name}.log"
        return _stopping_at_exit(lambda: AgentProcess(log, [*needed, *arguments], objects))

    def _broker_flags(self) -> list[str]:
        return [
            "--http-host=127.0.0.1",
            "--http-port=0",
            f"--http-cert-path={self._broker_certificate}",
            "--health-probe-bind-address=127.0.0.1:0",
            "--metrics-bind-address=0",
            f"--store={self.store}",
        ]


@contextmanager
def temporary_deployment() -> Iterator[TemporaryDeployment]:
    """Creates a deployment in a temporary directory, which is removed at exit, also after a signal."""
    with (
        tasks.signals_as_interrupt(),
        tempfile.TemporaryDirectory(prefix="kubelend-") as directory,
    ):
        yield TemporaryDeployment(Path(directory))


@contextmanager
def _stopping_at_exit(start: Callable[[], ChildT]) -> Iterator[ChildT]:
    process: ChildT | None = None
    try:
        # Ctrl-C between start and assignment would leave the process running.
        with tasks.defer_signals():
            process = start()
        yield process
    finally:
        if process is not None:
            process.stop()
