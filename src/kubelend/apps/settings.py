"""Settings of the broker and of clients: one attribute per flag.

`apps.flags` derives the flags, environment variables and help texts from these classes. The command line
or a test builds an instance once and passes it on explicitly.
"""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from kubelend.apps import flags
from kubelend.apps.flags import Address, Settings
from kubelend.core.errors import InvalidSettings

DEFAULT_STORE = "kubelend.db"

_NAMESPACE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


class BrokerSettings(Settings, frozen=True, kw_only=True):
    """Settings of the broker."""

    broker_interface: str = "http"
    """Interfaces to serve: http (REST), kubernetes (custom resources), or http,kubernetes."""

    http_host: str = ""
    """Host name or address the REST interface binds to. Empty binds to all interfaces."""

    http_port: int = 8443
    """Port of the REST interface. 0 selects a free port, which is logged."""

    http_cert_path: Path | None = None
    """Directory with tls.crt, tls.key and ca.crt (the CA that verifies client certificates). Required for
    http. Reloaded on change."""

    http_namespace: str = "default"
    """Kubernetes namespace of the broker's objects, unless --store contains one."""

    kubeconfig: str = ""
    """Kubeconfig of the cluster that holds the broker's objects, unless --store contains one. Empty uses
    KUBECONFIG, the pod's service account or ~/.kube/config."""

    cluster_namespaces: bool = False
    """Serve agents that use --broker-transport=kubernetes, through a namespace per cluster. Requires
    cluster-wide RBAC in the cluster of --store or --kubeconfig; see docs/transports.md."""

    health_probe_bind_address: Address | None = Address("", 8081)
    """Address that serves /healthz and /readyz without TLS. 0 disables it."""

    metrics_bind_address: Address | None = Address("", 8080)
    """Address that serves /metrics without TLS. 0 disables it."""

    trust_proxies: bool = False
    """Accept the Client-Cert header (RFC 9440) from callers whose certificate has O=kubelend:proxy.
    Otherwise such callers are rejected."""

    leader_elect: bool = False
    """Accepted for compatibility and ignored: brokers with a Kubernetes store always elect a leader, and a
    file store allows one broker only."""

    leader_elect_identity: str = ""
    """Identity in the leader election; must be unique, for example the pod's name. A broker that reuses the
    identity of its predecessor need not wait for the lease to expire. Empty: host name and random suffix."""

    leader_elect_lease_duration: timedelta = timedelta(seconds=15)
    """Time that followers wait after the leader's last renewal before they try to acquire the lease."""

    leader_elect_renew_deadline: timedelta = timedelta(seconds=10)
    """Time that the leader keeps trying to renew its lease before it steps down. Must be less than
    --leader-elect-lease-duration."""

    leader_elect_retry_period: timedelta = timedelta(seconds=2)
    """Interval between attempts to acquire or renew the lease. Must be less than
    --leader-elect-renew-deadline."""

    leader_label_pod: str = ""
    """Name of this broker's pod. It is labelled kubelend.io/role=leader or follower, so that a Service can
    select the leader. Empty sets no label."""

    store: str = ""
    """Where state is stored: a file path, sqlite:///PATH, kubernetes: or memory: (lost at exit). Defaults to
    kubelend.db, or to kubernetes: if --broker-interface contains kubernetes, which requires it."""

    stale_after: timedelta = timedelta(minutes=10)
    """Time after which an advertisement is stale, counted from its arrival. A cluster can request a shorter
    time, not a longer one."""

    lost_after: timedelta = timedelta(minutes=5)
    """Time that an advertisement must be stale before the provider's reservations fail over to other
    clusters; 0 disables failover. Downtime of the broker does not count. Reservations that fit nowhere else
    stay and are retried."""

    agent_timeout: timedelta = timedelta(seconds=90)
    """Time without a call from the active agent of a cluster after which another agent can take over. Should
    be at least three advertisement intervals."""

    default_duration: timedelta = timedelta(hours=1)
    """Duration of a reservation whose request does not set one. Every reservation expires."""

    max_duration: timedelta = timedelta(hours=720)
    """Maximum duration of a request or a renewal."""

    max_wait: timedelta = timedelta(hours=1)
    """Maximum time a request can wait for capacity. 0 disables waiting."""

    max_waiting: int = 1000
    """Maximum number of waiting requests. Further ones are rejected with 429."""

    max_waiting_per_requester: int = 100
    """Maximum number of waiting requests of one cluster. Further ones are rejected with 429."""

    explain_others: Literal["names", "counts", "none"] = "counts"
    """What clusters learn about others when a request does not fit and in explain: names with rejection
    reasons, prices and missing amounts; the number of clusters by reason and one suggestion; or none.
    Viewers and administrators see everything."""

    retention: timedelta = timedelta(hours=1)
    """Time that a finished reservation and its idempotency key stay in memory before it is archived."""

    audit_retention: timedelta = timedelta(hours=2160)
    """Time that audit log entries are retained; 0 retains all. Truncation records the head of the removed
    chain, so that the rest can still be verified."""

    grant_key: str = ""
    """PEM file with the Ed25519 key that signs grants, followed by older keys. Empty stores it next to the
    store."""

    rate_limit: int = 100
    """Sustained number of calls per second per cluster; large ones count as several. 0 disables the limit."""

    rate_burst: int = 200
    """Number of calls that a cluster can make in a burst."""

    max_body_bytes: int = 262144
    """Maximum size of a request body in bytes. An advertisement has about 1000."""

    max_connections: int = 0
    """Maximum number of open connections. 0 uses the limit of open files, up to 16384. At the limit, the
    longest idle connection is closed; connections with a call in progress are kept."""

    max_connections_per_caller: int = 256
    """Maximum number of connections per client name. Should be above --rate-burst. Does not apply to the
    proxies of --trust-proxies."""

    max_handshakes: int = 512
    """Maximum number of unfinished TLS handshakes, which take 53 KB each. At the limit, addresses of clients
    that have authenticated before come first, then those with fewer handshakes."""

    handshake_timeout: timedelta = timedelta(seconds=10)
    """Timeout of the TLS handshake."""

    read_timeout: timedelta = timedelta(seconds=10)
    """Timeout for reading the request headers, and again for reading the body."""

    idle_timeout: timedelta = timedelta(seconds=75)
    """Time after which an idle connection is closed. Longer than the advertisement interval, which saves TLS
    handshakes."""

    shutdown_timeout: timedelta = timedelta(seconds=20)
    """Time that calls in progress get to finish at shutdown. Kubernetes kills the container after 30s."""

    ca_path: str = ""
    """Directory of the CA (ca.crt and ca.key, or a cert-manager Secret) that issues certificates to clusters
    that join. Empty disables enrolment. Reloaded on change."""

    ca_passphrase_file: str = ""
    """File with the passphrase of the CA key. Alternative to KUBELEND_CA_PASSPHRASE."""

    enrol_port: int = 8444
    """Port of the enrolment interface, where clusters join with a token. Requires --ca-path."""

    auto_approve: str = ""
    """Clusters that join without approval, as comma-separated patterns: edge-*,lab-?. Others wait for an
    administrator, unless their token is bound to their name."""

    allow_join: str = "*"
    """Clusters that are allowed to join, as comma-separated patterns."""

    certificate_lifetime: timedelta = timedelta(hours=8760)
    """Validity of issued certificates. Agents and clients renew them automatically."""

    certificate_check_interval: timedelta = timedelta(seconds=10)
    """Interval between checks of the certificate files for changes."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Minimum severity of log messages."""

    log_format: Literal["json", "console"] = "json"
    """Log format: JSON lines, or text for a terminal."""

    @property
    def interfaces(self) -> frozenset[str]:
        return frozenset(part.strip() for part in self.broker_interface.split(","))

    @property
    def serves_http(self) -> bool:
        return "http" in self.interfaces

    @property
    def serves_objects(self) -> bool:
        return "kubernetes" in self.interfaces

    @property
    def store_url(self) -> str:
        """The effective store: `--store` or its default."""
        return self.store or (KUBERNETES_PREFIX if self.serves_objects else DEFAULT_STORE)

    @property
    def certificate_directory(self) -> Path:
        """Directory with the certificates of the REST interface, which requires them."""
        if self.http_cert_path is None:
            raise InvalidSettings(_NO_CERTIFICATES, hint="see --help")
        return self.http_cert_path

    def problems(self) -> list[str]:
        """Returns one sentence per invalid value, beginning with the flag's name."""
        return [*self._unsupported_values(), *self._out_of_range(), *self._contradictions()]

    def _unsupported_values(self) -> list[str]:
        found = []
        if unknown := sorted(self.interfaces - {"http", "kubernetes"}):
            found.append(
                f"--broker-interface: {unknown[0]!r} is not supported; use http, kubernetes or"
                " http,kubernetes"
            )
        if self.serves_http and self.http_cert_path is None:
            found.append(_NO_CERTIFICATES)
        if not _NAMESPACE.fullmatch(self.http_namespace):
            found.append(
                f"--http-namespace: {self.http_namespace!r} is not a valid Kubernetes namespace"
            )
        return found

    def _out_of_range(self) -> list[str]:
        found = [
            f"{flags.flag_name(attribute)}: must be from 0 to 65535"
            for attribute in ("http_port", "enrol_port")
            if not 0 <= getattr(self, attribute) <= 65535
        ]
        return found + flags.minimum_problems(self, _MINIMUM)

    def _contradictions(self) -> list[str]:
        found = []
        if self.serves_objects and not self.store_url.startswith(KUBERNETES_PREFIX):
            found.append(
                f"--store: {self.store} cannot be used with --broker-interface={self.broker_interface},"
                f" which requires {KUBERNETES_PREFIX}"
            )
        retry, deadline = self.leader_elect_retry_period, self.leader_elect_renew_deadline
        if not retry < deadline < self.leader_elect_lease_duration:
            found.append(
                "--leader-elect-renew-deadline: must be above --leader-elect-retry-period and below"
                " --leader-elect-lease-duration"
            )
        if self.ca_path and not self.serves_http:
            found.append("--ca-path: enrolment requires http in --broker-interface")
        if self.default_duration > self.max_duration:
            found.append("--default-duration: must not be above --max-duration")
        if self.ca_path and self.enrol_port and self.enrol_port == self.http_port:
            found.append("--enrol-port: must differ from --http-port")
        probes, metrics = self.health_probe_bind_address, self.metrics_bind_address
        if probes is not None and probes == metrics and probes.port:
            found.append(
                f"--metrics-bind-address: {metrics} is already used by --health-probe-bind-address"
            )
        for name, address in (
            ("--health-probe-bind-address", probes),
            ("--metrics-bind-address", metrics),
        ):
            if address == (self.http_host, self.http_port) and self.http_port:
                found.append(f"{name}: {address} is already used by the REST interface")
        return found


KUBERNETES_PREFIX = "kubernetes:"
"""Prefix of a `--store` value for the Kubernetes store."""

_NO_CERTIFICATES = "--http-cert-path: required; set the flag or KUBELEND_HTTP_CERT_PATH"

# Where 0 does not mean "disabled", a zero duration would expire immediately.
_SHORTEST = timedelta(milliseconds=1)
_MINIMUM: dict[str, int | timedelta] = {
    "stale_after": _SHORTEST,
    "lost_after": timedelta(),
    "agent_timeout": _SHORTEST,
    "default_duration": _SHORTEST,
    "max_duration": _SHORTEST,
    "max_wait": timedelta(),
    "max_waiting": 0,
    "max_waiting_per_requester": 0,
    "leader_elect_lease_duration": timedelta(seconds=1),
    "leader_elect_renew_deadline": _SHORTEST,
    "leader_elect_retry_period": _SHORTEST,
    "retention": timedelta(),
    "audit_retention": timedelta(),
    "rate_limit": 0,
    "rate_burst": 1,
    "max_body_bytes": 1024,
    "max_connections": 0,
    "max_connections_per_caller": 1,
    "max_handshakes": 1,
    "handshake_timeout": _SHORTEST,
    "read_timeout": _SHORTEST,
    "idle_timeout": _SHORTEST,
    "shutdown_timeout": timedelta(),
    "certificate_lifetime": timedelta(seconds=10),
    "certificate_check_interval": _SHORTEST,
}


class ClientSettings(Settings, frozen=True, kw_only=True):
    """Settings of a client of the broker."""

    broker_url: str = "https://localhost:8443"
    """URL of the broker."""

    cert_path: Path
    """Directory with the client certificate: tls.crt, tls.key, and ca.crt to verify the broker."""

    timeout: timedelta = timedelta(seconds=30)
    """Timeout of a call."""

    auto_renew: bool = True
    """Renew the certificate in --cert-path after a call when a quarter of its lifetime or less is left."""

    def problems(self) -> list[str]:
        """Returns one sentence per invalid value, beginning with the flag's name."""
        url_problem = broker_url_problem(self.broker_url, "--broker-url")
        too_short = flags.minimum_problems(self, {"timeout": _SHORTEST})
        return [*filter(None, [url_problem]), *too_short]


class CertificateSettings(Settings, frozen=True, kw_only=True):
    """Settings of commands that only read a certificate directory."""

    cert_path: Path
    """Directory with tls.crt, tls.key and ca.crt."""


def broker_url_problem(url: str, flag: str) -> str:
    """Returns the error of an invalid broker URL, prefixed with the flag; empty if it is valid."""
    try:
        parts = urlsplit(url)
        is_plain = not (parts.query or parts.fragment or parts.username)
        if parts.scheme == "https" and parts.hostname and is_plain and parts.port != 0:
            return ""
    except ValueError:
        pass
    return f"{flag}: {url!r} is not a broker URL; use the form https://broker.example.org:8443"
