"""`kubelend dev bench`: each benchmark alone, or all of them against their targets."""

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

app = typer.Typer(
    name="bench", help="Measure this machine.", add_completion=False, rich_markup_mode=None
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Clusters = Annotated[int, typer.Option(help="How many clusters advertise.", min=1)]
Connections = Annotated[int, typer.Option(help="How many clients ask at once.", min=1)]
Seconds = Annotated[float, typer.Option(help="How long to measure.", min=0.1)]
Interval = Annotated[float, typer.Option(help="Seconds between two of one cluster.", min=0.1)]
Reservations = Annotated[int, typer.Option(help="How many the store holds.", min=1)]

_KUBE = in_kubernetes.Size()


@app.callback(invoke_without_command=True)
def bench(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command("all")
def measure_all(json: Json = False) -> None:
    """Run all against their targets; exit code 1 if one is missed."""
    results = {
        "decide": _figures(deciding.measure_all(deciding.SIZES)),
        "reserve": _figures(reserving.measure(1_000, 32, 10.0)),
        "advertise": _figures(advertising.measure(10_000, 30.0, 30.0, direct=False)),
        "restart": _figures(restarting.measure(100_000, 3)),
        "agent": _figures(agent_process.measure(3_000, 100, 30.0)),
        "deliver": _figures(delivering.measure(200)),
        "agents": _figures(many_agents.measure(1_000, 30.0)),
        **_kube_if_there(),
    }
    lines = targets.compare(results)
    print(_json(results) if json else targets.table(lines))
    if targets.missed(lines):
        raise typer.Exit(1)


@app.command()
def decide(
    clusters: Annotated[
        int | None, typer.Option(help="How many clusters; several sizes if not given.", min=1)
    ] = None,
    json: Json = False,
) -> None:
    """Microseconds per decision, without any I/O."""
    found = deciding.measure_all(deciding.SIZES if clusters is None else (clusters,))
    _show(found, json, lambda: _sizes(found.sizes))


@app.command()
def reserve(
    clusters: Clusters = 1_000,
    connections: Connections = 32,
    seconds: Seconds = 15.0,
    json: Json = False,
) -> None:
    """Durable reservations per second over mutual TLS."""
    _report("reserve", reserving.measure(clusters, connections, seconds), json)


@app.command()
def advertise(
    clusters: Clusters = 10_000,
    interval: Interval = 30.0,
    seconds: Annotated[
        float | None,
        typer.Option(help="How long to measure; one interval if not given.", min=0.1),
    ] = None,
    direct: Annotated[
        bool, typer.Option("--direct", help="Each cluster connects itself, without a proxy.")
    ] = False,
    json: Json = False,
) -> None:
    """Processor time and memory of a broker with many clusters."""
    window = interval if seconds is None else seconds
    _report("advertise", advertising.measure(clusters, interval, window, direct=direct), json)


@app.command()
def restart(
    reservations: Reservations = 100_000,
    starts: Annotated[int, typer.Option(help="How often to start; the median counts.", min=1)] = 3,
    json: Json = False,
) -> None:
    """Seconds until a broker with a long history is ready."""
    _report("restart", restarting.measure(reservations, starts), json)


@app.command()
def agent(
    pods: Annotated[int, typer.Option(help="How many pods its cluster has.", min=1)] = 3_000,
    nodes: Annotated[int, typer.Option(help="On how many nodes.", min=1)] = 100,
    seconds: Seconds = 30.0,
    json: Json = False,
) -> None:
    """Memory and processor time of an agent."""
    _report("agent", agent_process.measure(pods, nodes, seconds), json)


@app.command()
def deliver(
    count: Annotated[int, typer.Option(help="How many instructions.", min=1)] = 200,
    json: Json = False,
) -> None:
    """Milliseconds until a provider's agent has written down what it is to hold."""
    _report("deliver", delivering.measure(count), json)


@app.command()
def agents(
    count: Annotated[int, typer.Option(help="How many agents.", min=1)] = 1_000,
    seconds: Seconds = 30.0,
    json: Json = False,
) -> None:
    """Processor time and memory of a broker with many agents, and whether they miss anything."""
    _report("agents", many_agents.measure(count, seconds), json)


@app.command()
def kube(
    clusters: Clusters = _KUBE.clusters,
    connections: Connections = _KUBE.connections,
    reservations: Annotated[
        int, typer.Option(help="How many are made.", min=1)
    ] = _KUBE.reservations,
    idle_seconds: Annotated[
        float, typer.Option(help="How long to watch a broker that has nothing to do.", min=0.1)
    ] = _KUBE.idle_seconds,
    advertisements: Annotated[
        int, typer.Option(help="How many a starting broker finds.", min=1)
    ] = _KUBE.advertisements,
    history: Annotated[
        int, typer.Option(help="How many reservations it finds.", min=0)
    ] = _KUBE.history,
    json: Json = False,
) -> None:
    """A broker whose store is a real Kubernetes API server: rates, writes, start."""
    size = in_kubernetes.Size(
        clusters, connections, reservations, idle_seconds, advertisements, history
    )
    _report("kube", in_kubernetes.measure(size), json)


def _kube_if_there() -> dict[str, dict[str, Any]]:
    if missing := in_kubernetes.lacking():
        print(f"kube is left out: {missing}", file=sys.stderr)
        return {}
    return {"kube": _figures(in_kubernetes.measure(_KUBE))}


def _sizes(found: Iterable[deciding.Result]) -> str:
    rows = [
        (f"{one.clusters:,}", f"{one.small_us:.1f} us", f"{one.large_us:.1f} us") for one in found
    ]
    headers = ("CLUSTERS", "SMALL REQUESTS", "LARGE REQUESTS")
    return "\n".join(columns.aligned(headers, rows, right=range(3)))


def _report(name: str, result: msgspec.Struct, json: bool) -> None:
    lines = targets.compare({name: _figures(result)})
    _show(result, json, lambda: targets.table(lines))


def _show(result: msgspec.Struct, json: bool, text: Callable[[], str]) -> None:
    print(_json(result) if json else text())


def _figures(result: msgspec.Struct) -> dict[str, Any]:
    return msgspec.structs.asdict(result)


def _json(result: object) -> str:
    return msgspec.json.encode(result).decode()
