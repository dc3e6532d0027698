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
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from msgspec.structs import replace

from kubelend.apps import interrupts
from kubelend.core.errors import KubelendError
from kubelend.kits import logs
from kubelend.lab import accounts, fleet, furnishing, hosts, inhabitants, messages, rights
from kubelend.lab.fleet import LabProcesses
from kubelend.lab.furnishing import InstalledCluster, InstallPlan
from kubelend.lab.hosts import LabClusters
from kubelend.lab.messages import LabReady, Message, StartFailed, StepFinished, StepStarted
from kubelend.lab.records import LabDirectory, LabState
from kubelend.wire import crds, objects

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
    with interrupts.signals_as_interrupt():
        try:
            supervisor.run()
        except KeyboardInterrupt:
            return 0
        except KubelendError as error:
            supervisor.fail(error)
            return 1
        except BrokenPipeError:
            # The process that started us is gone, so nobody would know that anything runs.
            return 1
    return 0


class Supervisor:
    """Starts everything, and keeps the state file up to date."""

    def __init__(self, home: LabDirectory, *, uses_kind: bool) -> None:
        self._directory = home
        self._uses_kind = uses_kind
        self._state = LabState(os.getpid())
        self._lines: list[str] = []

    def run(self) -> None:
        """Runs until a signal or an error."""
        self._save_state()
        with self._run_clusters() as found, fleet.open_processes(self._directory) as running:
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
        accounts.merge_kubeconfigs(found.kubeconfigs, self._directory.kubeconfig)
        clusters = {}
        for name, path in found.kubeconfigs.items():
            clusters[name] = str(self._directory.kubeconfig_of(name))
            accounts.merge_kubeconfigs({name: path}, self._directory.kubeconfig_of(name))
        self._save_state(clusters=clusters, kubectl=found.kubectl)
        self._lines += clusters.values()

    def _set_up(self, found: LabClusters, running: LabProcesses) -> None:
        with self._step("Install CRDs, RBAC, service accounts, nodes and pods"):
            furnished = asyncio.run(_install_all(found))
            version = str(furnished[hosts.BROKER_CLUSTER].version)
            self._lines += [f"Kubernetes {version}"]
        with self._step("Start the broker, with its store in broker-cluster"):
            running.make_certificates()
            account = furnished[hosts.BROKER_CLUSTER].account
            url = running.start_broker(account)
            self._save_state(kubernetes=version, broker=url, store=fleet.store_url(account))
            self._lines += [url]
        with self._step("Enrol both agents with tokens"):
            for name in hosts.AGENT_CLUSTERS:
                asyncio.run(running.join(name))
        with self._step("Start both agents and wait for their advertisements"):
            running.start_agents({name: furnished[name].account for name in hosts.AGENT_CLUSTERS})
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
            furnishing.install_cluster(path, _install_plan(name, are_real=found.has_real_nodes))
            for name, path in found.kubeconfigs.items()
        )
    )
    return dict(zip(found.kubeconfigs, made, strict=True))


def _install_plan(name: str, *, are_real: bool) -> InstallPlan:
    if name == hosts.BROKER_CLUSTER:
        return InstallPlan(rights.BROKER_ACCOUNT, rights.BROKER_ROLES, crds.ALL_KINDS)
    population = None if are_real else inhabitants.CLUSTER_FIXTURES[name]
    return InstallPlan(rights.AGENT_ACCOUNT, rights.AGENT_ROLES, objects.KINDS, population)


def _send_message(message: Message) -> None:
    sys.stdout.buffer.write(messages.encode_message(message))
    sys.stdout.buffer.flush()


def _close_output() -> None:
    """Closes the pipe, whose reader waits for its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


if __name__ == "__main__":
    sys.exit(main())
