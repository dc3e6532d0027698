"""The background process of the lab: starts clusters, broker and agents, and stops them on SIGTERM.

Started as `python -m kubelend.lab.supervisor DIRECTORY LOCK [--kind]` in its own session, with DIRECTORY as
working directory. It writes progress messages to stdout (`lab.state`); if the reader is gone, it stops
everything.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path

from msgspec.structs import replace

from kubelend.apps import join
from kubelend.apps.join import JoinParameters
from kubelend.core.errors import KubelendError, Unavailable
from kubelend.core.lifecycle import Role
from kubelend.envtest import credentials
from kubelend.envtest.processes import BrokerProcess, ChildProcess
from kubelend.kits import clock, logs, tasks
from kubelend.lab import hosts, setup, state
from kubelend.lab.hosts import LabClusters
from kubelend.lab.setup import InstalledCluster, InstallPlan
from kubelend.lab.state import (
    LabDirectory,
    LabProcess,
    LabReady,
    LabState,
    Message,
    StartFailed,
    StepFinished,
    StepStarted,
)
from kubelend.pki import files, identity, tokens
from kubelend.pki.authority import Authority
from kubelend.transports.client import BrokerClient
from kubelend.wire import crds, objects
from kubelend.wire.admin_bodies import TokenRequest

EXAMPLE_REQUEST = """\
apiVersion: rear.fluidos.eu/v1alpha1
kind: ResourceRequest
metadata: {name: small}
spec: {requestedCPU: 500m, requestedMemory: 256Mi, duration: 1h}
"""


def main() -> int:
    """Returns the exit code: 0 if the start succeeded or was interrupted."""
    directory, lock, *flags = sys.argv[1:]
    # Child processes must not hold the lock.
    os.set_inheritable(int(lock), False)
    logs.setup("warning")
    supervisor = Supervisor(LabDirectory(Path(directory)), uses_kind="--kind" in flags)
    with tasks.signals_as_interrupt():
        try:
            supervisor.run()
        except KeyboardInterrupt:
            return 0
        except KubelendError as error:
            supervisor.fail(error)
            return 1
        except BrokenPipeError:
            # The process that started us is gone, so the processes would run unnoticed.
            return 1
    return 0


class Supervisor:
    """Starts everything, and updates the state file."""

    def __init__(self, home: LabDirectory, *, uses_kind: bool) -> None:
        self._directory = home
        self._uses_kind = uses_kind
        self._state = LabState(os.getpid())
        self._lines: list[str] = []

    def run(self) -> None:
        """Runs until a signal or an error."""
        self._save_state()
        with self._run_clusters() as found, open_processes(self._directory) as running:
            self._set_up(found, running)
            self._save_state(is_ready=True, processes=running.processes())
            _send_message(LabReady())
            _close_output()
            while True:
                signal.pause()

    def fail(self, error: KubelendError) -> None:
        sys.stderr.write(f"{error}\n")
        with contextlib.suppress(OSError):
            _send_message(StartFailed(error.code, str(error)))

    @contextmanager
    def _run_clusters(self) -> Iterator[LabClusters]:
        made: AbstractContextManager[LabClusters] = (
            hosts.run_kind_clusters(self._directory, lambda names: self._save_state(kind=names))
            if self._uses_kind
            else hosts.run_local_clusters(self._directory)
        )
        with contextlib.ExitStack() as stack:
            with self._step("Start three clusters"):
                found = stack.enter_context(made)
                self._write_kubeconfigs(found)
            yield found

    def _write_kubeconfigs(self, found: LabClusters) -> None:
        """Writes one kubeconfig per cluster, and one with all contexts."""
        credentials.merge_kubeconfigs(found.kubeconfigs, self._directory.kubeconfig)
        clusters = {}
        for name, path in found.kubeconfigs.items():
            clusters[name] = str(self._directory.kubeconfig_of(name))
            credentials.merge_kubeconfigs({name: path}, self._directory.kubeconfig_of(name))
        self._save_state(clusters=clusters, kubectl=found.kubectl)
        self._lines += clusters.values()

    def _set_up(self, found: LabClusters, running: LabProcesses) -> None:
        with self._step("Install CRDs, RBAC, service accounts, nodes and pods"):
            installed = asyncio.run(_install_all(found))
            version = str(installed[hosts.BROKER_CLUSTER].version)
            self._lines += [f"Kubernetes {version}"]
        with self._step("Start the broker, with its store in broker-cluster"):
            running.make_certificates()
            account = installed[hosts.BROKER_CLUSTER].account
            url = running.start_broker(account)
            self._save_state(kubernetes=version, broker=url, store=store_url(account))
            self._lines += [url]
        with self._step("Enrol both agents with tokens"):
            for name in hosts.AGENT_CLUSTERS:
                asyncio.run(running.join(name))
        with self._step("Start both agents and wait for their advertisements"):
            running.start_agents({name: installed[name].account for name in hosts.AGENT_CLUSTERS})
            asyncio.run(running.wait_advertised())
        self._directory.request.write_text(EXAMPLE_REQUEST, "utf-8")

    @contextmanager
    def _step(self, title: str) -> Iterator[None]:
        _send_message(StepStarted(title))
        began, self._lines = time.perf_counter(), []
        yield
        _send_message(StepFinished(title, time.perf_counter() - began, tuple(self._lines)))

    def _save_state(self, **known: object) -> None:
        self._state = replace(self._state, **known)
        self._directory.write_state(self._state)


async def _install_all(found: LabClusters) -> dict[str, InstalledCluster]:
    """Installs in all clusters in parallel."""
    made = await asyncio.gather(
        *(
            setup.install_cluster(path, _install_plan(name, are_real=found.has_real_nodes))
            for name, path in found.kubeconfigs.items()
        )
    )
    return dict(zip(found.kubeconfigs, made, strict=True))


def _install_plan(name: str, *, are_real: bool) -> InstallPlan:
    if name == hosts.BROKER_CLUSTER:
        return InstallPlan(setup.BROKER_ACCOUNT, setup.BROKER_ROLES, crds.ALL_KINDS)
    population = None if are_real else setup.CLUSTER_FIXTURES[name]
    return InstallPlan(setup.AGENT_ACCOUNT, setup.AGENT_ROLES, objects.KINDS, population)


def _send_message(message: Message) -> None:
    sys.stdout.buffer.write(state.encode_message(message))
    sys.stdout.buffer.flush()


def _close_output() -> None:
    """Closes the pipe, whose reader waits for its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


ADMIN_NAME = "admin"

_CERTIFICATE_LIFETIME = timedelta(days=30)
_JOIN_TIMEOUT = timedelta(seconds=30)
_STOP_TIMEOUT = 10.0
_ADVERTISE_TIMEOUT = 60.0
_POLL = 0.1


class LabProcesses:
    """The running processes. Use `open_processes`, which also stops them."""

    def __init__(self, home: LabDirectory) -> None:
        self._directory = home
        self._agents: dict[str, ChildProcess] = {}
        self._broker: BrokerProcess | None = None

    @property
    def broker(self) -> BrokerProcess:
        if self._broker is None:
            raise Unavailable("the broker has not been started")
        return self._broker

    def make_certificates(self) -> None:
        """Creates a CA, and the certificates of the broker and of an administrator."""
        now = clock.utc_now()
        authority = Authority.create("kubelend-lab", _CERTIFICATE_LIFETIME, now=now)
        authority.save(self._directory.authority)
        for name, profile in (
            ("broker", identity.server_profile()),
            (ADMIN_NAME, identity.client_profile(ADMIN_NAME, Role.ADMIN)),
        ):
            issued = authority.issue(profile, _CERTIFICATE_LIFETIME, now=now)
            files.save_credentials(self._directory.certificate(name), issued)

    def start_broker(self, account: Path) -> str:
        """Starts the broker with its store in the account's cluster; returns its URL when it is ready."""
        log = self._directory.directory / "broker.log"
        with tasks.defer_signals():
            self._broker = BrokerProcess(log, self._broker_arguments(account))
        self.broker.wait_until_ready()
        return self.broker.url

    async def join(self, name: str) -> None:
        """Enrols a cluster as `kubelend create token` and `kubelend join` do."""
        home = self._directory
        async with BrokerClient(self.broker.url, home.certificate(ADMIN_NAME)) as admin:
            made = await admin.tokens.create(TokenRequest(name=name))
        invitation = JoinParameters(
            f"https://localhost:{made.enrol_port}",
            made.token,
            tokens.parse_ca_pin(made.ca_hash),
            name,
        )
        await join.join_broker(invitation, home.certificate(name), wait=_JOIN_TIMEOUT)

    def start_agents(self, accounts: Mapping[str, Path]) -> None:
        """Starts one agent per cluster and waits until all are ready."""
        for name, account in accounts.items():
            log = self._directory.directory / f"{name}.log"
            with tasks.defer_signals():
                self._agents[name] = ChildProcess(
                    "agent", log, self._agent_arguments(name, account)
                )
        for agent in self._agents.values():
            agent.wait_until_ready()

    async def wait_advertised(self) -> None:
        """Waits until all clusters are active at the broker."""
        async with BrokerClient(self.broker.url, self._directory.certificate(ADMIN_NAME)) as admin:
            try:
                async with asyncio.timeout(_ADVERTISE_TIMEOUT):
                    while not await self._all_active(admin):  # noqa: ASYNC110 - another process
                        await asyncio.sleep(_POLL)
            except TimeoutError:
                raise Unavailable(
                    f"the agents have not advertised within {_ADVERTISE_TIMEOUT:g} s"
                ) from None

    def processes(self) -> tuple[LabProcess, ...]:
        """Returns the processes for the state file."""
        agents = ((f"agent of {name}", child) for name, child in self._agents.items())
        return tuple(
            LabProcess(name, child.pid, str(child.log), child.port_of("probes"))
            for name, child in (("broker", self.broker), *agents)
        )

    def stop(self) -> None:
        """Stops the agents first, so that they can close their sessions at the broker."""
        for agent in self._agents.values():
            agent.terminate()
        for agent in self._agents.values():
            agent.stop(_STOP_TIMEOUT)
        if self._broker is not None:
            self._broker.stop(_STOP_TIMEOUT)

    async def _all_active(self, admin: BrokerClient) -> bool:
        found = await admin.all_clusters()
        return {one.advertisement.cluster_id for one in found if one.status.active} >= set(
            self._agents
        )

    def _broker_arguments(self, account: Path) -> list[str]:
        return [
            "--http-host=127.0.0.1",
            "--http-port=0",
            f"--http-cert-path={self._directory.certificate('broker')}",
            f"--http-namespace={setup.OBJECT_NAMESPACE}",
            f"--ca-path={self._directory.authority}",
            "--enrol-port=0",
            "--broker-interface=http,kubernetes",
            f"--store={store_url(account)}",
            "--health-probe-bind-address=127.0.0.1:0",
            "--metrics-bind-address=0",
            "--shutdown-timeout=5s",
        ]

    def _agent_arguments(self, name: str, account: Path) -> list[str]:
        return [
            f"--broker-url={self.broker.url}",
            f"--broker-cert-path={self._directory.certificate(name)}",
            "--source=kubernetes",
            f"--kubeconfig={account}",
            f"--instruction-namespace={setup.OBJECT_NAMESPACE}",
            "--health-probe-bind-address=127.0.0.1:0",
            "--metrics-bind-address=0",
        ]


@contextmanager
def open_processes(home: LabDirectory) -> Iterator[LabProcesses]:
    """Stops all processes at exit."""
    fleet = LabProcesses(home)
    try:
        yield fleet
    finally:
        # Ctrl-C in here would leave processes running.
        with tasks.defer_signals():
            fleet.stop()


def store_url(account: Path) -> str:
    """Returns the value of `--store`."""
    return f"kubernetes://{account}"


if __name__ == "__main__":
    sys.exit(main())
