"""Mailboxes for tests: made as an operator makes them, attended to by a broker in this process.

    office = PostOffice(kube, namespace="broker")
    async with office.attended(broker):
        agent = await office.open(office.create("rome"))

The broker's controller and every agent work under accounts of their own, with the documented roles.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import make
from kubelend.broker.agent_sessions import AgentSessions
from kubelend.broker.service import Broker
from kubelend.communicators import factory
from kubelend.communicators.factory import CommunicatorOptions
from kubelend.controllers.cluster_namespaces.manager import ClusterNamespaces
from kubelend.controllers.cluster_namespaces.writer import Dependencies, SignGrant
from kubelend.core.errors import UnexpectedAnswer
from kubelend.envtest.servers import LocalCluster
from kubelend.kube import config
from kubelend.kube.client import Client
from kubelend.wire import cluster_namespaces
from kubelend.wire.conversion import RequestLimits

TERMS = RequestLimits(make.HOUR, 720 * make.HOUR, make.HOUR)
BROKER = "broker-of-mailboxes"
_RBAC = "/apis/rbac.authorization.k8s.io/v1"
_PLURALS = {
    "Namespace": "namespaces",
    "ClusterSession": "clustersessions",
    "ServiceAccount": "serviceaccounts",
    "Role": "roles",
    "RoleBinding": "rolebindings",
    "ClusterRole": "clusterroles",
    "ClusterRoleBinding": "clusterrolebindings",
}


class PostOffice:
    """Where mailboxes are made and attended to."""

    def __init__(self, kube: LocalCluster, own_namespace: str = "default") -> None:
        self.kube = kube
        self.own_namespace = own_namespace
        self.controller: ClusterNamespaces | None = None
        self.names: list[str] = []
        self._let_broker_in()

    def create(self, cluster: str, *, labelled: bool = True) -> str:
        """Gives its namespace. Without the label it is as one that is going to be a mailbox."""
        name = f"mail-{secrets.token_hex(4)}"
        for document in cluster_namespaces.cluster_namespace_manifests(cluster, name):
            if not labelled:
                document["metadata"].pop("labels", None)
            _post(self.kube, document)
        self.names.append(name)
        return name

    def label(self, namespace: str, cluster: str) -> None:
        """Say whose mailbox a namespace is; without a cluster it is nobody's."""
        path = f"/api/v1/namespaces/{namespace}"
        found = json.loads(self.kube.call("GET", path))
        labels = found["metadata"].setdefault("labels", {})
        labels.pop(cluster_namespaces.CLUSTER_LABEL, None)
        if cluster:
            labels[cluster_namespaces.CLUSTER_LABEL] = cluster
        self.kube.call("PUT", path, json.dumps(found).encode())

    def kubeconfig(self, namespace: str) -> Path:
        """Of the account whose mailbox it is."""
        return self.kube.kubeconfig_of_account(cluster_namespaces.AGENT_ACCOUNT, namespace)

    async def open(self, namespace: str, instance: str = "one", **options: Any) -> Any:
        """The conversation of the cluster whose mailbox it is."""
        kubeconfig = str(self.kubeconfig(namespace))
        wanted = CommunicatorOptions(
            kubeconfig=kubeconfig, namespace=namespace, instance=instance, **options
        )
        return await factory.open_communicator("kubernetes", wanted)

    @contextlib.asynccontextmanager
    async def attended(
        self,
        broker: Broker,
        speakers: AgentSessions | None = None,
        connect: Any = Client.open,
        granting: SignGrant | None = None,
    ) -> AsyncIterator[ClusterNamespaces]:
        found = config.config_from_kubeconfig(self.kube.kubeconfig_for(BROKER))
        async with connect(found) as client:
            speaking = speakers or AgentSessions(broker.clock, make.MINUTE)
            means = Dependencies(client, broker, TERMS, speaking, granting)
            self.controller = ClusterNamespaces(means, self.own_namespace)
            task = asyncio.create_task(self.controller.run(), name="mailboxes")
            try:
                yield self.controller
            finally:
                assert not task.done(), task.exception()
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    def close(self) -> None:
        """Nobody's mailboxes any more: a lab has nobody who would empty a namespace."""
        for name in self.names:
            self.label(name, "")

    def _let_broker_in(self) -> None:
        group = "rbac.authorization.k8s.io"
        role = {
            "apiVersion": f"{group}/v1",
            "kind": "ClusterRole",
            "metadata": {"name": BROKER},
            "rules": cluster_namespaces.policy_rules(cluster_namespaces.BROKER_RULES),
        }
        binding = {
            "apiVersion": f"{group}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": BROKER},
            "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": BROKER},
            "subjects": [{"apiGroup": group, "kind": "User", "name": BROKER}],
        }
        for document in (role, binding):
            with contextlib.suppress(UnexpectedAnswer):  # another test has made it
                _post(self.kube, document)


def _post(kube: LocalCluster, document: dict[str, Any]) -> None:
    version, namespace = document["apiVersion"], document["metadata"].get("namespace")
    root = f"/apis/{version}" if "/" in version else f"/api/{version}"
    place = f"/namespaces/{namespace}" if namespace else ""
    path = f"{root}{place}/{_PLURALS[document['kind']]}"
    kube.call("POST", path, json.dumps(document).encode())
