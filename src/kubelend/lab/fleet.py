"""A broker and the agents of several clusters, as processes that live where their accounts let them.

The supervisor puts them together with this: the authority, the broker, the agents' way in by token, and
the agents themselves. All is done as a person does it, but for the free ports.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from kubelend.apps import interrupts, joining
from kubelend.apps.children import BrokerProcess, Child
from kubelend.apps.joining import Invitation
from kubelend.core.errors import Unavailable
from kubelend.core.roles import Role
from kubelend.kits import clock
from kubelend.lab import rights
from kubelend.lab.records import Home, Process
from kubelend.pki import files, pins, profiles
from kubelend.pki.authority import Authority
from kubelend.transports.http_client import BrokerClient
from kubelend.wire.membership_bodies import TokenRequest

ADMIN = "admin"

_LIFETIME = timedelta(days=30)
_JOINED_WITHIN = timedelta(seconds=30)
_STOPPED_WITHIN = 10.0
_ADVERTISED_WITHIN = 60.0
_POLL = 0.1


class Fleet:
    """What runs. Use `opened`, which ends it too."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._agents: dict[str, Child] = {}
        self._broker: BrokerProcess | None = None

    @property
    def broker(self) -> BrokerProcess:
        if self._broker is None:
            raise Unavailable("the broker was not started")
        return self._broker

    def make_certificates(self) -> None:
        """Of an authority of our own: the broker's, and an administrator's."""
        now = clock.utc_now()
        authority = Authority.create("kubelend-lab", _LIFETIME, now=now)
        authority.save(self._home.authority)
        for name, profile in (
            ("broker", profiles.server()),
            (ADMIN, profiles.client(ADMIN, Role.ADMIN)),
        ):
            issued = authority.issue(profile, _LIFETIME, now=now)
            files.save_credentials(self._home.certificate(name), issued)

    def start_broker(self, account: Path) -> str:
        """Its store and its objects are in the cluster of the account; gives its address once it answers."""
        log = self._home.directory / "broker.log"
        with interrupts.put_off():
            self._broker = BrokerProcess(log, self._broker_arguments(account))
        self.broker.wait_until_ready()
        return self.broker.url

    async def join(self, name: str) -> None:
        """As `kubelend create token` and `kubelend join` do it."""
        home = self._home
        async with BrokerClient(self.broker.url, home.certificate(ADMIN)) as admin:
            made = await admin.tokens.create(TokenRequest(name=name))
        invitation = Invitation(
            f"https://localhost:{made.enrol_port}", made.token, pins.parse(made.ca_hash), name
        )
        await joining.join(invitation, home.certificate(name), wait=_JOINED_WITHIN)

    def start_agents(self, accounts: Mapping[str, Path]) -> None:
        """Each in its cluster; ready when this returns."""
        for name, account in accounts.items():
            log = self._home.directory / f"{name}.log"
            with interrupts.put_off():
                self._agents[name] = Child("agent", log, self._agent_arguments(name, account))
        for agent in self._agents.values():
            agent.wait_until_ready()

    async def advertised(self) -> None:
        """Wait until the broker believes all of them."""
        async with BrokerClient(self.broker.url, self._home.certificate(ADMIN)) as admin:
            try:
                async with asyncio.timeout(_ADVERTISED_WITHIN):
                    while not await self._all_active(admin):  # noqa: ASYNC110 - another process
                        await asyncio.sleep(_POLL)
            except TimeoutError:
                raise Unavailable("the agents do not advertise") from None

    def processes(self) -> tuple[Process, ...]:
        """For the record."""
        agents = ((f"agent of {name}", child) for name, child in self._agents.items())
        return tuple(
            Process(name, child.pid, str(child.log), child.port_of("probes"))
            for name, child in (("broker", self.broker), *agents)
        )

    def stop(self) -> None:
        """The agents first: they leave in good order while there is a broker."""
        for agent in self._agents.values():
            agent.terminate()
        for agent in self._agents.values():
            agent.stop(_STOPPED_WITHIN)
        if self._broker is not None:
            self._broker.stop(_STOPPED_WITHIN)

    async def _all_active(self, admin: BrokerClient) -> bool:
        found = await admin.all_clusters()
        return {one.advertisement.cluster_id for one in found if one.status.active} >= set(
            self._agents
        )

    def _broker_arguments(self, account: Path) -> list[str]:
        return [
            "--http-host=127.0.0.1",
            "--http-port=0",
            f"--http-cert-path={self._home.certificate('broker')}",
            f"--http-namespace={rights.OBJECTS}",
            f"--ca-path={self._home.authority}",
            "--enrol-port=0",
            "--broker-interface=http,kubernetes",
            f"--store={store(account)}",
            "--health-probe-bind-address=127.0.0.1:0",
            "--metrics-bind-address=0",
            "--shutdown-timeout=5s",
        ]

    def _agent_arguments(self, name: str, account: Path) -> list[str]:
        return [
            f"--broker-url={self.broker.url}",
            f"--broker-cert-path={self._home.certificate(name)}",
            "--source=kubernetes",
            f"--kubeconfig={account}",
            f"--instruction-namespace={rights.OBJECTS}",
            "--health-probe-bind-address=127.0.0.1:0",
            "--metrics-bind-address=0",
        ]


@contextmanager
def opened(home: Home) -> Iterator[Fleet]:
    """Nothing of it runs any more at the end."""
    fleet = Fleet(home)
    try:
        yield fleet
    finally:
        # Ctrl-C in here would leave the rest of them running.
        with interrupts.put_off():
            fleet.stop()


def store(account: Path) -> str:
    """As `--store` takes it."""
    return f"kubernetes://{account}"
