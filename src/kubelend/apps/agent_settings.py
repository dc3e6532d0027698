"""The settings of the agent: one attribute for each flag, with its unit, its default and why.

The names and defaults of the published agent's flags hold; ours stand beside them.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Literal

from kubelend.apps import settings
from kubelend.apps.flags import Address, Settings
from kubelend.core import durations, prices
from kubelend.core.errors import InvalidInput
from kubelend.sources import names

TRANSPORTS = ("http", "kubernetes", "")


class AgentSettings(Settings, frozen=True, kw_only=True):
    """The agent."""

    broker_transport: str = "http"
    """How the agent reaches its broker: http, kubernetes, or empty for none at all, which only measures."""

    broker_url: str = "https://localhost:8443"
    """Address of the broker."""

    broker_cert_path: str = ""
    """Directory with tls.crt, tls.key and ca.crt: who this cluster is, and which broker is trusted."""

    broker_kubeconfig: str = ""
    """Kubeconfig of the broker's cluster, for --broker-transport=kubernetes; if empty as for --kubeconfig."""

    broker_namespace: str = "default"
    """This cluster's mailbox in the broker's cluster, for --broker-transport=kubernetes."""

    broker_timeout: timedelta = timedelta(seconds=30)
    """How long one call of the broker may take."""

    cluster_id: str = ""
    """Name of this cluster: the certificate's if empty, and without one the UID of namespace kube-system."""

    cluster_name: str = ""
    """What people call it, if that is something else."""

    endpoint_url: str = ""
    """Where others reach this cluster; shown with what it advertises."""

    region: str = ""
    """Where it is; requests can ask for a region."""

    labels: str = ""
    """Labels that requests can ask for, as KEY=VALUE with commas."""

    cpu_cost: str = ""
    """Price of a core for an hour."""

    memory_cost: str = ""
    """Price of a GB for an hour."""

    gpu_cost: str = ""
    """Price of a GPU for an hour."""

    storage_cost: str = ""
    """Price of a GB of storage for an hour."""

    currency: str = "USD"
    """Of the prices."""

    policy_file: str = ""
    """YAML or JSON file that says to whom this cluster lends, how much and when; see docs/limits.md."""

    source: Literal["simulated", "kubernetes"] = "kubernetes"
    """Where nodes and pods are seen: in Kubernetes, or in the description that --simulation names."""

    kubeconfig: str = ""
    """Kubeconfig of this cluster; if empty KUBECONFIG, else the pod's own account, else ~/.kube/config."""

    simulation: str = ""
    """YAML file that describes a cluster, for --source=simulated; see docs/simulated-clusters.md."""

    objects_dir: str = ""
    """Directory of this cluster's objects, a YAML file each, for --source=simulated; in memory if empty."""

    request_namespace: str = ""
    """The only namespace whose ResourceRequests count; all do if empty. For --source=kubernetes."""

    advertisement_name: str = "cluster-advertisement"
    """Name of the object that shows what is advertised."""

    advertisement_namespace: str = "default"
    """Its namespace."""

    instruction_namespace: str = ""
    """Namespace of the objects that instructions become; if empty POD_NAMESPACE, else --request-namespace.
    Without any, default for those to lend, and each request's own for those to borrow."""

    advertisement_requeue_interval: timedelta = timedelta(seconds=30)
    """How often this cluster advertises, at moments of the clock that are its own."""

    align_to_clock: bool = False
    """Advertise at the full interval (10:00:00, 10:00:30), where others may do so too."""

    advertisement_damping: timedelta = timedelta(seconds=2)
    """The least time between two advertisements when something has changed."""

    advertisement_validity: timedelta = timedelta()
    """How long the broker is to believe an advertisement; three intervals if 0."""

    instruction_poll_interval: timedelta = timedelta(seconds=5)
    """How often to ask for instructions while the broker cannot push them; 0 turns it off."""

    enforce: bool = True
    """Refuse what the broker has promised to others and is not free. Else it is only noted."""

    finished_for: timedelta = timedelta(minutes=10)
    """How long the objects of instructions stay after they are over."""

    peering: Literal["auto", "none", "liqoctl"] = "auto"
    """How to join with a provider's cluster: with liqoctl if --kubeconfigs-dir is set, else not at all."""

    kubeconfigs_dir: str = ""
    """Directory with a kubeconfig of each provider, by cluster ID. If set, clusters are peered by liqoctl."""

    liqoctl: str = "liqoctl"
    """The liqoctl program."""

    kubectl: str = "kubectl"
    """The kubectl program: liqoctl has no command to look at a slice, or to delete one."""

    peering_timeout: timedelta = timedelta(minutes=5)
    """How long one run of liqoctl may take."""

    auto_renew: bool = True
    """Renew the certificate by itself, once a quarter of its life or less is left."""

    health_probe_bind_address: Address | None = Address("", 8081)
    """Where /healthz and /readyz answer without TLS, for probes; 0 turns it off."""

    metrics_bind_address: Address | None = Address("", 8080)
    """Where /metrics answers without TLS, for Prometheus; 0 turns it off."""

    leader_elect: bool = False
    """Accepted for existing manifests. The broker lets one agent at a time speak for a cluster."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least severe messages to log."""

    log_format: Literal["json", "console"] = "json"
    """One JSON object for each line, or text for people."""

    def problems(self) -> list[str]:
        """All that is wrong with the values, a sentence each, beginning with the flag's name."""
        return [*self._broker(), *self._cluster(), *self._texts(), *self._out_of_range()]

    def _broker(self) -> list[str]:
        if self.broker_transport not in TRANSPORTS:
            return [
                f"--broker-transport: {self.broker_transport!r} is unknown; write http,"
                " kubernetes, or nothing for none"
            ]
        if self.broker_transport != "http":
            return []
        found = []
        if problem := settings.address_problem(self.broker_url, "--broker-url"):
            found.append(problem)
        if not self.broker_cert_path:
            found.append("--broker-cert-path: is needed, here or as KUBELEND_BROKER_CERT_PATH")
        return found

    def _cluster(self) -> list[str]:
        found = []
        if self.source == "simulated" and not self.simulation:
            found.append("--simulation: is needed with --source=simulated")
        if self.source == "kubernetes":
            for attribute, flag in _OF_SIMULATED.items():
                if getattr(self, attribute):
                    found.append(f"{flag}: is for --source=simulated only")
        if self.peering == "liqoctl" and not self.kubeconfigs_dir:
            found.append("--kubeconfigs-dir: is needed with --peering=liqoctl")
        pairs = [pair for pair in self.labels.split(",") if pair]
        found += [f"--labels: {pair!r} is not KEY=VALUE" for pair in pairs if pair.find("=") < 1]
        return found

    def _texts(self) -> list[str]:
        """What would be refused later, by the broker or at every write, is told at the start."""
        found = []
        for flag, check, text in (
            *((f"--{name}-cost", _price, getattr(self, f"{name}_cost")) for name in _PRICED),
            ("--currency", _currency, self.currency),
            ("--broker-namespace", _name, f"{self.broker_namespace or 'default'}/any"),
            ("--advertisement-name", _name, f"default/{self.advertisement_name}"),
            ("--advertisement-namespace", _name, f"{self.advertisement_namespace}/any"),
            ("--instruction-namespace", _name, f"{self.instruction_namespace or 'default'}/any"),
            ("--request-namespace", _name, f"{self.request_namespace or 'default'}/any"),
        ):
            try:
                check(text)
            except InvalidInput as problem:
                found.append(f"{flag}: {problem}")
        return found

    def _out_of_range(self) -> list[str]:
        validity = self.advertisement_validity
        found = []
        if validity and validity < self.advertisement_requeue_interval:
            found.append("--advertisement-validity: must not be below the interval, or 0")
        return found + [
            f"--{attribute.replace('_', '-')}: must be at least {durations.short(least)}"
            for attribute, least in _LEAST.items()
            if getattr(self, attribute) < least
        ]


def _price(text: str) -> None:
    if text:
        prices.parse(text, "price")


def _currency(text: str) -> None:
    prices.parse_currency(text, "currency")


def _name(key: str) -> None:
    names.parse(key)


_OF_SIMULATED = {"simulation": "--simulation", "objects_dir": "--objects-dir"}
_PRICED = ("cpu", "memory", "gpu", "storage")
_MOMENT = timedelta(milliseconds=1)
_LEAST = {
    "broker_timeout": _MOMENT,
    "advertisement_requeue_interval": timedelta(milliseconds=100),
    "advertisement_damping": timedelta(),
    "advertisement_validity": timedelta(),
    "instruction_poll_interval": timedelta(),
    "finished_for": timedelta(),
    "peering_timeout": _MOMENT,
}
