"""The broker and agent processes of the lab, each with the service account of its cluster.

Creates the CA, starts the broker, enrols the agents with tokens and starts them, in the same way as a user
would, but on free ports.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from kubelend.apps import interrupts, joining
from kubelend.apps.children import BrokerProcess, ChildProcess
from kubelend.apps.joining import JoinParameters
from kubelend.core.errors import Unavailable
from kubelend.core.roles import Role
from kubelend.kits import clock
from kubelend.lab import rights
from kubelend.lab.records import LabDirectory, LabProcess
from kubelend.pki import files, pins, profiles
from kubelend.pki.authority import Authority
from kubelend.transports.http_client import BrokerClient
from kubelend.wire.membership_bodies import TokenRequest

ADMIN_NAME = "admin"

_CERTIFICATE_LIFETIME = timedelta(days=30)
_JOIN_TIMEOUT = timedelta(seconds=30)
_STOP_TIMEOUT = 10.0
_ADVERTISE_TIMEOUT = 60.0
_POLL = 0.1


class LabProcesses:
    """The running processes. Use `opened`, which also stops them."""

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
            ("broker", profiles.server_profile()),
            (ADMIN_NAME, profiles.client_profile(ADMIN_NAME, Role.ADMIN)),
        ):
            issued = authority.issue(profile, _CERTIFICATE_LIFETIME, now=now)
            files.save_credentials(self._directory.certificate(name), issued)

    def start_broker(self, account: Path) -> str:
        """Starts the broker with its store in the account's cluster; returns its URL when it is ready."""
        log = self._directory.directory / "broker.log"
        with interrupts.defer_signals():
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
            pins.parse_ca_pin(made.ca_hash),
            name,
        )
        await joining.join_broker(invitation, home.certificate(name), wait=_JOIN_TIMEOUT)

    def start_agents(self, accounts: Mapping[str, Path]) -> None:
        """Starts one agent per cluster and waits until all are ready."""
        for name, account in accounts.items():
            log = self._directory.directory / f"{name}.log"
            with interrupts.defer_signals():
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
            f"--http-namespace={rights.OBJECT_NAMESPACE}",
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
            f"--instruction-namespace={rights.OBJECT_NAMESPACE}",
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
        with interrupts.defer_signals():
            fleet.stop()


def store_url(account: Path) -> str:
    """Returns the value of `--store`."""
    return f"kubernetes://{account}"
