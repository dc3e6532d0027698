"""`kubelend dev bench kube`: what it costs to keep everything in Kubernetes, on a real API server.

A broker with both interfaces and its store in a lab's cluster; clusters advertise and requesters reserve over
mutual TLS. How often it writes is what the API server has counted, from before the first reservation until
nothing is written any more: so what its controllers show afterwards is in it. Then it is left alone, and may
write nothing. At last another broker starts on a long history.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

import msgspec

from kubelend.apps import trials
from kubelend.apps.trials import Trial
from kubelend.bench import (
    api_writes,
    audits,
    fleets,
    histories,
    loads,
    progress,
    requests,
    running,
    strategies,
    timings,
)
from kubelend.bench.api_writes import Writes
from kubelend.bench.identities import Identities
from kubelend.bench.loads import Load
from kubelend.bench.strategies import Direct
from kubelend.core import models
from kubelend.core.errors import InvalidSettings, KubelendError, Unavailable
from kubelend.kits import clock
from kubelend.lab import assets, manifests, servers
from kubelend.lab.clusters import Cluster

_SILENCE = 3.0
"""Seconds in which nothing is written, after which nothing is going to be: longer than controllers pause."""
_SILENT_WITHIN = 60.0


class Size(msgspec.Struct, frozen=True):
    """How much of everything."""

    clusters: int = 100
    connections: int = 32
    reservations: int = 1_000
    idle_seconds: float = 20.0
    advertisements: int = 1_000
    """In the history that a broker starts on."""
    history: int = 10_000
    """Its reservations."""


class Result(msgspec.Struct, frozen=True):
    """The keys are API."""

    kubernetes: str
    """The server's version."""
    clusters: int
    connections: int
    reservations: int
    reservations_per_s: float
    p50_ms: float
    p99_ms: float
    writes_per_reservation: float
    writes: dict[str, float]
    """The same by what was done to what."""
    idle_seconds: float
    idle_writes_per_minute: float
    advertisements: int
    history: int
    start_seconds: float
    """From the start of the process until /readyz says ok."""
    violations: int


def lacking() -> str:
    """Why there is no API server to be had here; empty if there is."""
    try:
        assets.locate()
    except InvalidSettings as error:
        return str(error)
    return ""


def measure(size: Size) -> Result:
    """`InvalidSettings` where something is `lacking`."""
    found = assets.find()
    with (
        trials.trial() as trial,
        servers.running(found, trial.directory / "lab", durable=True) as lab,
    ):
        progress.say("kube: starting an API server")
        [cluster] = lab.start("bench")
        manifests.install_kinds(cluster)
        use = _use(trial, _Home(cluster, "load"), size)
        seconds = _start(trial, _Home(cluster, "history"), size)
    progress.done()
    return _result(str(found.version), size, use, seconds)


class _Home:
    """A namespace of the cluster, for one broker."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster = cluster
        self.store = f"kubernetes://{cluster.admin_kubeconfig}?namespace={namespace}"
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
        cluster.call("POST", "/api/v1/namespaces", msgspec.json.encode(body))

    @property
    def flags(self) -> tuple[str, ...]:
        return f"--store={self.store}", "--broker-interface=http,kubernetes", "--rate-limit=0"

    def writes(self) -> Writes:
        return api_writes.count(self.cluster.call("GET", "/metrics").decode())

    def quiet(self) -> Writes:
        """Wait until nothing more is written; gives what was until then."""
        deadline = time.perf_counter() + _SILENT_WITHIN
        before, now = Counter[str](), self.writes()
        while before != now:
            if time.perf_counter() > deadline:
                raise Unavailable("the broker does not stop writing", hint=_shown(now - before))
            time.sleep(_SILENCE)
            before, now = now, self.writes()
        return now


class Use(msgspec.Struct, frozen=True):
    """What a broker went through, and what it wrote for it."""

    load: Load
    writes: Writes
    idle_writes: Writes
    idle_seconds: float
    violations: int

    @property
    def reservations(self) -> int:
        return len(self.load.answers)


def _use(trial: Trial, home: _Home, size: Size) -> Use:
    certificates = [trial.certificate(f"requester-{n}") for n in range(size.connections)]
    with trial.broker(*home.flags) as broker:
        broker.wait_until_ready()
        _join(trial, broker.port, size.clusters)
        before = home.quiet()
        progress.say(f"kube: {size.reservations:,} reservations")
        load = running.run(loads.reserve(broker.port, certificates, size.reservations))
        progress.say("kube: waiting until all is written")
        after = home.quiet()
        progress.say(f"kube: {size.idle_seconds:g} s without anything to do")
        began = time.perf_counter()
        time.sleep(size.idle_seconds)
        idle, idle_seconds = home.writes() - after, time.perf_counter() - began
    progress.say("kube: checking the store")
    violations = audits.violations(home.store, load.answers)
    return Use(load, after - before, idle, idle_seconds, violations)


def _join(trial: Trial, port: int, count: int) -> None:
    known = fleets.clusters(count, clock.utc_now(), all_open=True)
    identities = Identities(trial, [cluster.id for cluster in known])
    list(identities.issue())
    running.run(_advertise(Direct(port, identities.context), known))


async def _advertise(direct: Direct, known: Sequence[models.Cluster]) -> None:
    try:
        messages = [requests.advertisement(cluster) for cluster in known]
        await strategies.send_each(direct, messages, "kube")
    finally:
        direct.close()


def _start(trial: Trial, home: _Home, size: Size) -> float:
    progress.say(f"kube: writing {size.history:,} reservations")
    now = clock.utc_now()
    histories.write(home.store, fleets.clusters(size.advertisements, now), size.history, now)
    progress.say("kube: starting on them")
    with trial.broker(*home.flags) as broker:
        seconds = broker.wait_until_ready()
        if broker.loaded() != size.history:
            raise KubelendError(f"the broker loaded {broker.loaded()} reservations")
    return seconds


def _result(version: str, size: Size, use: Use, seconds: float) -> Result:
    latencies = use.load.latencies
    return Result(
        kubernetes=version,
        clusters=size.clusters,
        connections=size.connections,
        reservations=use.reservations,
        reservations_per_s=round(use.load.per_second, 1),
        p50_ms=round(timings.percentile(latencies, 50) * 1000, 2),
        p99_ms=round(timings.percentile(latencies, 99) * 1000, 2),
        writes_per_reservation=round(use.writes.total() / use.reservations, 3),
        writes=api_writes.each(use.writes, use.reservations),
        idle_seconds=round(use.idle_seconds, 1),
        idle_writes_per_minute=round(60 * use.idle_writes.total() / use.idle_seconds, 1),
        advertisements=size.advertisements,
        history=size.history,
        start_seconds=round(seconds, 3),
        violations=use.violations,
    )


def _shown(writes: Writes) -> str:
    return ", ".join(f"{number} {name}" for name, number in writes.most_common())
