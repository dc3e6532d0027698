"""Processes for tests, benchmarks, the lab and the demo: servers of any kind, brokers and agents.

A `TemporaryDeployment` has its own CA, certificates and store. Its processes are started with the `kubelend`
command; only certificates and ports are specific to the deployment.
"""

from __future__ import annotations

import http.client
import os
import signal
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import ClassVar, NamedTuple, TypeVar

import msgspec

from kubelend.apps import flags
from kubelend.core.errors import Unavailable
from kubelend.core.lifecycle import Role
from kubelend.envtest import waiting
from kubelend.kits import clock, tasks
from kubelend.pki import files, identity
from kubelend.pki.authority import Authority

_READY_TIMEOUT = 60.0


class SupervisedProcess(ABC):
    """A process whose stderr is written to a file. It can be started again after it has ended."""

    error_lines: ClassVar[int] = 5
    """Number of last log lines that an error message contains."""
    poll_seconds: ClassVar[float] = 0.02
    """Seconds between two readiness checks: the maximum error of a measured start time. Each check costs
    the process CPU time while it is being measured."""
    stop_timeout: ClassVar[float] = 30.0
    """Seconds after which a process that does not stop is killed."""
    process_group: ClassVar[int] = 0
    """Process group of new processes; 0 for one of their own, so that Ctrl-C reaches only us, and we stop
    them gracefully."""

    def __init__(self, title: str, log: Path) -> None:
        """`title` is used in error messages."""
        self.title = title
        self.log = log
        self.started_at = 0.0
        self._process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def _command(self) -> list[str]: ...

    @abstractmethod
    def _is_ready(self) -> bool: ...

    def _environment(self) -> Mapping[str, str]:
        return os.environ

    def start(self) -> None:
        """Starts the process without waiting, so that several can start in parallel."""
        # A signal between start and assignment would leave the process running.
        with tasks.defer_signals(), self.log.open("wb") as stream:
            self.started_at = time.perf_counter()
            self._process = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stream,
                env=self._environment(),
                process_group=self.process_group,
            )

    def wait_until_ready(self) -> float:
        """Returns the seconds since the process was started."""
        while not self._is_ready():
            waited = time.perf_counter() - self.started_at
            if not self.is_running:
                raise Unavailable(f"the {self.title} did not start", hint=self.log_tail())
            if waited > _READY_TIMEOUT * waiting.FACTOR:
                raise Unavailable(
                    f"the {self.title} was not ready within {waited:.0f} s", hint=self.log_tail()
                )
            time.sleep(self.poll_seconds)
        return time.perf_counter() - self.started_at

    def restart(self) -> None:
        """Stops and starts the process, with the same data and address."""
        self.stop()
        self.start()
        self.wait_until_ready()

    @property
    def pid(self) -> int:
        """PID of the process, or 0 if it was never started."""
        return 0 if self._process is None else self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def pause(self) -> None:
        """Suspends the process: connections stay open, and calls block until `resume`."""
        self._send(signal.SIGSTOP)

    def resume(self) -> None:
        self._send(signal.SIGCONT)

    def stop(self) -> int:
        """Stops the process, by force after the timeout; returns its exit code. Idempotent."""
        if self._process is None:
            return 0
        self._send(signal.SIGTERM)
        # A suspended process would not handle the signal.
        self.resume()
        try:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(self.stop_timeout * waiting.FACTOR)
        finally:
            self.kill()
        return self._process.returncode

    def kill(self) -> None:
        """Ends the process with SIGKILL, if it runs."""
        self._send(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    def log_tail(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return "\n".join(lines[-self.error_lines :]) or "its log is empty"

    def _send(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)


class HttpResponse(NamedTuple):
    """Status and body of a response; status 0 if the connection failed."""

    status: int
    body: bytes


class LocalConnection:
    """For several threads. It stays open: a TLS handshake costs both sides more than most calls."""

    def __init__(
        self, port: int, context: ssl.SSLContext | None = None, timeout: float = 10.0
    ) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
        if context is not None:
            self._connection = http.client.HTTPSConnection(
                "127.0.0.1", port, timeout=timeout, context=context
            )
        self._lock = threading.Lock()

    def request(self, method: str, path: str, body: bytes | None = None) -> HttpResponse:
        form = {"Content-Type": f"application/{'merge-patch+' if method == 'PATCH' else ''}json"}
        with self._lock:
            is_new = self._connection.sock is None
            try:
                self._connection.request(method, path, body, form)
                answer = self._connection.getresponse()
                return HttpResponse(answer.status, answer.read())
            except (OSError, http.client.HTTPException) as error:
                self._connection.close()
                if is_new or isinstance(error, TimeoutError):
                    return HttpResponse(0, str(error).encode())
        # The server has closed it since the last call.
        return self.request(method, path, body)

    def close(self) -> None:
        with self._lock:
            self._connection.close()


def call_http(port: int, path: str, *, timeout: float = 10.0) -> HttpResponse:
    """Calls a server on localhost once, without TLS."""
    with closing(LocalConnection(port, timeout=timeout)) as connection:
        return connection.request("GET", path)


class _LogLine(msgspec.Struct, frozen=True):
    """The fields of a log line that are used here."""

    event: str = ""
    component: str = ""
    port: int = 0
    reservations: int = 0


class ChildProcess(SupervisedProcess):
    """A `kubelend` process."""

    error_lines = 1  # its last line contains the whole error

    def __init__(self, command: str, log: Path, arguments: list[str]) -> None:
        super().__init__(command, log)
        self._arguments = arguments

    def port_of(self, component: str) -> int:
        """Returns the port of a listener, or 0 while it is not open."""
        listening = (line for line in self._log_lines() if line.event == "Listening")
        return next((line.port for line in listening if line.component == component), 0)

    def _command(self) -> list[str]:
        return [sys.executable, "-P", "-m", "kubelend", self.title, *self._arguments]

    def _environment(self) -> dict[str, str]:
        """Returns the environment without the user's KUBELEND_ variables, which are for another broker."""
        prefix = flags.VARIABLE_PREFIX
        return {name: text for name, text in os.environ.items() if not name.startswith(prefix)}

    def _is_ready(self) -> bool:
        port = self.port_of("probes")
        return port > 0 and call_http(port, "/readyz", timeout=1).status == http.HTTPStatus.OK

    def _log_lines(self) -> Iterator[_LogLine]:
        for line in self.log.read_bytes().splitlines():
            # The last line may be incomplete, and tracebacks are not JSON.
            with suppress(msgspec.MsgspecError):
                yield msgspec.json.decode(line, type=_LogLine)


_LOAD_TIMEOUT = 20.0


class BrokerProcess(ChildProcess):
    """A broker."""

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
        """Returns the number of reservations that it loaded; a broker may be ready as a follower before."""

        def loaded() -> list[int]:
            return [one.reservations for one in self._log_lines() if one.event == "Ledger loaded"]

        waiting.wait_until(loaded, "the broker did not load its store", _LOAD_TIMEOUT)
        return loaded()[0]


class AgentProcess(ChildProcess):
    """An agent."""

    def __init__(self, log: Path, arguments: list[str], objects: Path) -> None:
        super().__init__("agent", log, arguments)
        self.objects = objects
        """Directory with the objects of its cluster, if it is a simulated one."""


ChildT = TypeVar("ChildT", bound=ChildProcess)

_CERTIFICATE_LIFETIME = timedelta(days=30)
_LISTENERS = ("--health-probe-bind-address=127.0.0.1:0", "--metrics-bind-address=0")


class TemporaryDeployment:
    """A directory with a CA, the broker's certificate and its store."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.store = directory / "kubelend.db"
        self.authority = Authority.create(
            "kubelend-trial", _CERTIFICATE_LIFETIME, now=clock.utc_now()
        )
        self._broker_certificate = self._issue("broker", identity.server_profile())

    def certificate(self, name: str, role: Role = Role.CLUSTER) -> Path:
        """Issues a certificate unless it exists; returns its directory."""
        return self._issue(f"certs/{name}", identity.client_profile(name, role))

    def broker(self, *arguments: str) -> AbstractContextManager[BrokerProcess]:
        """Starts the broker with additional flags, which take precedence; stops it at exit."""
        needed = [
            "--http-host=127.0.0.1",
            "--http-port=0",
            f"--http-cert-path={self._broker_certificate}",
            f"--store={self.store}",
            *_LISTENERS,
        ]
        return _run(BrokerProcess(self.directory / "broker.log", [*needed, *arguments]))

    def agent(
        self, name: str, broker: BrokerProcess, *arguments: str
    ) -> AbstractContextManager[AgentProcess]:
        """Starts the agent of a cluster. Its objects stay for the next agent of this name."""
        objects = self.directory / "objects" / name
        needed = [
            f"--broker-url={broker.url}",
            f"--broker-cert-path={self.certificate(name)}",
            *_LISTENERS,
        ]
        log = self.directory / f"{name}.log"
        return _run(AgentProcess(log, [*needed, *arguments], objects))

    def simulated_agent(
        self, name: str, broker: BrokerProcess, simulation: str, *arguments: str
    ) -> AbstractContextManager[AgentProcess]:
        """Starts the agent of a simulated cluster, described in YAML or JSON."""
        objects, path = self.directory / "objects" / name, self.directory / f"{name}.yaml"
        objects.mkdir(parents=True, exist_ok=True)
        path.write_text(simulation, "utf-8")
        source = ("--source=simulated", f"--simulation={path}", f"--objects-dir={objects}")
        return self.agent(name, broker, *source, *arguments)

    def _issue(self, name: str, profile: identity.Profile) -> Path:
        directory = self.directory / name
        if not directory.exists():
            issued = self.authority.issue(profile, _CERTIFICATE_LIFETIME, now=clock.utc_now())
            files.save_credentials(directory, issued)
        return directory


@contextmanager
def temporary_deployment() -> Iterator[TemporaryDeployment]:
    """Creates a deployment in a temporary directory, which is removed at exit, also after a signal."""
    with (
        tasks.signals_as_interrupt(),
        tempfile.TemporaryDirectory(prefix="kubelend-") as directory,
    ):
        yield TemporaryDeployment(Path(directory))


@contextmanager
def _run(process: ChildT) -> Iterator[ChildT]:
    try:
        process.start()
        yield process
    finally:
        process.stop()
