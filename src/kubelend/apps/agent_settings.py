"""Settings of the agent: one attribute per flag.

Names and defaults of the flags of the published Go agent are kept; further flags are additions.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Literal

from kubelend.apps import flags, settings
from kubelend.apps.flags import Address, Settings
from kubelend.core import prices
from kubelend.core.errors import InvalidInput
from kubelend.core.pod_requests import HOLD_CLASS_PREFIX
from kubelend.sources import object_semantics

TRANSPORTS = ("auto", "http", "kubernetes", "")


class AgentSettings(Settings, frozen=True, kw_only=True):
    """Settings of the agent."""

    broker_transport: str = "auto"
    """Transport to the broker: http, kubernetes, or empty for none (the agent only measures its cluster).
    auto selects kubernetes if --broker-kubeconfig is set and --broker-cert-path is not, else http."""

    broker_url: str = "https://localhost:8443"
    """URL of the broker, for --broker-transport=http."""

    broker_cert_path: str = ""
    """Directory with the cluster's certificate: tls.crt, tls.key, and ca.crt to verify the broker."""

    broker_kubeconfig: str = ""
    """Kubeconfig of the broker's cluster, for --broker-transport=kubernetes. Empty: as for --kubeconfig."""

    broker_namespace: str = "default"
    """Namespace of this cluster in the broker's cluster, for --broker-transport=kubernetes."""

    broker_timeout: timedelta = timedelta(seconds=30)
    """Timeout of a call to the broker."""

    cluster_id: str = ""
    """ID of this cluster. Defaults to the certificate's name, else the UID of namespace kube-system."""

    cluster_name: str = ""
    """Display name of this cluster."""

    endpoint_url: str = ""
    """URL of this cluster, published with its advertisement."""

    region: str = ""
    """Region of this cluster. Requests can select it."""

    labels: str = ""
    """Labels of this cluster as comma-separated KEY=VALUE pairs. Requests can select them."""

    cpu_cost: str = ""
    """Price per core-hour."""

    memory_cost: str = ""
    """Price per GB-hour of memory."""

    gpu_cost: str = ""
    """Price per GPU-hour."""

    storage_cost: str = ""
    """Price per GB-hour of storage."""

    currency: str = "USD"
    """Currency of the prices."""

    policy_file: str = ""
    """YAML or JSON file with the lending policy: to whom this cluster lends, how much and when; see
    docs/limits.md."""

    source: Literal["simulated", "kubernetes"] = "kubernetes"
    """Source of nodes and pods: a Kubernetes cluster, or the simulation described by --simulation."""

    kubeconfig: str = ""
    """Kubeconfig of this cluster. Empty uses KUBECONFIG, the pod's service account or ~/.kube/config."""

    simulation: str = ""
    """YAML file that describes the cluster, for --source=simulated; see docs/simulated-clusters.md."""

    objects_dir: str = ""
    """Directory with one YAML file per object, for --source=simulated. Users write to its subdirectory
    requests. Empty keeps objects in memory."""

    request_namespace: str = ""
    """Namespace to watch for ResourceRequests, for --source=kubernetes. Empty watches all namespaces."""

    advertisement_name: str = "cluster-advertisement"
    """Name of the local Advertisement object."""

    advertisement_namespace: str = "default"
    """Namespace of the local Advertisement object."""

    instruction_namespace: str = ""
    """Namespace of ReservationInstructions and ProviderInstructions. Defaults to
    --advertisement-namespace."""

    advertisement_requeue_interval: timedelta = timedelta(seconds=30)
    """Interval between advertisements, aligned to the clock with an offset per cluster."""

    align_to_clock: bool = False
    """Advertise at full intervals (10:00:00, 10:00:30) without the offset per cluster."""

    advertisement_damping: timedelta = timedelta(seconds=2)
    """Minimum time between two advertisements when resources change."""

    advertisement_validity: timedelta = timedelta()
    """Time after which the broker regards an advertisement as stale. 0 means three intervals."""

    instruction_poll_interval: timedelta = timedelta(seconds=5)
    """Interval for polling instructions while the stream from the broker is down. 0 disables polling."""

    enforce: bool = True
    """Refuse reservations that exceed the free capacity of this cluster. If false, they are only logged."""

    hold: Literal["none", "placeholders"] = "none"
    """How lent resources are kept free: placeholders (pods that give way to the requester's), or none."""

    refuse_unheld: bool = False
    """Refuse reservations of which --hold=placeholders cannot hold all, because the free room is on too many
    nodes or is taken. If false, their condition Held says how much is held."""

    hold_priority_class: str = "kubelend-hold"
    """PriorityClass of placeholders. Its name must begin with kubelend-hold."""

    hold_image: str = "registry.k8s.io/pause:3.10"
    """Image of placeholders, which does nothing."""

    finished_for: timedelta = timedelta(minutes=10)
    """Time that instruction objects are retained after their reservation has ended."""

    reclaim_after: timedelta = timedelta(minutes=10)
    """Time after the end of a lent reservation at which pods that its requester has left are deleted. Until
    then only new pods are refused. Only with --peering=liqo."""

    peering: Literal["auto", "none", "liqo", "liqoctl"] = "auto"
    """How to peer with a provider's cluster: by Liqo's objects (liqo), by liqoctl, or not at all (none). auto
    selects liqoctl if --kubeconfigs-dir is set, liqo if it is installed in this cluster, else none."""

    liqo_namespace: str = "liqo"
    """Namespace in which Liqo is installed."""

    kubeconfigs_dir: str = ""
    """Directory with one kubeconfig per provider, named by cluster ID, for peering with liqoctl."""

    liqoctl: str = "liqoctl"
    """Path of the liqoctl executable."""

    kubectl: str = "kubectl"
    """Path of the kubectl executable, used to get and delete ResourceSlices, for which liqoctl has no
    command."""

    peering_timeout: timedelta = timedelta(minutes=5)
    """Timeout of one run of liqoctl."""

    cleanup: bool = False
    """Release what this cluster has borrowed, remove peerings, instructions and finalizers, and exit. For
    uninstalling: stop the agent first, or let --cleanup-deployment do that."""

    cleanup_deployment: str = ""
    """Deployment of the agent in POD_NAMESPACE, which --cleanup scales to zero before anything else."""

    cleanup_timeout: timedelta = timedelta(minutes=3)
    """How long --cleanup waits for peerings to be removed, longer than --drain-timeout. What is left then is
    logged."""

    drain_timeout: timedelta = timedelta(minutes=2)
    """How long pods on a borrowed node may take to be evicted when its reservation has ended, which
    PodDisruptionBudgets can delay. Pods that are left then are deleted. 0 deletes them at once."""

    force_unpeer_after: timedelta = timedelta(minutes=5)
    """Time after which the borrowed node of an ended reservation is removed without its provider, if the
    provider's API server does not respond. Longer than a restart of an API server."""

    auto_renew: bool = True
    """Renew the certificate when a quarter of its lifetime or less is left."""

    health_probe_bind_address: Address | None = Address("", 8081)
    """Address that serves /healthz and /readyz without TLS. 0 disables it."""

    metrics_bind_address: Address | None = Address("", 8080)
    """Address that serves /metrics without TLS. 0 disables it."""

    leader_elect: bool = False
    """Accepted for compatibility and ignored: the broker allows one active agent per cluster."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Minimum severity of log messages."""

    log_format: Literal["json", "console"] = "json"
    """Log format: JSON lines, or text for a terminal."""

    @property
    def transport(self) -> str:
        """The transport that `--broker-transport` selects: http, kubernetes, or empty."""
        if self.broker_transport != "auto":
            return self.broker_transport
        return "kubernetes" if self.broker_kubeconfig and not self.broker_cert_path else "http"

    def problems(self) -> list[str]:
        """Returns one sentence per invalid value, beginning with the flag's name."""
        return [
            *self._broker_problems(),
            *self._cluster_problems(),
            *self._value_problems(),
            *self._out_of_range(),
        ]

    def _broker_problems(self) -> list[str]:
        if self.broker_transport not in TRANSPORTS:
            return [
                f"--broker-transport: {self.broker_transport!r} is not supported; use auto, http,"
                " kubernetes, or an empty value for none"
            ]
        if self.transport != "http":
            return []
        found = [settings.broker_url_problem(self.broker_url, "--broker-url")]
        if not self.broker_cert_path:
            found.append("--broker-cert-path: required; set the flag or KUBELEND_BROKER_CERT_PATH")
        return [*filter(None, found)]

    def _cluster_problems(self) -> list[str]:
        found = []
        if self.source == "simulated" and not self.simulation:
            found.append("--simulation: required with --source=simulated")
        if self.source == "kubernetes":
            found += [
                f"{flags.flag_name(attribute)}: only valid with --source=simulated"
                for attribute in ("simulation", "objects_dir")
                if getattr(self, attribute)
            ]
        if self.peering == "liqoctl" and not self.kubeconfigs_dir:
            found.append("--kubeconfigs-dir: required with --peering=liqoctl")
        found += self._hold_problems()
        pairs = [pair for pair in self.labels.split(",") if pair]
        found += [f"--labels: {pair!r} is not KEY=VALUE" for pair in pairs if pair.find("=") < 1]
        return found

    def _hold_problems(self) -> list[str]:
        if self.hold == "none":
            return []
        found = []
        if self.source != "kubernetes":
            found.append("--hold: placeholders is only valid with --source=kubernetes")
        if not self.hold_priority_class.startswith(HOLD_CLASS_PREFIX):
            found.append(f"--hold-priority-class: must begin with {HOLD_CLASS_PREFIX}")
        return found

    def _value_problems(self) -> list[str]:
        """Validates what the broker or the API server would reject later."""
        found = []
        for attribute, check in _CHECKS.items():
            try:
                check(getattr(self, attribute))
            except InvalidInput as error:
                found.append(f"{flags.flag_name(attribute)}: {error}")
        return found

    def _out_of_range(self) -> list[str]:
        validity = self.advertisement_validity
        found = []
        if validity and validity < self.advertisement_requeue_interval:
            found.append(
                "--advertisement-validity: must be 0 or at least --advertisement-requeue-interval"
            )
        return found + flags.minimum_problems(self, _MINIMUM)


def _check_price(text: str) -> None:
    if text:
        prices.parse_price(text, "price")


def _check_namespace(text: str) -> None:
    if text:
        object_semantics.parse_object_key(f"{text}/any")


_CHECKS: dict[str, Callable[[str], object]] = {
    "cpu_cost": _check_price,
    "memory_cost": _check_price,
    "gpu_cost": _check_price,
    "storage_cost": _check_price,
    "currency": lambda text: prices.parse_currency(text, "currency"),
    "broker_namespace": _check_namespace,
    "advertisement_name": lambda text: object_semantics.parse_object_key(f"default/{text}"),
    "advertisement_namespace": lambda text: object_semantics.parse_object_key(f"{text}/any"),
    "instruction_namespace": _check_namespace,
    "request_namespace": _check_namespace,
    "liqo_namespace": lambda text: object_semantics.parse_object_key(f"{text}/any"),
}
_SHORTEST = timedelta(milliseconds=1)
_MINIMUM = {
    "broker_timeout": _SHORTEST,
    "advertisement_requeue_interval": timedelta(milliseconds=100),
    "advertisement_damping": timedelta(),
    "advertisement_validity": timedelta(),
    "instruction_poll_interval": timedelta(),
    "finished_for": timedelta(),
    "reclaim_after": timedelta(),
    "peering_timeout": _SHORTEST,
    "cleanup_timeout": timedelta(),
    "drain_timeout": timedelta(),
    "force_unpeer_after": _SHORTEST,
}
