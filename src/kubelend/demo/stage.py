"""What the steps of the demo act on: the broker, the clusters, and what earlier steps have left."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from kubelend.apps.children import BrokerProcess
from kubelend.apps.trials import Trial
from kubelend.core.errors import KubelendError
from kubelend.core.roles import Role
from kubelend.demo import clusters
from kubelend.demo.clusters import SimulatedCluster
from kubelend.transports.http_client import BrokerClient
from kubelend.wire import bodies

ADMIN = "admin"


class Stage:
    """Built once the broker is ready."""

    def __init__(
        self,
        trial: Trial,
        broker: BrokerProcess,
        certificates: dict[str, Path],
        members: dict[str, SimulatedCluster],
        admin: BrokerClient,
    ) -> None:
        self.trial = trial
        self.broker = broker
        self.certificates = certificates
        self.clusters = members
        self.admin = admin
        self.asked_at = 0.0
        self.before: dict[str, bodies.Amounts] = {}
        """What each cluster had to offer before anybody borrowed."""
        self._held: bodies.Reservation | None = None

    @property
    def borrower(self) -> SimulatedCluster:
        return self.clusters[clusters.LYON.name]

    @property
    def lender(self) -> SimulatedCluster:
        return self.clusters[self.held.target_cluster_id]

    @property
    def held(self) -> bodies.Reservation:
        """The reservation whose life is shown, as it was last seen."""
        if self._held is None:
            raise KubelendError("nothing is borrowed yet")
        return self._held

    @held.setter
    def held(self, found: bodies.Reservation) -> None:
        self._held = found

    def is_held(self, found: bodies.Reservation) -> bool:
        return found.id == self.held.id

    async def available(self, cluster: str) -> bodies.Amounts:
        found = (await self.admin.get_cluster(cluster)).advertisement.resources.available
        expect(found is not None, f"{cluster} has no amounts")
        return found or bodies.Quantities("0", "0")


@asynccontextmanager
async def open_stage(trial: Trial, broker: BrokerProcess) -> AsyncIterator[Stage]:
    """Certificates and connections for everybody in the demo."""
    names = [described.name for described in clusters.EVERYONE]
    certificates = {name: trial.certificate(name) for name in names}
    certificates[ADMIN] = trial.certificate(ADMIN, Role.ADMIN)
    async with AsyncExitStack() as stack:
        clients = {
            name: await stack.enter_async_context(BrokerClient(broker.url, directory))
            for name, directory in certificates.items()
        }
        members = {
            described.name: SimulatedCluster(described, clients[described.name])
            for described in clusters.EVERYONE
        }
        yield Stage(trial, broker, certificates, members, clients[ADMIN])


def expect(holds: bool, otherwise: str) -> None:
    """What a step shows must be so."""
    if not holds:
        raise KubelendError(otherwise)
