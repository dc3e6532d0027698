"""Temporary deployments of brokers and agents as child processes, with their own CA, certificates and store.

The demo, the benchmarks, the lab and the tests use them. The processes are started with the `kubelend`
command; only certificates and ports are specific to the deployment.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

from kubelend.apps import interrupts
from kubelend.apps.children import AgentProcess, BrokerProcess, ChildProcess
from kubelend.core.roles import Role
from kubelend.kits import clock
from kubelend.pki import files, profiles
from kubelend.pki.authority import Authority

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
            profiles.server_profile(), _CERTIFICATE_LIFETIME, now=clock.utc_now()
        )
        files.save_credentials(self._broker_certificate, issued)

    def certificate(self, name: str, role: Role = Role.CLUSTER) -> Path:
        """Issues a certificate unless it exists; returns its directory."""
        directory = self.directory / "certs" / name
        if directory.exists():
            return directory
        issued = self.authority.issue(
            profiles.client_profile(name, role), _CERTIFICATE_LIFETIME, now=clock.utc_now()
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
        """Starts the agent of a simulated cluster. Its objects are kept for the next agent of this name."""
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
        interrupts.signals_as_interrupt(),
        tempfile.TemporaryDirectory(prefix="kubelend-") as directory,
    ):
        yield TemporaryDeployment(Path(directory))


@contextmanager
def _stopping_at_exit(start: Callable[[], ChildT]) -> Iterator[ChildT]:
    process: ChildT | None = None
    try:
        # Ctrl-C between start and assignment would leave the process running.
        with interrupts.defer_signals():
            process = start()
        yield process
    finally:
        if process is not None:
            process.stop()
