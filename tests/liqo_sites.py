"""Clusters with Liqo from outside: what their API servers hold, and processes to kill and start again.

    borrowed = site.borrow()
    site.kill(AGENT, REQUESTER)()         kills it; the call starts it again
    borrowed.wait_ready()
    borrowed.release()
    site.wait_clean()

All of it is done by what a person has, too: signals to processes, and objects of API servers. A process is
started again by the command, the environment and the log file of the one that was killed. API servers are
asked over HTTP: while a test waits, a kubectl for each question would take a whole core.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kubelend.lab import hosts
from kubelend.peerings import liqo_objects
from kubelend.peerings.liqo_objects import REMOTE_LABEL, RESERVATION_LABEL
from labs import LONGEST, PROVIDER, REQUESTER, VERSIONS, Document, Lab, path_of
from waiting import wait_until

OTHER = hosts.THIRD_AGENT_CLUSTER

POLL = 0.02

SHORT_LIMITS = {"drain_timeout": "PT10S", "force_unpeer_after": "PT10S", "reclaim_after": "PT5S"}
"""Settings of agents, by their names in the code."""
REMOTE, LOCAL = "LocalAndRemote", "Local"
"""Strategies of offloaded namespaces."""
CPU, MEMORY = "500m", "256Mi"
GRANTED = {"cpu": CPU, "memory": MEMORY, "ephemeral-storage": "0", "pods": "110"}

_HISTORY = ("pods", "events", "reservationinstructions", "providerinstructions")
LEFTOVERS = tuple(kind for kind in VERSIONS if kind not in _HISTORY)
"""Kinds of which a cluster has the same objects afterwards as before."""


class Site(Lab):
    """The clusters of one lab."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._before: dict[str, set[str]] = {}

    # -- what is left

    def note_objects(self) -> None:
        """Notes what exists, to find out later what is left."""
        self._before = {
            name: {_text(kind, one) for kind in LEFTOVERS for one in api.list(kind)}
            for name, api in self.apis.items()
        }

    def leftovers(self, *clusters: str) -> Iterator[str]:
        """Objects that were not there before, and finalizers that hold finished instructions."""
        for cluster in clusters or self.apis:
            api = self.apis[cluster]
            for kind in LEFTOVERS:
                found = {_text(kind, one) for one in api.list(kind)}
                yield from (f"{cluster}: {one}" for one in sorted(found - self._before[cluster]))
            for kind in ("reservationinstructions", "providerinstructions"):
                held = [one for one in api.list(kind) if one["metadata"].get("finalizers")]
                yield from (f"{cluster}: finalizer of {_text(kind, one)}" for one in held)

    def is_clean(self, *clusters: str) -> bool:
        try:
            return next(self.leftovers(*clusters), None) is None
        except OSError:
            return False

    def wait_clean(self, *clusters: str) -> None:
        """Nothing is left in these clusters, by default in any, nor at the broker."""
        self.release_all()
        wait_until(
            lambda: self.is_clean(*clusters),
            LONGEST,
            poll=0.5,
            explain=lambda: [*self.leftovers(*clusters)],
        )
        wait_until(lambda: not self.stale(), LONGEST, poll=0.5, explain=self.stale)

    def check_clean(self) -> None:
        """Nothing is left. If something is, the next test does not count it as its own."""
        try:
            self.wait_clean()
            # The broker's ledger and its log of events agree.
            code, out, err = self.run("audit", "check", f"--store={self.record['store']}")
            assert code == 0, out + err
        finally:
            self.note_objects()

    def release_all(self) -> None:
        """Deletes requests, those of a test that has failed, too; waits until no node is left."""
        for api in self.apis.values():
            for one in api.list("resourcerequests"):
                names = one["metadata"]["namespace"], one["metadata"]["name"]
                api.call("DELETE", path_of("resourcerequests", *names))
        wait_until(lambda: not self.in_use(), LONGEST, poll=0.2, explain=self.in_use)

    def in_use(self) -> list[str]:
        """Nodes and slices of reservations, and reservations that have not ended."""
        try:
            found = [
                _text(kind, one)
                for kind in ("resourcerequests", "resourceslices", "nodes")
                for api in self.apis.values()
                for one in api.list(kind)
                if kind != "nodes" or _is_of_reservation(one)
            ]
            return found or self.reserved()
        except OSError as error:
            return [str(error)]

    def reserved(self) -> list[str]:
        """Reservations that have not ended."""
        live = ("Pending", "Reserved", "Active")
        found = self._items("reservations")
        return [one["id"] for one in found if one["status"]["phase"] in live]

    def stale(self) -> list[str]:
        """Clusters of which a broker that was restarted has not heard yet."""
        try:
            found = self._items("clusters")
        except OSError as error:
            return [str(error)]
        return [one["advertisement"]["clusterID"] for one in found if not one["status"]["active"]]

    def _items(self, noun: str) -> list[Document]:
        """`OSError` while the broker does not respond."""
        code, out, err = self.run_command("admin", "get", noun, "--output=json")
        if code:
            raise OSError(err)
        found: list[Document] = json.loads(out)["items"]
        return found

    # -- objects

    def borrow(
        self,
        cluster: str = REQUESTER,
        cpu: str = CPU,
        memory: str = MEMORY,
        provider: str = "",
        namespace: str = "default",
        namespaces: Iterable[str] = (),
    ) -> Borrowed:
        """Creates a ResourceRequest, and does not wait. Without a provider the broker chooses one."""
        name = f"request-{secrets.token_hex(3)}"
        target = {"targetClusterID": provider} if provider else {}
        # What the test before has freed may not be advertised yet.
        spec = {"requestedCPU": cpu, "requestedMemory": memory, "duration": "1h", "wait": "2m"}
        request = {
            "kind": "ResourceRequest",
            "metadata": {"name": name, "namespace": namespace},
            "spec": spec | target | {"namespaces": [*namespaces]},
        }
        self.apis[cluster].create("resourcerequests", request)
        path = path_of("resourcerequests", namespace, name)
        return Borrowed(self, path, cluster, GRANTED | {"cpu": cpu, "memory": memory})

    def borrow_ready(self, count: int = 1, **wanted: Any) -> list[Borrowed]:
        """Several at once, with their nodes."""
        found = [self.borrow(**wanted) for _ in range(count)]
        for one in found:
            one.wait_ready()
        return found

    @contextlib.contextmanager
    def namespace(self, strategy: str = "", cluster: str = REQUESTER) -> Iterator[str]:
        """A namespace that is deleted at the end; with a strategy, its user has offloaded it."""
        api, name = self.apis[cluster], f"team-{secrets.token_hex(3)}"
        api.create("namespaces", {"kind": "Namespace", "metadata": {"name": name}})
        # A pod needs it.
        wait_until(lambda: api.list("serviceaccounts", name), LONGEST, poll=0.1)
        if strategy:
            api.create("namespaceoffloadings", _offloading(name, strategy))
        if strategy == REMOTE:
            path = path_of("namespaceoffloadings", name, "offloading")
            phase = ("status", "offloadingPhase")
            wait_until(
                lambda: _at(api.get(path), *phase) == "Ready",
                LONGEST,
                poll=0.1,
                explain=lambda: api.get(path),
            )
        try:
            yield name
        finally:
            api.change("DELETE", path_of("namespaces", name=name))
            # Liqo deletes its copy in the provider only while there is a peering.
            copy = f"{name}-{cluster}"
            wait_until(
                lambda: not {name, copy} & {one["metadata"]["name"] for one in self._namespaces()},
                LONGEST,
                poll=0.1,
            )

    def _namespaces(self) -> Iterator[Document]:
        for api in self.apis.values():
            yield from api.list("namespaces")

    def lent_pods(self, namespace: str) -> dict[str, str]:
        """The phases of the pods of a requester's namespace in the provider's cluster, by name."""
        found = self.apis[PROVIDER].list("pods", f"{namespace}-{REQUESTER}")
        return {one["metadata"]["name"]: one["status"]["phase"] for one in found}

    def wait_lent_pods(self, namespace: str, *names: str) -> None:
        """Waits until exactly these run there."""
        wait_until(
            lambda: self.lent_pods(namespace) == dict.fromkeys(names, "Running"),
            LONGEST,
            poll=0.1,
            explain=lambda: self.lent_pods(namespace),
        )

    def virtual_nodes(self, cluster: str = REQUESTER) -> dict[str, Document]:
        """What each offers, by reservation."""
        found = filter(_is_of_reservation, self.apis[cluster].list("nodes"))
        return {
            one["metadata"]["labels"][RESERVATION_LABEL]: one["status"].get("allocatable", {})
            for one in found
        }

    def logs(self) -> str:
        """What the agents and the broker complained about last."""
        lines = []
        for path in sorted(self.directory.glob("*.log")):
            text = path.read_text(errors="replace").splitlines()
            complaints = [
                one for one in text if '"warning"' in one or '"error"' in one or "Error" in one
            ]
            lines += [f"{path.name}: {one}" for one in complaints[-4:]]
        return "\n".join(lines)


def _text(kind: str, found: Document) -> str:
    metadata = found["metadata"]
    return f"{kind} {metadata.get('namespace', '')}/{metadata['name']}"


def _at(found: Document, *names: str) -> object:
    """A nested value; None if there is none."""
    value: Any = found
    for name in names:
        value = (value or {}).get(name)
    return value


def _is_of_reservation(node: Document) -> bool:
    return RESERVATION_LABEL in node["metadata"].get("labels", {})


class Borrowed:
    """One ResourceRequest, and all that follows from it in both clusters."""

    def __init__(self, site: Site, path: str, cluster: str, granted: Mapping[str, str]) -> None:
        self._site = site
        self._path = path
        self.cluster = cluster
        self.granted = dict(granted)
        self._reservation = ""

    # -- what the API servers say

    @property
    def request(self) -> Document:
        return self._site.apis[self.cluster].get(self._path)

    @property
    def phase(self) -> str:
        return str(self.request.get("status", {}).get("phase", ""))

    @property
    def reservation(self) -> str:
        """Its ID at the broker; empty until it is reserved. It never changes."""
        if not self._reservation:
            self._reservation = self.request.get("status", {}).get("reservationName", "")
        return self._reservation

    @property
    def provider(self) -> str:
        return str(self.request.get("status", {}).get("targetClusterID", "")) or PROVIDER

    def own(self, kind: str, name: str = "") -> Document:
        """An object of the requester's cluster, in the namespace for the provider."""
        return self._find(self.cluster, kind, self.provider, name)

    def remote(self, kind: str, name: str = "") -> Document:
        """An object of the provider's cluster, in the namespace for the requester."""
        return self._find(self.provider, kind, self.cluster, name)

    def _find(self, cluster: str, kind: str, other: str, name: str) -> Document:
        """By default the object of the reservation. One that replaces another has a number in its name."""
        api, namespace = self._site.apis[cluster], liqo_objects.tenant_namespace(other)
        if name:
            return api.get(path_of(kind, namespace, name))
        own = self._named(api.get(path_of(kind, namespace)))
        return max(own, key=lambda one: "deletionTimestamp" not in one["metadata"], default={})

    def _named(self, found: Document) -> list[Document]:
        items: list[Document] = found.get("items", [])
        return [one for one in items if one["metadata"]["name"].startswith(self.reservation)]

    @property
    def node(self) -> Document:
        """The newest virtual node with the present provider; empty if there is none."""
        selector = f"labelSelector={RESERVATION_LABEL}={self.reservation}"
        found = self._site.apis[self.cluster].get(f"/api/v1/nodes?{selector}").get("items", [])
        own = [one for one in found if one["metadata"]["labels"][REMOTE_LABEL] == self.provider]
        return max(own, key=lambda one: one["metadata"]["creationTimestamp"], default={})

    def quotas(self) -> list[Document]:
        namespace = liqo_objects.tenant_namespace(self.cluster)
        return self._named(self._site.apis[self.provider].get(path_of("quotas", namespace)))

    def conditions(self) -> dict[str, str]:
        found = self.request.get("status", {}).get("conditions", [])
        return {one["type"]: f"{one['status']} {one['reason']}: {one['message']}" for one in found}

    def events(self) -> set[str]:
        """The reasons of what the agent has said about it."""
        found = self._site.apis[self.cluster].list("events")
        return {one["reason"] for one in found if one["involvedObject"]["name"] == self.reservation}

    def run_pod(self, name: str, namespace: str) -> None:
        """Creates a pod on the node, and does not wait."""
        self._site.apis[self.cluster].create("pods", _pod(name, namespace, self.reservation))

    # -- what is promised

    def is_ready(self) -> bool:
        return self.phase == "Active" and self.conditions().get("Ready", "").startswith("True")

    def has_exactly_what_is_reserved(self) -> bool:
        offered = self.node.get("status", {}).get("allocatable", {})
        enforced = [one["spec"]["resources"] for one in self.quotas()]
        return offered == self.granted and enforced == [self.granted]

    def has_more_than_reserved(self) -> list[str]:
        """Amounts that exceed the reservation, now."""
        most = liqo_objects.parse_amounts(self.granted)
        amounts = [("Node", self.node.get("status", {}).get("allocatable"))]
        amounts += [("Quota", one["spec"]["resources"]) for one in self.quotas()]
        return [
            f"{kind}: {found}"
            for kind, found in amounts
            if found and not liqo_objects.parse_amounts(found).fits_in(most)
        ]

    def wait_ready(self) -> None:
        wait_until(self.is_ready, LONGEST, poll=0.1, explain=self.explain)
        wait_until(self.has_exactly_what_is_reserved, LONGEST, poll=0.1, explain=self.explain)

    def wait_phase(self, phase: str) -> None:
        wait_until(lambda: self.phase == phase, LONGEST, poll=0.1, explain=self.explain)

    def release(self) -> None:
        """Deletes the request, and does not wait."""
        self._site.apis[self.cluster].change("DELETE", self._path)

    def wait_released(self) -> None:
        """The request is gone, and its node."""

        def is_gone() -> bool:
            api = self._site.apis[self.cluster]
            return api.is_ready and not self.request and not self.node

        wait_until(is_gone, LONGEST, poll=0.1, explain=self.explain)

    def explain(self) -> str:
        texts = {
            "request": (self.phase, self.conditions()),
            "slice": _answer(self.own("resourceslices")),
            "slice of the provider": _answer(self.remote("resourceslices")),
            "node": self.node.get("status", {}).get("allocatable"),
            "quotas": [one["spec"] for one in self.quotas()],
            "log": self._site.logs(),
        }
        return "\n".join(f"{name}: {text}" for name, text in texts.items())


def _offloading(namespace: str, strategy: str) -> Document:
    return {
        "kind": "NamespaceOffloading",
        "metadata": {"name": "offloading", "namespace": namespace},
        "spec": {
            "namespaceMappingStrategy": "DefaultName",
            "podOffloadingStrategy": strategy,
            "clusterSelector": {"nodeSelectorTerms": []},
        },
    }


def _pod(name: str, namespace: str, reservation: str) -> Document:
    requests = {"cpu": "100m", "memory": "32Mi"}
    container = {"name": "main", "image": "none", "resources": {"requests": requests}}
    return {
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": {"app": name}},
        "spec": {"nodeSelector": {RESERVATION_LABEL: reservation}, "containers": [container]},
    }


def _answer(found: Document) -> object:
    status = found.get("status", {})
    return found.get("spec", {}).get("resources"), status.get("resources"), status.get("conditions")


def condition(found: Document, kind: str) -> str:
    """The status of a condition; empty if there is none."""
    conditions = found.get("status", {}).get("conditions") or []
    return next((str(one["status"]) for one in conditions if one["type"] == kind), "")


# -- the steps of a reservation

Step = Callable[[Borrowed], object]

CONNECTING: dict[str, Step] = {
    "reserved": lambda one: one.reservation,
    "nonce": lambda one: one.remote("secrets", "liqo-nonce").get("data"),
    "signed nonce": lambda one: (
        one.own("secrets", "liqo-signed-nonce").get("data", {}).get("signedNonce")
    ),
    "tenant": lambda one: one.remote("tenants", one.cluster).get("status", {}).get("authParams"),
    "identity": lambda one: one.own("identities", f"controlplane-{one.provider}"),
    "slice": lambda one: one.own("resourceslices"),
    "replicated": lambda one: one.remote("resourceslices"),
    "granted": lambda one: condition(one.remote("resourceslices"), "Resources"),
    "quota": lambda one: one.quotas(),
    "virtual node": lambda one: one.own("virtualnodes"),
    "node": lambda one: one.node,
    "node ready": lambda one: condition(one.node, "Ready") == "True",
    "active": lambda one: one.is_ready(),
}
"""From the request to a node that can be used; each by an object that shows it."""

DISCONNECTING: dict[str, Step] = {
    "deleted": lambda _: True,
    "slice deleting": lambda one: (
        not (found := one.own("resourceslices")) or "deletionTimestamp" in found["metadata"]
    ),
    "slice gone": lambda one: not one.own("resourceslices"),
    "node gone": lambda one: not one.node,
    "identity gone": lambda one: not one.own("identities", f"controlplane-{one.provider}"),
    "tenant gone": lambda one: not one.remote("tenants", one.cluster),
}
"""From the deletion of the request to nothing."""


def wait_step(borrowed: Borrowed, name: str) -> None:
    """Waits until a step has been taken."""
    step = {**CONNECTING, **DISCONNECTING}[name]
    wait_until(lambda: step(borrowed), LONGEST, poll=POLL, explain=borrowed.explain)


@contextlib.contextmanager
def started(directory: Path, *flags: str) -> Iterator[Site]:
    """Starts a lab with Liqo, and ends it. Its agents wait for others as shortly as `SHORT_LIMITS` say."""
    site = Site(directory)
    code, out, err = site.lab("up", "--liqo", *flags)
    assert (code, err) == (0, ""), out
    try:
        site.note_objects()
        for cluster in site.apis:
            site.restart_agent(cluster, **SHORT_LIMITS)
        yield site
    finally:
        site.stop()
        code, _, err = site.lab("down")
        assert code == 0, err
