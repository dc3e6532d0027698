"""The background process of the lab: starts clusters, broker and agents, and stops them on SIGTERM.

`lab.background` starts it as `python -m kubelend.lab.supervisor DIRECTORY [--kind|--liqo] [--third-agent]`,
as the leader of a process group, with DIRECTORY as working directory. It prints each step when it has
finished, then a line `ready`. If nobody reads that, it stops everything.

With Liqo everything runs in a network namespace, from which only the ports of the API servers, the broker
and the probes are forwarded: some of Liqo's programs listen on all interfaces.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

from msgspec.structs import replace

from kubelend.apps import join
from kubelend.apps.join import JoinParameters
from kubelend.core.errors import InvalidSettings, KubelendError
from kubelend.core.lifecycle import Role
from kubelend.envtest import assets, credentials, network_namespace, servers, waiting
from kubelend.envtest.assets import LiqoAssets
from kubelend.envtest.network_namespace import NetworkNamespace
from kubelend.envtest.processes import (
    BrokerProcess,
    ChildProcess,
    SupervisedProcess,
    TemporaryDeployment,
)
from kubelend.kits import logs, tables, tasks
from kubelend.lab import background, hosts, setup
from kubelend.lab.hosts import LabClusters
from kubelend.lab.setup import InstalledCluster
from kubelend.lab.state import LabDirectory, LabProcess, LabState
from kubelend.pki import tokens
from kubelend.transports.client import BrokerClient
from kubelend.wire.admin_bodies import TokenRequest

EXAMPLE_REQUEST = """\
apiVersion: rear.fluidos.eu/v1alpha1
kind: ResourceRequest
metadata: {name: small}
spec: {requestedCPU: 500m, requestedMemory: 256Mi, duration: 1h}
"""
ADMIN_NAME = "admin"

_JOIN_TIMEOUT = timedelta(seconds=30)
_ADVERTISE_TIMEOUT = 60.0


def main() -> int:
    """Returns the exit code: 0 if it was stopped by a signal."""
    directory, *flags = sys.argv[1:]
    logs.setup("warning")
    SupervisedProcess.process_group = os.getpgrp()
    with tasks.signals_as_interrupt():
        try:
            with ExitStack() as stack:
                agents = hosts.agent_clusters(has_third="--third-agent" in flags)
                home = LabDirectory(Path(directory))
                supervisor = Supervisor(home, stack, _print, agents)
                supervisor.start(uses_kind="--kind" in flags, uses_liqo="--liqo" in flags)
                _print(background.READY)
                while True:
                    signal.pause()
        except KeyboardInterrupt:
            return 0
        except BrokenPipeError:
            # `lab up` has been killed, so the processes would run unnoticed.
            return 1
        except KubelendError as error:
            sys.stderr.write(f"{error}\n")
            return background.INVALID_SETTINGS if isinstance(error, InvalidSettings) else 1


class Supervisor:
    """Starts everything, and updates the state file. `stack` stops everything."""

    def __init__(
        self,
        home: LabDirectory,
        stack: ExitStack,
        print_step: Callable[[str], None],
        agents: tuple[str, ...] = hosts.AGENT_CLUSTERS,
    ) -> None:
        self._directory = home
        self._print = print_step
        self._stack = stack
        self._agents = agents
        self._deployment = TemporaryDeployment(home.directory)
        self._state = LabState()
        self._numbers = itertools.count(1)
        self._namespace: NetworkNamespace | None = None

    def start(self, *, uses_kind: bool, uses_liqo: bool) -> None:
        liqo_assets = assets.find_liqo_assets() if uses_liqo else None
        if uses_liqo:
            self._namespace = self._stack.enter_context(network_namespace.isolate())
        with self._step("Start the clusters") as lines:
            found = self._start_clusters(uses_kind, liqo_assets)
            lines.extend(self._write_kubeconfigs(found))
            self._expose(*(cluster.port for cluster in found.local.values()))
        with self._step("Install CRDs, RBAC, service accounts, nodes and pods") as lines:
            installed = asyncio.run(_install_all(found, has_liqo=uses_liqo))
            version = str(installed[hosts.BROKER_CLUSTER].version)
            lines.append(f"Kubernetes {version}")
        if liqo_assets is not None:
            with self._step("Start Liqo in the agents' clusters") as lines:
                asyncio.run(self._start_liqo(found, liqo_assets))
                lines.append(liqo_assets.directory.name)
        with self._step("Start the broker, with its store in broker-cluster") as lines:
            store = f"kubernetes://{installed[hosts.BROKER_CLUSTER].account}"
            broker = self._start_broker(store)
            self._expose(*map(broker.port_of, ("api", "enrol", "probes")))
            self._save_state(kubernetes=version, broker=broker.url, store=store)
            lines.append(broker.url)
        with self._step("Enrol the agents with tokens"):
            asyncio.run(self._enrol_agents(broker))
        with self._step("Start the agents and wait for their advertisements"):
            hold = "placeholders" if uses_liqo else "none"
            agents = [
                self._start_agent(name, broker, installed, f"--hold={hold}")
                for name in self._agents
            ]
            for agent in agents:
                agent.wait_until_ready()
                self._expose(agent.port_of("probes"))
            asyncio.run(self._wait_advertised(broker))
        self._directory.request.write_text(EXAMPLE_REQUEST, "utf-8")
        names = ("broker", *(f"agent of {name}" for name in self._agents))
        running = map(_lab_process, names, (broker, *agents))
        self._save_state(is_ready=True, processes=tuple(running))

    def _start_clusters(self, uses_kind: bool, liqo: LiqoAssets | None) -> LabClusters:
        return self._stack.enter_context(
            hosts.run_kind_clusters(self._directory, lambda names: self._save_state(kind=names))
            if uses_kind
            else hosts.run_local_clusters(self._directory, liqo, self._agents)
        )

    async def _start_liqo(self, found: LabClusters, liqo: LiqoAssets) -> None:
        """Starts the kubelets of the agents' clusters, and Liqo as pods on them."""
        clusters = [found.local[name] for name in self._agents]
        for cluster in clusters:
            kubelet = servers.KubeletProcess(cluster, liqo)
            self._stack.callback(kubelet.stop)
            kubelet.start()
        for step in (servers.install_liqo, servers.wait_until_liqo_runs):
            await asyncio.gather(*(asyncio.to_thread(step, each, liqo) for each in clusters))

    def _expose(self, *ports: int) -> None:
        if self._namespace is not None:
            for port in ports:
                self._namespace.expose(port)

    def _write_kubeconfigs(self, found: LabClusters) -> list[str]:
        """Writes one kubeconfig per cluster, and one with all contexts; returns the paths of the former."""
        credentials.merge_kubeconfigs(found.kubeconfigs, self._directory.kubeconfig)
        clusters = {
            name: str(
                credentials.merge_kubeconfigs({name: path}, self._directory.kubeconfig_of(name))
            )
            for name, path in found.kubeconfigs.items()
        }
        self._save_state(clusters=clusters, kubectl=found.kubectl)
        return list(clusters.values())

    def _start_broker(self, store: str) -> BrokerProcess:
        authority = self._directory.directory / "ca"
        self._deployment.authority.save(authority)
        broker = self._stack.enter_context(
            self._deployment.broker(
                f"--http-namespace={setup.OBJECT_NAMESPACE}",
                f"--ca-path={authority}",
                "--enrol-port=0",
                "--broker-interface=http,kubernetes",
                f"--store={store}",
                "--shutdown-timeout=5s",
            )
        )
        broker.wait_until_ready()
        return broker

    async def _enrol_agents(self, broker: BrokerProcess) -> None:
        """Enrols the clusters as `kubelend create token` and `kubelend join` do."""
        async with self._admin(broker) as admin:
            for name in self._agents:
                made = await admin.tokens.create(TokenRequest(name=name))
                invitation = JoinParameters(
                    f"https://localhost:{made.enrol_port}",
                    made.token,
                    tokens.parse_ca_pin(made.ca_hash),
                    name,
                )
                await join.join_broker(
                    invitation,
                    self._directory.certificate(name),
                    wait=_JOIN_TIMEOUT * waiting.FACTOR,
                )

    def _start_agent(
        self,
        name: str,
        broker: BrokerProcess,
        installed: dict[str, InstalledCluster],
        *flags: str,
    ) -> ChildProcess:
        return self._stack.enter_context(
            self._deployment.agent(
                name,
                broker,
                "--source=kubernetes",
                f"--kubeconfig={installed[name].account}",
                f"--instruction-namespace={setup.OBJECT_NAMESPACE}",
                "--reclaim-after=20s",  # short, so that it can be seen
                *flags,
            )
        )

    async def _wait_advertised(self, broker: BrokerProcess) -> None:
        """Waits until all clusters are active at the broker."""
        async with self._admin(broker) as admin:

            async def all_active() -> bool:
                found = await admin.all_clusters()
                active = {one.advertisement.cluster_id for one in found if one.status.active}
                return active >= set(self._agents)

            await waiting.until(all_active, "the agents have not advertised", _ADVERTISE_TIMEOUT)

    def _admin(self, broker: BrokerProcess) -> BrokerClient:
        return BrokerClient(broker.url, self._deployment.certificate(ADMIN_NAME, Role.ADMIN))

    @contextmanager
    def _step(self, title: str) -> Iterator[list[str]]:
        """Prints a step at its end, with the lines that were added."""
        began, lines = time.perf_counter(), list[str]()
        yield lines
        head = tables.title_line(f"{next(self._numbers):>2}  {title}", time.perf_counter() - began)
        self._print("".join(["\n", head, "\n", *(f"    {line}\n" for line in lines)]))

    def _save_state(self, **known: object) -> None:
        self._state = replace(self._state, **known)
        self._directory.write_state(self._state)


async def _install_all(found: LabClusters, *, has_liqo: bool) -> dict[str, InstalledCluster]:
    """Installs in all clusters in parallel."""
    fixtures = {} if found.has_real_nodes else setup.CLUSTER_FIXTURES
    made = await asyncio.gather(
        *(
            setup.install_broker_cluster(path)
            if name == hosts.BROKER_CLUSTER
            else setup.install_agent_cluster(path, fixtures.get(name, []), has_liqo=has_liqo)
            for name, path in found.kubeconfigs.items()
        )
    )
    return dict(zip(found.kubeconfigs, made, strict=True))


def _lab_process(name: str, process: ChildProcess) -> LabProcess:
    return LabProcess(name, process.pid, str(process.log), process.port_of("probes"))


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
