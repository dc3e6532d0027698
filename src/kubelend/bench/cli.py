"""The commands of `kubelend dev bench`, the targets, and the table that compares results with them.

A target applies to one size of a run: results of other sizes are printed without a verdict.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import msgspec
import typer

from kubelend.bench import advertise as advertising
from kubelend.bench import agent as agent_process
from kubelend.bench import agents as many_agents
from kubelend.bench import decide as deciding
from kubelend.bench import deliver as delivering
from kubelend.bench import kube as in_kubernetes
from kubelend.bench import reserve as reserving
from kubelend.bench import restart as restarting
from kubelend.bench import targets
from kubelend.kits import columns

app = typer.Typer(name="bench", help="Run benchmarks.", add_completion=False, rich_markup_mode=None)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Clusters = Annotated[int, typer.Option(help="Number of clusters.", min=1)]
Connections = Annotated[int, typer.Option(help="Number of concurrent clients.", min=1)]
Seconds = Annotated[float, typer.Option(help="Seconds to measure.", min=0.1)]
Interval = Annotated[
    float, typer.Option(help="Seconds between two advertisements of a cluster.", min=0.1)
]
Reservations = Annotated[int, typer.Option(help="Number of reservations in the store.", min=1)]

_KUBE_SIZE = in_kubernetes.KubeSize()


@app.callback(invoke_without_command=True)
def bench(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command("all")
def measure_all(json: Json = False) -> None:
    """Run all benchmarks; exit code 1 if a target is missed."""
    results = {
        "decide": _figures(deciding.measure_decide_sizes(deciding.DECIDE_SIZES)),
        "reserve": _figures(reserving.measure_reserve(1_000, 32, 10.0)),
        "advertise": _figures(advertising.measure_advertise(10_000, 30.0, 30.0, direct=False)),
        "restart": _figures(restarting.measure_restart(100_000, 3)),
        "agent": _figures(agent_process.measure_agent(3_000, 100, 30.0)),
        "deliver": _figures(delivering.measure_deliver(200)),
        "agents": _figures(many_agents.measure_agents(1_000, 30.0)),
        **_measure_kube_if_possible(),
    }
    lines = targets.compare_with_targets(results)
    print(_to_json(results) if json else targets.targets_table(lines))
    if targets.missed_targets(lines):
        raise typer.Exit(1)


@app.command()
def decide(
    clusters: Annotated[
        int | None, typer.Option(help="Number of clusters; default: several sizes.", min=1)
    ] = None,
    json: Json = False,
) -> None:
    """Measure placement decisions without I/O, in microseconds."""
    found = deciding.measure_decide_sizes(
        deciding.DECIDE_SIZES if clusters is None else (clusters,)
    )
    _print_result(found, json, lambda: _decide_table(found.sizes))


@app.command()
def reserve(
    clusters: Clusters = 1_000,
    connections: Connections = 32,
    seconds: Seconds = 15.0,
    json: Json = False,
) -> None:
    """Measure durable reservations per second over mutual TLS."""
    _report("reserve", reserving.measure_reserve(clusters, connections, seconds), json)


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
    _report(
        "advertise", advertising.measure_advertise(clusters, interval, window, direct=direct), json
    )


@app.command()
def restart(
    reservations: Reservations = 100_000,
    starts: Annotated[int, typer.Option(help="Number of starts; reports the median.", min=1)] = 3,
    json: Json = False,
) -> None:
    """Measure the start-up time of a broker with a large store."""
    _report("restart", restarting.measure_restart(reservations, starts), json)


@app.command()
def agent(
    pods: Annotated[int, typer.Option(help="Number of pods in its cluster.", min=1)] = 3_000,
    nodes: Annotated[int, typer.Option(help="Number of nodes in its cluster.", min=1)] = 100,
    seconds: Seconds = 30.0,
    json: Json = False,
) -> None:
    """Measure CPU and memory of an agent."""
    _report("agent", agent_process.measure_agent(pods, nodes, seconds), json)


@app.command()
def deliver(
    count: Annotated[int, typer.Option(help="Number of instructions.", min=1)] = 200,
    json: Json = False,
) -> None:
    """Measure the latency until a provider's agent has stored a ProviderInstruction."""
    _report("deliver", delivering.measure_deliver(count), json)


@app.command()
def agents(
    count: Annotated[int, typer.Option(help="Number of agents.", min=1)] = 1_000,
    seconds: Seconds = 30.0,
    json: Json = False,
) -> None:
    """Measure CPU and memory of a broker with many agents, and missed instructions."""
    _report("agents", many_agents.measure_agents(count, seconds), json)


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
    size = in_kubernetes.KubeSize(
        clusters, connections, reservations, idle_seconds, advertisements, history
    )
    _report("kube", in_kubernetes.measure_kube(size), json)


def _measure_kube_if_possible() -> dict[str, dict[str, Any]]:
    if missing := in_kubernetes.missing_programs():
        print(f"skipping kube: {missing}", file=sys.stderr)
        return {}
    return {"kube": _figures(in_kubernetes.measure_kube(_KUBE_SIZE))}


def _decide_table(found: Iterable[deciding.DecideResult]) -> str:
    rows = [
        (f"{one.clusters:,}", f"{one.small_us:.1f} us", f"{one.large_us:.1f} us") for one in found
    ]
    headers = ("CLUSTERS", "SMALL REQUESTS", "LARGE REQUESTS")
    return "\n".join(columns.align_columns(headers, rows, right=range(3)))


def _report(name: str, result: msgspec.Struct, json: bool) -> None:
    lines = targets.compare_with_targets({name: _figures(result)})
    _print_result(result, json, lambda: targets.targets_table(lines))


def _print_result(result: msgspec.Struct, json: bool, text: Callable[[], str]) -> None:
    print(_to_json(result) if json else text())


def _figures(result: msgspec.Struct) -> dict[str, Any]:
    return msgspec.structs.asdict(result)


def _to_json(result: object) -> str:
    return msgspec.json.encode(result).decode()
