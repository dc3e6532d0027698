"""The settings of each process: one attribute for each flag, with its unit, its default and why.

Flags, environment variables and help are made from these records by `apps.flags`. A record is built
once, by the command line or a test, and passed on explicitly.
"""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from kubelend.apps.flags import Address, Settings
from kubelend.core import durations
from kubelend.core.errors import InvalidSettings

DEFAULT_STORE = "kubelend.db"

_NAMESPACE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


class BrokerSettings(Settings, frozen=True, kw_only=True):
    """The broker."""

    broker_interface: str = "http"
    """How the broker is reached: http (the REST interface), kubernetes (objects), or http,kubernetes."""

    http_host: str = ""
    """Name or address to serve the REST interface on; all interfaces if empty."""

    http_port: int = 8443
    """Port of the REST interface; 0 takes any free one, and the log says which."""

    http_cert_path: Path | None = None
    """Directory with tls.crt, tls.key and ca.crt (whose clients are let in). Needed for http. Read again
    when they change."""

    http_namespace: str = "default"
    """Kubernetes namespace of the broker's objects, if --store names none."""

    kubeconfig: str = ""
    """Leads to the cluster of the broker's objects, if --store does not; else found as kubectl does, or in
    the pod."""

    mailboxes: bool = False
    """Attend to the mailboxes of agents that come by Kubernetes. It takes rights in all namespaces of the
    cluster to which --store or --kubeconfig leads; see docs/transports.md."""

    health_probe_bind_address: Address | None = Address("", 8081)
    """Where /healthz and /readyz answer without TLS, for probes; 0 turns it off."""

    metrics_bind_address: Address | None = Address("", 8080)
    """Where /metrics answers without TLS, for Prometheus; 0 turns it off."""

    trust_proxies: bool = False
    """Read Client-Cert (RFC 9440) from callers whose certificate has O=kubelend:proxy; else refuse them."""

    leader_elect: bool = False
    """Accepted for existing manifests: brokers on a store in Kubernetes always elect one, on a file there is
    only one."""

    leader_elect_identity: str = ""
    """How this broker calls itself to the others, each otherwise: its pod's name, for example. With the name
    of its predecessor it need not wait for that one's lease to end. Host and chance, if empty."""

    leader_elect_lease_duration: timedelta = timedelta(seconds=15)
    """How long the other brokers wait for a leader that says nothing more, until one of them leads."""

    leader_elect_renew_deadline: timedelta = timedelta(seconds=10)
    """How long a leader goes on that cannot renew its lease. Less than the lease's duration."""

    leader_elect_retry_period: timedelta = timedelta(seconds=2)
    """How often the lease is renewed, and looked at by the others. Less than the deadline."""

    leader_label_pod: str = ""
    """The pod to label kubelend.io/role=leader while this broker leads, and follower while it does not: its
    own, so that a Service can choose by it."""

    store: str = ""
    """Where the ledger is kept: a file, sqlite:///file, kubernetes:, or memory: (which forgets); kubelend.db
    if it is not said. With --broker-interface=kubernetes it is kubernetes: and can be no other."""

    stale_after: timedelta = timedelta(minutes=10)
    """How long an advertisement is believed after it arrived. A cluster may ask for less, not for more."""

    lost_after: timedelta = timedelta(minutes=5)
    """How long an advertisement has to be stale until what its cluster lends moves to others; 0: never.
    Time while the broker was down does not count. What fits nowhere else stays, and is tried again."""

    agent_timeout: timedelta = timedelta(seconds=90)
    """How long an agent may say nothing until another one may speak for its cluster. Three intervals of
    advertisements: with less, a slow one would lose its place."""

    default_duration: timedelta = timedelta(hours=1)
    """How long a reservation lasts that does not say. All end: a lost client locks nothing for ever."""

    max_duration: timedelta = timedelta(hours=720)
    """The longest duration to ask for at once; a renewal counts anew."""

    max_wait: timedelta = timedelta(hours=1)
    """The longest that a request may wait for capacity; 0 lets none wait."""

    max_waiting: int = 1000
    """How many requests may wait at a time; more are told to come later."""

    retention: timedelta = timedelta(hours=1)
    """How long a finished reservation stays in memory, and its idempotency key known. Then it is archived."""

    audit_retention: timedelta = timedelta(hours=2160)
    """How long the journal keeps its lines; 0 keeps all. What is cut off leaves where the chain stood."""

    grant_key: str = ""
    """PEM file with the Ed25519 key that signs grants, older ones behind it; if empty, beside the store."""

    rate_limit: int = 100
    """Calls per second that one cluster may make in the long run; 0 sets no limit."""

    rate_burst: int = 200
    """Calls that a cluster may make at once after a pause."""

    max_body_bytes: int = 262144
    """The longest body that is read, in bytes. An advertisement takes about 1000."""

    max_connections: int = 0
    """Connections kept open at a time; 0 takes what the limit of open files allows, and 16384 at most.
    For one more the longest idle one is closed, never one with a call in progress."""

    max_connections_per_caller: int = 256
    """Connections of one name, above --rate-burst. The proxies of --trust-proxies have no such limit."""

    max_handshakes: int = 1024
    """Unfinished TLS handshakes of one address; for one more the oldest is closed."""

    handshake_timeout: timedelta = timedelta(seconds=10)
    """How long a client may take for the TLS handshake."""

    read_timeout: timedelta = timedelta(seconds=10)
    """How long a client may take to send its headers, and again its body."""

    idle_timeout: timedelta = timedelta(seconds=75)
    """How long a connection is kept between calls. Above the interval of advertisements: saves handshakes."""

    shutdown_timeout: timedelta = timedelta(seconds=20)
    """How long calls that have begun may take to finish at the end. Kubernetes kills after 30s."""

    ca_path: str = ""
    """Directory of the authority (ca.crt and ca.key, or cert-manager's) that signs for those who join.
    Without one nobody can join, and certificates are made elsewhere. Read again when it changes."""

    ca_passphrase_file: str = ""
    """File with the passphrase of the authority's key; or KUBELEND_CA_PASSPHRASE."""

    enrol_port: int = 8444
    """Port where newcomers join, by token and without a certificate. Only there with --ca-path."""

    auto_accept: str = ""
    """Clusters that are let in with any token, by patterns with commas: edge-*,lab-?. Others wait for an
    administrator, unless the token is bound to their name."""

    allow_join: str = "*"
    """Clusters that may join at all, by patterns with commas."""

    certificate_lifetime: timedelta = timedelta(hours=8760)
    """How long the certificates are valid that this broker issues. They renew themselves."""

    certificate_check_interval: timedelta = timedelta(seconds=10)
    """How often the certificate files are looked at for changes."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least severe messages to log."""

    log_format: Literal["json", "console"] = "json"
    """One JSON object for each line, or text for people."""

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
    def ledger(self) -> str:
        """The store, which is where the objects are if these are served."""
        return self.store or (KUBERNETES if self.serves_objects else DEFAULT_STORE)

    @property
    def certificates(self) -> Path:
        """Of the REST interface, which cannot be without."""
        if self.http_cert_path is None:
            raise InvalidSettings(_NO_CERTIFICATES, hint="see --help")
        return self.http_cert_path

    def problems(self) -> list[str]:
        """All that is wrong with the values, a sentence each, beginning with the flag's name."""
        return [*self._unusable(), *self._out_of_range(), *self._contradictions()]

    def _unusable(self) -> list[str]:
        found = []
        if unknown := sorted(self.interfaces - {"http", "kubernetes"}):
            found.append(
                f"--broker-interface: {unknown[0]!r} is unknown; write http, kubernetes, or both with"
                " a comma"
            )
        if self.serves_http and self.http_cert_path is None:
            found.append(_NO_CERTIFICATES)
        if not _NAMESPACE.fullmatch(self.http_namespace):
            found.append(f"--http-namespace: {self.http_namespace!r} is no Kubernetes namespace")
        return found

    def _out_of_range(self) -> list[str]:
        found = [
            f"{_flag(attribute)}: must be from 0 to 65535"
            for attribute in ("http_port", "enrol_port")
            if not 0 <= getattr(self, attribute) <= 65535
        ]
        return found + [
            f"{_flag(attribute)}: must be at least {_text(least)}"
            for attribute, least in _LEAST.items()
            if getattr(self, attribute) < least
        ]

    def _contradictions(self) -> list[str]:
        found = []
        if self.serves_objects and not self.ledger.startswith(KUBERNETES):
            found.append(
                f"--store: {self.store} does not go with --broker-interface={self.broker_interface},"
                f" whose objects are the ledger; leave it out, or write {KUBERNETES}"
            )
        times = (
            self.leader_elect_retry_period,
            self.leader_elect_renew_deadline,
            self.leader_elect_lease_duration,
        )
        if not times[0] < times[1] < times[2]:
            found.append(
                "--leader-elect-renew-deadline: must be above --leader-elect-retry-period and below"
                " --leader-elect-lease-duration"
            )
        if self.ca_path and not self.serves_http:
            found.append("--ca-path: newcomers join by http, which --broker-interface leaves out")
        if self.default_duration > self.max_duration:
            found.append("--default-duration: must not be above --max-duration")
        if self.ca_path and self.enrol_port and self.enrol_port == self.http_port:
            found.append("--enrol-port: must not be --http-port")
        probes, metrics = self.health_probe_bind_address, self.metrics_bind_address
        if probes is not None and probes == metrics and probes.port:
            found.append(
                f"--metrics-bind-address: {metrics} is --health-probe-bind-address already"
            )
        for name, address in (
            ("--health-probe-bind-address", probes),
            ("--metrics-bind-address", metrics),
        ):
            if address == (self.http_host, self.http_port) and self.http_port:
                found.append(f"{name}: {address} is where the REST interface is served")
        return found


KUBERNETES = "kubernetes:"
"""How a store begins that is kept in objects."""

_NO_CERTIFICATES = "--http-cert-path: is needed, here or as KUBELEND_HTTP_CERT_PATH"

# A time of zero would end all at once, where it does not mean "none" or "off".
_MOMENT = timedelta(milliseconds=1)
_LEAST: dict[str, int | timedelta] = {
    "stale_after": _MOMENT,
    "lost_after": timedelta(),
    "agent_timeout": _MOMENT,
    "default_duration": _MOMENT,
    "max_duration": _MOMENT,
    "max_wait": timedelta(),
    "max_waiting": 0,
    "leader_elect_lease_duration": timedelta(seconds=1),
    "leader_elect_renew_deadline": _MOMENT,
    "leader_elect_retry_period": _MOMENT,
    "retention": timedelta(),
    "audit_retention": timedelta(),
    "rate_limit": 0,
    "rate_burst": 1,
    "max_body_bytes": 1024,
    "max_connections": 0,
    "max_connections_per_caller": 1,
    "max_handshakes": 1,
    "handshake_timeout": _MOMENT,
    "read_timeout": _MOMENT,
    "idle_timeout": _MOMENT,
    "shutdown_timeout": timedelta(),
    "certificate_lifetime": timedelta(seconds=10),
    "certificate_check_interval": _MOMENT,
}


class ClientSettings(Settings, frozen=True, kw_only=True):
    """Whoever calls a broker."""

    broker_url: str = "https://localhost:8443"
    """Address of the broker."""

    cert_path: Path
    """Directory with tls.crt, tls.key and ca.crt: who calls, and which broker is trusted."""

    timeout: timedelta = timedelta(seconds=30)
    """How long one call may take."""

    auto_renew: bool = True
    """Renew the certificate in --cert-path after a call, once a quarter of its life or less is left."""

    def problems(self) -> list[str]:
        """All that is wrong with the values, a sentence each, beginning with the flag's name."""
        found = [problem] if (problem := address_problem(self.broker_url, "--broker-url")) else []
        if self.timeout < _MOMENT:
            found.append(f"--timeout: must be at least {_text(_MOMENT)}")
        return found


class HolderSettings(Settings, frozen=True, kw_only=True):
    """Whoever looks at a certificate, without a broker."""

    cert_path: Path
    """Directory with tls.crt, tls.key and ca.crt."""


def address_problem(url: str, where: str) -> str:
    """What is wrong with the address of a broker, beginning with where it was given; empty if nothing."""
    if _is_address(url):
        return ""
    return f"{where}: {url!r} is no address of a broker; write https://broker.example.org:8443"


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return False
    plain = not (parts.query or parts.fragment or parts.username)
    return parts.scheme == "https" and bool(parts.hostname) and plain and port != 0


def _text(value: int | timedelta) -> str:
    return str(value) if isinstance(value, int) else durations.short(value)


def _flag(attribute: str) -> str:
    return "--" + attribute.replace("_", "-")
