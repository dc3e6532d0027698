"""The commands of `kubelend dev bench`, the targets, and the table that compares results with them.

A target applies to one size of a run: results of other sizes are printed without a verdict.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Annotated, NamedTuple

import msgspec
import typer

from kubelend.bench import agents as agent_bench
from kubelend.bench import broker
from kubelend.bench import peering as peering_bench
from kubelend.bench.measure import Figures
from kubelend.core.errors import InvalidSettings
from kubelend.envtest import assets
from kubelend.kits import tables
from kubelend.lab import background

app = typer.Typer(name="bench", help="Run benchmarks.", add_completion=False, rich_markup_mode=None)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Clusters = Annotated[int, typer.Option(help="Number of clusters.", min=1)]
Connections = Annotated[int, typer.Option(help="Number of concurrent clients.", min=1)]
Seconds = Annotated[float, typer.Option(help="Seconds to measure.", min=0.1)]
Interval = Annotated[
    float, typer.Option(help="Seconds between two advertisements of a cluster.", min=0.1)
]
Reservations = Annotated[int, typer.Option(help="Number of reservations in the store.", min=1)]

_KUBE_SIZE = broker.KubeSize()


@app.callback(invoke_without_command=True)
def bench(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command("all")
def measure_all(json: Json = False) -> None:
    """Run all benchmarks; exit code 1 if a target is missed."""
    results = {
        "decide": broker.measure_decide_sizes(broker.DECIDE_SIZES),
        "reserve": broker.measure_reserve(1_000, 32, 10.0),
        "advertise": broker.measure_advertise(10_000, 30.0, 30.0, direct=False),
        "overload": broker.measure_overload(1_000, 5.0),
        "restart": broker.measure_restart(100_000, 3),
        "agent": _measure_agent(3_000, 100, 30.0),
        "deliver": agent_bench.measure_deliver(200),
        "agents": agent_bench.measure_agents(1_000, 30.0),
    }
    if has_programs("kube", assets.locate_assets):
        results["kube"] = broker.measure_kube(_KUBE_SIZE)
    if has_programs("peering", partial(background.check_prerequisites, uses_liqo=True)):
        results["peering"] = peering_bench.measure_peering(20, 3)
    print(_to_json(results) if json else targets_table(results))
    if missed_targets(results):
        raise typer.Exit(1)


@app.command()
def decide(
    clusters: Annotated[
        int | None, typer.Option(help="Number of clusters; default: several sizes.", min=1)
    ] = None,
    json: Json = False,
) -> None:
    """Measure placement decisions without I/O, in microseconds."""
    found = broker.measure_decide_sizes(broker.DECIDE_SIZES if clusters is None else (clusters,))
    print(_to_json(found) if json else _decide_table(found["sizes"]))


@app.command()
def reserve(
    clusters: Clusters = 1_000,
    connections: Connections = 32,
    seconds: Seconds = 15.0,
    json: Json = False,
) -> None:
    """Measure durable reservations per second over mutual TLS."""
    _report("reserve", broker.measure_reserve(clusters, connections, seconds), json)


@app.command()
def advertise(
    clusters: Clusters = 10_000,
    interval: Interval = 30.0,
    seconds: Annotated[
        float | None,
        typer.Option(help="Seconds to measure; default: one interval.", min=0.1),
    ] = None,
    direct: Annotated[
        bool, typer.Option("--direct", help="Connect each cluster directly, without a proxy.")
    ] = False,
    json: Json = False,
) -> None:
    """Measure CPU and memory of a broker with many clusters."""
    window = interval if seconds is None else seconds
    _report("advertise", broker.measure_advertise(clusters, interval, window, direct=direct), json)


@app.command()
def overload(
    clusters: Clusters = 1_000,
    seconds: Annotated[float, typer.Option(help="Seconds for each route.", min=0.1)] = 5.0,
    json: Json = False,
) -> None:
    """Measure calls of one cluster while another sends the most expensive requests that are allowed."""
    _report("overload", broker.measure_overload(clusters, seconds), json)


@app.command()
def restart(
    reservations: Reservations = 100_000,
    starts: Annotated[int, typer.Option(help="Number of starts; reports the median.", min=1)] = 3,
    json: Json = False,
) -> None:
    """Measure the start-up time of a broker with a large store."""
    _report("restart", broker.measure_restart(reservations, starts), json)


@app.command()
def agent(
    pods: Annotated[int, typer.Option(help="Number of pods in its cluster.", min=1)] = 3_000,
    nodes: Annotated[int, typer.Option(help="Number of nodes in its cluster.", min=1)] = 100,
    seconds: Seconds = 30.0,
    json: Json = False,
) -> None:
    """Measure CPU and memory of an agent, and of one that peers and holds lent resources."""
    _report("agent", _measure_agent(pods, nodes, seconds), json)


@app.command()
def deliver(
    count: Annotated[int, typer.Option(help="Number of instructions.", min=1)] = 200,
    json: Json = False,
) -> None:
    """Measure the latency until a provider's agent has stored a ProviderInstruction."""
    _report("deliver", agent_bench.measure_deliver(count), json)


@app.command()
def agents(
    count: Annotated[int, typer.Option(help="Number of agents.", min=1)] = 1_000,
    seconds: Seconds = 30.0,
    json: Json = False,
) -> None:
    """Measure CPU and memory of a broker with many agents, and missed instructions."""
    _report("agents", agent_bench.measure_agents(count, seconds), json)


@app.command()
def kube(
    clusters: Clusters = _KUBE_SIZE.clusters,
    connections: Connections = _KUBE_SIZE.connections,
    reservations: Annotated[
        int, typer.Option(help="Number of reservations to create.", min=1)
    ] = _KUBE_SIZE.reservations,
    idle_seconds: Annotated[
        float, typer.Option(help="Seconds to measure an idle broker.", min=0.1)
    ] = _KUBE_SIZE.idle_seconds,
    advertisements: Annotated[
        int, typer.Option(help="Number of advertisements in the store at start-up.", min=1)
    ] = _KUBE_SIZE.advertisements,
    history: Annotated[
        int, typer.Option(help="Number of reservations in the store at start-up.", min=0)
    ] = _KUBE_SIZE.history,
    json: Json = False,
) -> None:
    """Measure rates, writes and start-up time of a broker with a Kubernetes store."""
    size = broker.KubeSize(
        clusters, connections, reservations, idle_seconds, advertisements, history
    )
    _report("kube", broker.measure_kube(size), json)


@app.command()
def peering(
    reservations: Annotated[
        int, typer.Option(help="Number of reservations on one peering.", min=1)
    ] = 20,
    firsts: Annotated[int, typer.Option(help="Number of new peerings.", min=1)] = 3,
    json: Json = False,
) -> None:
    """Measure the time until the node of a reservation is ready, beside Liqo alone."""
    _report("peering", peering_bench.measure_peering(reservations, firsts), json)


def _measure_agent(pods: int, nodes: int, seconds: float) -> Figures:
    found = agent_bench.measure_agent(pods, nodes, seconds)
    if not has_programs("an agent with peering", assets.locate_assets, assets.find_liqo_assets):
        return found
    return found | peering_bench.measure_peering_agent(pods, nodes, seconds)


def has_programs(name: str, *checks: Callable[[], object]) -> bool:
    """Whether this part can be measured here; prints why not."""
    try:
        for check in checks:
            check()
    except InvalidSettings as error:
        print(f"skipping {name}: {error}", file=sys.stderr)
        return False
    return True


def _decide_table(sizes: Iterable[Figures]) -> str:
    rows = [
        (f"{one['clusters']:,}", f"{one['small_us']:.1f} us", f"{one['large_us']:.1f} us")
        for one in sizes
    ]
    headers = ("CLUSTERS", "SMALL REQUESTS", "LARGE REQUESTS")
    return "\n".join(tables.align_columns(headers, rows, right=range(3)))


def _report(name: str, result: Figures, json: bool) -> None:
    print(_to_json(result) if json else targets_table({name: result}))


def _to_json(result: object) -> str:
    return msgspec.json.encode(result).decode()


class Target(NamedTuple):
    """One row of the table: a figure, and its limit if it has one."""

    bench: str
    key: str
    description: str
    """Description; may contain other figures as placeholders, such as the size of the run."""
    at_most: float | None = None
    at_least: float | None = None

    @property
    def limit(self) -> str:
        if self.at_most is not None:
            return f"<= {format_number(self.at_most)}"
        return "" if self.at_least is None else f">= {format_number(self.at_least)}"

    def verdict(self, figures: Figures) -> str:
        """Empty for a figure without limit, or for a run of another size."""
        is_full_size = all(figures[key] == size for key, size in FULL_SIZE[self.bench].items())
        if not self.limit or not is_full_size:
            return ""
        value = figures[self.key]
        # NaN never meets a limit.
        is_met = (self.at_most is None or value <= self.at_most) and (
            self.at_least is None or value >= self.at_least
        )
        return "ok" if is_met else "missed"

    def cells(self, figures: Figures) -> tuple[str, ...]:
        what, value = self.description.format_map(figures), format_number(figures[self.key])
        return self.bench, what, value, self.limit, self.verdict(figures)


FULL_SIZE: Mapping[str, Mapping[str, float]] = {
    "decide": {"clusters": 10_000},
    "reserve": {"clusters": 1_000, "connections": 32},
    "advertise": {"clusters": 10_000, "interval": 30},
    "overload": {"clusters": 1_000},
    "restart": {"reservations": 100_000},
    "agent": {"pods": 3_000, "nodes": 100},
    "deliver": {"count": 200},
    "agents": {"count": 1_000},
    "kube": {"clusters": 100, "connections": 32},
    "peering": {"reservations": 20, "firsts": 3},
}
"""Sizes to which the limits apply."""

TARGETS = (
    Target("decide", "us_per_decision", "us per decision, {clusters:,} clusters", at_most=100),
    Target(
        "reserve", "reservations_per_s", "durable reservations per second, {connections} clients"
    ),
    Target("reserve", "constant_per_s", "repeated identical requests per second"),
    Target("reserve", "ratio", "ratio of the two rates", at_least=0.5),
    Target("reserve", "healthz_per_s", "/healthz requests per second, for comparison"),
    Target("reserve", "p50_ms", "ms latency of a reservation, p50"),
    Target("reserve", "p99_ms", "ms latency of a reservation, p99"),
    Target("reserve", "violations", "violations found by the audit", at_most=0),
    Target(
        "advertise",
        "cpu_percent",
        "% of a core, {clusters:,} clusters, {interval:g} s, {path}",
        at_most=15,
    ),
    Target("advertise", "rss_mb", "MB of memory, same run", at_most=200),
    Target("overload", "p99_ms", "ms of others, p99, during {worst}", at_most=50),
    Target("restart", "seconds", "s until ready, {reservations:,} reservations", at_most=3),
    Target("agent", "rss_mb", "MB of memory of an agent, {pods:,} pods", at_most=50),
    Target("agent", "cpu_percent", "% of a core, {events_per_s:.0f} pod events per second"),
    Target("agent", "peering_rss_mb", "MB of memory with peering and placeholders", at_most=50),
    Target("agent", "peering_cpu_percent", "% of a core, same agent"),
    Target("deliver", "p50_ms", "ms to the provider, p50 of {count:,} instructions", at_most=50),
    Target("deliver", "p99_ms", "ms to the provider, p99", at_most=250),
    Target("agents", "missed", "instructions missed by {count:,} agents", at_most=0),
    Target("agents", "cpu_percent", "% of a core, broker"),
    Target("agents", "rss_mb", "MB of memory, broker"),
    Target("agents", "p50_ms", "ms to the provider, p50 of {reservations:,} instructions"),
    Target("agents", "p99_ms", "ms to the provider, p99"),
    Target("kube", "reservations_per_s", "reservations per second, {connections} clients"),
    Target("kube", "ratio", "ratio to bare writes of the same objects", at_least=1),
    Target("kube", "p50_ms", "ms latency, p50 of {reservations:,} reservations"),
    Target("kube", "p99_ms", "ms latency, p99"),
    Target("kube", "writes_per_reservation", "writes per reservation", at_most=3),
    Target(
        "kube",
        "advertisements_written_seconds",
        "s until {clusters} first advertisements are written",
    ),
    Target("kube", "floor_advertisements_seconds", "s for bare writes of the same objects"),
    Target("kube", "idle_writes_per_minute", "writes per minute when idle", at_most=0),
    Target("kube", "start_seconds", "s until ready, {history:,} reservations"),
    Target("kube", "violations", "violations found by the audit", at_most=0),
    Target("peering", "first_ready_ms", "ms to the first node, p50 of {firsts} peerings"),
    Target("peering", "liqo_first_ready_ms", "ms to the first node, Liqo alone"),
    Target("peering", "first_ratio", "first node, relative to Liqo alone", at_most=1.2),
    Target("peering", "next_ready_ms", "ms to the next node, p50 of {reservations:,}"),
    Target("peering", "liqo_next_ready_ms", "ms to the next node, Liqo alone"),
    Target("peering", "next_ratio", "next node, relative to Liqo alone", at_most=1.2),
)

HEADERS = ("BENCH", "WHAT", "MEASURED", "TARGET", "")


def missed_targets(results: Mapping[str, Figures]) -> list[Target]:
    """Returns the targets that the benchmarks that ran have missed."""
    return [
        target
        for target in _measured_targets(results)
        if target.verdict(results[target.bench]) == "missed"
    ]


def _measured_targets(results: Mapping[str, Figures]) -> list[Target]:
    """Without those of parts that were skipped."""
    return [target for target in TARGETS if target.key in results.get(target.bench, {})]


def targets_table(results: Mapping[str, Figures]) -> str:
    """Formats a row per target of the benchmarks that ran."""
    rows = [target.cells(results[target.bench]) for target in _measured_targets(results)]
    return "\n".join(tables.align_columns(HEADERS, rows, right=[2]))


def format_number(value: float) -> str:
    """Formats a number with three significant digits: 12,345, 123, 12.3, 0.51."""
    if value >= 100 or float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
