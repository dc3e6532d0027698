"""Cluster namespaces for tests: created as by an operator, and served by a broker in this process.

    tenants = Tenants(kube, namespace="broker")
    async with tenants.served_by(broker):
        agent = await tenants.open(tenants.create("rome"))

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

import msgspec

import make
from kubelend.broker.agent_sessions import AgentSessions
from kubelend.broker.service import Broker
from kubelend.communicators import factory
from kubelend.communicators.factory import CommunicatorOptions
from kubelend.controllers.cluster_namespaces.handlers import Dependencies, SignGrant
from kubelend.controllers.cluster_namespaces.manager import ClusterNamespaces
from kubelend.core.errors import UnexpectedResponse
from kubelend.envtest.servers import LocalCluster
from kubelend.kube import config
from kubelend.kube.client import Client
from kubelend.pki.grants import JwkSet
from kubelend.wire import bodies, cluster_namespaces
from kubelend.wire.conversion import RequestLimits

TERMS = RequestLimits(make.HOUR, 720 * make.HOUR, make.HOUR)
BROKER = "broker-of-tenants"
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


class Tenants:
    """The cluster namespaces of one broker."""

    def __init__(self, kube: LocalCluster, own_namespace: str = "default") -> None:
        self.kube = kube
        self.own_namespace = own_namespace
        self.controller: ClusterNamespaces | None = None
        self.names: list[str] = []
        self._grant_permissions()

    def create(self, cluster: str, *, labelled: bool = True) -> str:
        """Create a cluster namespace, or one without its label; returns its name."""
        name = f"tenant-{secrets.token_hex(4)}"
        for document in cluster_namespaces.cluster_namespace_manifests(cluster, name):
            if not labelled:
                document["metadata"].pop("labels", None)
            _post(self.kube, document)
        self.names.append(name)
        return name

    def label(self, namespace: str, cluster: str) -> None:
        """Set the label of a namespace, or remove it."""
        path = f"/api/v1/namespaces/{namespace}"
        found = json.loads(self.kube.call("GET", path))
        labels = found["metadata"].setdefault("labels", {})
        labels.pop(cluster_namespaces.CLUSTER_LABEL, None)
        if cluster:
            labels[cluster_namespaces.CLUSTER_LABEL] = cluster
        self.kube.call("PUT", path, json.dumps(found).encode())

    def kubeconfig(self, namespace: str) -> Path:
        """Of the agent's account."""
        return self.kube.kubeconfig_of_account(cluster_namespaces.AGENT_ACCOUNT, namespace)

    async def open(self, namespace: str, instance: str = "one", **options: Any) -> Any:
        """A communicator of the cluster's agent."""
        kubeconfig = str(self.kubeconfig(namespace))
        wanted = CommunicatorOptions(
            kubeconfig=kubeconfig, namespace=namespace, instance=instance, **options
        )
        return await factory.open_communicator("kubernetes", wanted)

    @contextlib.asynccontextmanager
    async def agent(
        self, namespace: str, instance: str = "one", **options: Any
    ) -> AsyncIterator[Any]:
        """The same, closed at the end."""
        found = await self.open(namespace, instance, **options)
        try:
            yield found
        finally:
            await found.close()

    def account(self, namespace: str) -> contextlib.AbstractAsyncContextManager[Client]:
        """What the cluster's account may do in its namespace."""
        return Client.open(config.config_from_kubeconfig(self.kubeconfig(namespace)))

    @contextlib.asynccontextmanager
    async def served_by(
        self,
        broker: Broker,
        sessions: AgentSessions | None = None,
        connect: Any = Client.open,
        granting: SignGrant | None = None,
        keys: JwkSet | None = None,
    ) -> AsyncIterator[ClusterNamespaces]:
        found = config.config_from_kubeconfig(self.kube.kubeconfig_for(BROKER))
        async with connect(found) as client:
            sessions = sessions or AgentSessions(broker.clock, make.MINUTE)
            dependencies = Dependencies(client, broker, TERMS, sessions, granting)
            if keys is not None:
                public = msgspec.convert(msgspec.to_builtins(keys), bodies.KeySet)
                dependencies = dependencies._replace(grant_keys=public)
            self.controller = ClusterNamespaces(dependencies, self.own_namespace)
            task = asyncio.create_task(self.controller.run(), name="cluster namespaces")
            try:
                yield self.controller
            finally:
                assert not task.done(), task.exception()
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    def close(self) -> None:
        """Remove the labels: an API server alone does not delete the contents of namespaces."""
        for name in self.names:
            self.label(name, "")

    def _grant_permissions(self) -> None:
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
            with contextlib.suppress(UnexpectedResponse):  # another test has made it
                _post(self.kube, document)


def _post(kube: LocalCluster, document: dict[str, Any]) -> None:
    version, namespace = document["apiVersion"], document["metadata"].get("namespace")
    root = f"/apis/{version}" if "/" in version else f"/api/{version}"
    scope = f"/namespaces/{namespace}" if namespace else ""
    path = f"{root}{scope}/{_PLURALS[document['kind']]}"
    kube.call("POST", path, json.dumps(document).encode())
