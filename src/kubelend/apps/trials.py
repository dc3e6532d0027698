"""A broker to try things on: its own process, a throw-away authority and store, all gone at the end.

The demo and the benchmarks run on one. It is started as anybody would start it, by the command, so that
what they show and measure is the real thing; only the certificates and the ports are made for it.
"""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType

import msgspec

from kubelend.apps import flags
from kubelend.core.errors import BrokerUnreachable
from kubelend.core.roles import Role
from kubelend.kits import clock
from kubelend.pki import files, profiles
from kubelend.pki.authority import Authority

_LIFETIME = timedelta(days=1)
_READY_WITHIN = 60.0
_STOPPED_WITHIN = 30.0
_POLL = 0.002


class Trial:
    """A directory with an authority, the broker's certificate and the place of its store."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.store = directory / "kubelend.db"
        self.log = directory / "broker.log"
        self.authority = Authority.create("kubelend-trial", _LIFETIME, now=clock.utc_now())
        self._broker_certificate = directory / "broker"
        issued = self.authority.issue(profiles.server(), _LIFETIME, now=clock.utc_now())
        files.save_credentials(self._broker_certificate, issued)

    def certificate(self, name: str, role: Role = Role.CLUSTER) -> Path:
        """Issue one; gives the directory that holds it."""
        directory = self.directory / "certs" / name
        issued = self.authority.issue(profiles.client(name, role), _LIFETIME, now=clock.utc_now())
        files.save_credentials(directory, issued)
        return directory

    @contextmanager
    def broker(self, *arguments: str) -> Iterator[BrokerProcess]:
        """Start the broker, with these flags beside the needed ones; stop it at the end."""
        process: BrokerProcess | None = None
        try:
            # A Ctrl-C between the start and the assignment would leave it running.
            with _signals_put_off():
                process = BrokerProcess(self.log, [*self._arguments(), *arguments])
            yield process
        finally:
            if process is not None:
                process.stop()

    def _arguments(self) -> list[str]:
        return [
            "--http-host=127.0.0.1",
            "--http-port=0",
            f"--http-cert-path={self._broker_certificate}",
            "--health-probe-bind-address=127.0.0.1:0",
            "--metrics-bind-address=0",
            f"--store={self.store}",
        ]


@contextmanager
def trial() -> Iterator[Trial]:
    """A trial in a directory of its own, which is removed however this ends, short of a kill -9."""
    with _ended_like_ctrl_c(), tempfile.TemporaryDirectory(prefix="kubelend-") as directory:
        yield Trial(Path(directory))


class _Line(msgspec.Struct, frozen=True):
    """What is read of a line of the broker's log."""

    event: str = ""
    what: str = ""
    port: int = 0
    reservations: int = 0


class BrokerProcess:
    """A running broker. Its ports are free ones, and its log says which."""

    def __init__(self, log: Path, arguments: list[str]) -> None:
        self._log = log
        self.started_at = time.perf_counter()
        with log.open("wb") as stream:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "kubelend", "broker", *arguments],
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
    def port(self) -> int:
        """Of the REST interface."""
        return self._port("api")

    @property
    def url(self) -> str:
        return f"https://localhost:{self.port}"

    def wait_until_ready(self) -> float:
        """Wait for /readyz to say ok; gives the seconds since the process was started."""
        while not self._is_ready():
            waited = time.perf_counter() - self.started_at
            if self._process.poll() is not None or waited > _READY_WITHIN:
                raise BrokerUnreachable("the broker did not start", hint=self._last_words())
            time.sleep(_POLL)
        return time.perf_counter() - self.started_at

    def loaded(self) -> int:
        """How many reservations it found in its store."""
        return next(line.reservations for line in self._lines() if line.event == "ready")

    def stop(self) -> int:
        """Let it finish, and wait for that; gives its exit code. Stopping again does nothing."""
        if self._process.poll() is None:
            self._process.terminate()
        try:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOPPED_WITHIN)
        finally:
            if self._process.poll() is None:
                self._process.kill()
        return self._process.wait()

    def _is_ready(self) -> bool:
        port = self._port("probes")
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

    def _port(self, what: str) -> int:
        """0 as long as it does not listen."""
        listening = (line for line in self._lines() if line.event == "listening")
        return next((line.port for line in listening if line.what == what), 0)

    def _lines(self) -> Iterator[_Line]:
        for line in self._log.read_bytes().splitlines():
            # The last may be half written, and a crash writes lines that are no JSON.
            with suppress(msgspec.MsgspecError):
                yield msgspec.json.decode(line, type=_Line)

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        return lines[-1] if lines else "it said nothing"


def _environment() -> dict[str, str]:
    """Without the person's own settings, which are meant for another broker."""
    return {name: text for name, text in os.environ.items() if not name.startswith(flags.PREFIX)}


@contextmanager
def _ended_like_ctrl_c() -> Iterator[None]:
    """Python dies of these two on the spot, and would leave process and directory behind."""
    with _handling((signal.SIGTERM, signal.SIGHUP), lambda *_: signal.raise_signal(signal.SIGINT)):
        yield


@contextmanager
def _signals_put_off() -> Iterator[None]:
    """What comes in between has its effect afterwards."""
    come: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    with _handling(numbers, lambda number, _: come.append(number)):
        yield
    for number in come:
        signal.raise_signal(number)


@contextmanager
def _handling(
    numbers: Sequence[signal.Signals], handler: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    before = [signal.signal(number, handler) for number in numbers]
    try:
        yield
    finally:
        for number, previous in zip(numbers, before, strict=True):
            signal.signal(number, previous)
