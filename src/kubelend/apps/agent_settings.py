"""Settings of the agent: one attribute per flag.

Names and defaults of the flags of the published Go agent are kept; further flags are additions.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Literal

from kubelend.apps import settings
from kubelend.apps.flags import Address, Settings
from kubelend.core import durations, prices
from kubelend.core.errors import InvalidInput
from kubelend.sources import object_semantics

TRANSPORTS = ("http", "kubernetes", "")


class AgentSettings(Settings, frozen=True, kw_only=True):
    """Settings of the agent."""

    broker_transport: str = "http"
    """Transport to the broker: http, kubernetes, or empty for none (the agent only measures its cluster)."""

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
    """Directory with one YAML file per object, for --source=simulated. Empty keeps objects in memory."""

    request_namespace: str = ""
    """Namespace to watch for ResourceRequests, for --source=kubernetes. Empty watches all namespaces."""

    advertisement_name: str = "cluster-advertisement"
    """Name of the local Advertisement object."""

    advertisement_namespace: str = "default"
    """Namespace of the local Advertisement object."""

    instruction_namespace: str = ""
    """Namespace of ReservationInstructions and ProviderInstructions. Defaults to POD_NAMESPACE, then to
    --request-namespace. Without any of them, ProviderInstructions are in default and ReservationInstructions
    in the namespace of their ResourceRequest."""

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

    finished_for: timedelta = timedelta(minutes=10)
    """Time that instruction objects are retained after their reservation has ended."""

    peering: Literal["auto", "none", "liqoctl"] = "auto"
    """How to peer with a provider's cluster: liqoctl, none, or auto (liqoctl if --kubeconfigs-dir is set)."""

    kubeconfigs_dir: str = ""
    """Directory with one kubeconfig per provider, named by cluster ID, for peering with liqoctl."""

    liqoctl: str = "liqoctl"
    """Path of the liqoctl executable."""

    kubectl: str = "kubectl"
    """Path of the kubectl executable, used to get and delete ResourceSlices, for which liqoctl has no
    command."""

    peering_timeout: timedelta = timedelta(minutes=5)
    """Timeout of one run of liqoctl."""

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
                f"--broker-transport: {self.broker_transport!r} is not supported; use http,"
                " kubernetes, or an empty value for none"
            ]
        if self.broker_transport != "http":
            return []
        found = []
        if problem := settings.broker_url_problem(self.broker_url, "--broker-url"):
            found.append(problem)
        if not self.broker_cert_path:
            found.append("--broker-cert-path: required; set the flag or KUBELEND_BROKER_CERT_PATH")
        return found

    def _cluster_problems(self) -> list[str]:
        found = []
        if self.source == "simulated" and not self.simulation:
            found.append("--simulation: required with --source=simulated")
        if self.source == "kubernetes":
            for attribute, flag in _SIMULATION_FLAGS.items():
                if getattr(self, attribute):
                    found.append(f"{flag}: only valid with --source=simulated")
        if self.peering == "liqoctl" and not self.kubeconfigs_dir:
            found.append("--kubeconfigs-dir: required with --peering=liqoctl")
        pairs = [pair for pair in self.labels.split(",") if pair]
        found += [f"--labels: {pair!r} is not KEY=VALUE" for pair in pairs if pair.find("=") < 1]
        return found

    def _value_problems(self) -> list[str]:
        """Validates what the broker or the API server would reject later."""
        found = []
        for flag, check, text in (
            *(
                (f"--{name}-cost", _check_price, getattr(self, f"{name}_cost"))
                for name in _PRICED_RESOURCES
            ),
            ("--currency", _check_currency, self.currency),
            ("--broker-namespace", _check_name, f"{self.broker_namespace or 'default'}/any"),
            ("--advertisement-name", _check_name, f"default/{self.advertisement_name}"),
            ("--advertisement-namespace", _check_name, f"{self.advertisement_namespace}/any"),
            (
                "--instruction-namespace",
                _check_name,
                f"{self.instruction_namespace or 'default'}/any",
            ),
            ("--request-namespace", _check_name, f"{self.request_namespace or 'default'}/any"),
        ):
            try:
                check(text)
            except InvalidInput as error:
                found.append(f"{flag}: {error}")
        return found

    def _out_of_range(self) -> list[str]:
        validity = self.advertisement_validity
        found = []
        if validity and validity < self.advertisement_requeue_interval:
            found.append(
                "--advertisement-validity: must be 0 or at least --advertisement-requeue-interval"
            )
        return found + [
            f"--{attribute.replace('_', '-')}: must be at least {durations.format_duration_short(least)}"
            for attribute, least in _MINIMUM.items()
            if getattr(self, attribute) < least
        ]


def _check_price(text: str) -> None:
    if text:
        prices.parse_price(text, "price")


def _check_currency(text: str) -> None:
    prices.parse_currency(text, "currency")


def _check_name(key: str) -> None:
    object_semantics.parse_object_key(key)


_SIMULATION_FLAGS = {"simulation": "--simulation", "objects_dir": "--objects-dir"}
_PRICED_RESOURCES = ("cpu", "memory", "gpu", "storage")
_SHORTEST = timedelta(milliseconds=1)
_MINIMUM = {
    "broker_timeout": _SHORTEST,
    "advertisement_requeue_interval": timedelta(milliseconds=100),
    "advertisement_damping": timedelta(),
    "advertisement_validity": timedelta(),
    "instruction_poll_interval": timedelta(),
    "finished_for": timedelta(),
    "peering_timeout": _SHORTEST,
}
