"""`kubelend dev lab`: the broker's cluster and two agents' clusters on this machine, in the background."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kubelend.cli import output
from kubelend.cli.options import flag
from kubelend.cli.output import ExitCode
from kubelend.core import durations
from kubelend.core.errors import InvalidSettings, NotFound
from kubelend.kits import tables

if TYPE_CHECKING:
    from kubelend.lab.state import LabDirectory, LabState
    from kubelend.lab.walkthrough import LabHealth
    from kubelend.wire.broker_objects import ClusterAdvertisement, Reservation

Directory = Annotated[
    Path | None,
    flag(
        "Directory for their files. Defaults to ~/.local/state/kubelend/clusters.",
        "DIR",
        envvar="KUBELEND_LAB_DIRECTORY",
    ),
]


def up(
    *,
    kind: Annotated[bool, flag("Create the clusters with Kind.", None, "--kind")] = False,
    liqo: Annotated[
        bool, flag("Run Liqo in the agents' clusters.", None, "--liqo/--no-liqo")
    ] = True,
    third_agent: Annotated[
        bool, flag("Start agent-cluster-3 with an agent, too.", None, "--third-agent")
    ] = False,
    directory: Directory = None,
) -> None:
    """Start three clusters, a broker and two agents.

    They run in the background until `kubelend dev lab down`. The clusters are real API servers without
    kubelets (`make kube-assets` gets the programs), with simulated nodes and pods.
    """
    from kubelend.lab import background

    home = _lab_directory(directory)
    if kind and third_agent:
        raise InvalidSettings("--third-agent is not available with --kind")
    started = background.start_lab(
        home,
        _print_output,
        uses_kind=kind,
        uses_liqo=liqo and not kind,
        has_third_agent=third_agent,
    )
    if started is None:
        print("They are running or starting already.", NEXT_HINT, sep="\n")
        return
    commands = next_commands(home, started)
    print("", "Everything is running. To try:", "", *commands, "", sep="\n", flush=True)


def walkthrough(
    *,
    timeout: Annotated[str, flag("Time limit of one step.", "DURATION")] = "1m",
    directory: Directory = None,
) -> None:
    """Borrow 500m CPU and 256Mi memory, release them, and print each step.

    With Liqo, also run a pod there.

    Exit code 0 means that every step was observed on the three API servers.
    """
    import asyncio

    from kubelend.lab import walkthrough as walking

    step_timeout = durations.parse_duration(timeout)
    asyncio.run(walking.run_walkthrough(_running(_lab_directory(directory)), _step, step_timeout))
    print("Every step was observed on the API servers.")


def status(*, directory: Directory = None) -> None:
    """Show the components and whether they are ready.

    Exit code 0 means that all are ready, 3 that nothing was started, 7 that one is not ready.
    """
    import asyncio

    from kubelend.lab import walkthrough as walking

    home = _lab_directory(directory)
    record = home.read_state()
    if record is None:
        raise NotFound("no clusters were started", hint="`kubelend dev lab up` starts them")
    found = asyncio.run(walking.check_health(home, record))
    print(health_text(found), f"Logs and kubeconfigs are in {home.directory}", sep="\n\n")
    _report_health(found)


def down(*, directory: Directory = None) -> None:
    """Stop everything that `up` has started, also after a crash."""
    from kubelend.lab import background

    home = _lab_directory(directory)
    was_there = background.stop_lab(home)
    print(f"Stopped, and deleted {home.directory}." if was_there else "Nothing was running.")


def _lab_directory(directory: Path | None) -> LabDirectory:
    from kubelend.lab import state

    return state.LabDirectory(directory or state.default_directory())


def _running(home: LabDirectory) -> LabState:
    record = home.read_state()
    if record is None or not record.is_ready or not home.is_running():
        raise NotFound("no clusters are running", hint="`kubelend dev lab up` starts them")
    return record


def _print_output(line: str) -> None:
    print(line, end="", flush=True)


def _step(title: str, seconds: float) -> None:
    print(tables.title_line(title, seconds), flush=True)


def _report_health(found: LabHealth) -> None:
    if not found.problems:
        output.note("All components are ready.")
        return
    for problem in found.problems:
        output.note(f"not ready: {problem}")
    raise typer.Exit(ExitCode.UNAVAILABLE)


# -- text

NEXT_HINT = "See `kubelend dev lab status`; `kubelend dev lab down` stops them."

_FREE_HEADERS = ("CPU-FREE", "MEMORY-FREE", "GPU-FREE")
_ADVERTISEMENT_HEADERS = ("CLUSTER", *_FREE_HEADERS, "RESERVED", "SCORE", "ACTIVE")
_RESERVATION_HEADERS = ("RESERVATION", "PHASE", "TARGET", "CPU", "MEMORY")


def health_text(found: LabHealth) -> str:
    """Three tables; an empty one is a sentence."""
    components = tables.format_table(
        ("COMPONENT", "STATE", "LOCATION"),
        [
            (one.name, one.state if one.is_ready else "NotReady", one.location)
            for one in found.components
        ],
    )
    offers = [_advertisement_cells(one) for one in found.advertisements]
    held = [_reservation_cells(one) for one in found.reservations]
    return "\n\n".join(
        (
            components,
            tables.format_table(_ADVERTISEMENT_HEADERS, offers) if offers else "No advertisements.",
            tables.format_table(_RESERVATION_HEADERS, held) if held else "No reservations.",
        )
    )


def next_commands(home: LabDirectory, record: LabState) -> list[str]:
    """Commands to try, in this order."""
    kubectl = _short(record.kubectl, "kubectl")
    kubelend = _short(sys.argv[0], "kubelend")
    return [
        *_directory(home),
        f"export KUBECONFIG={shlex.quote(str(home.kubeconfig))}",
        f"export KUBELEND_BROKER_URL={record.broker}",
        f"export KUBELEND_CERT_PATH={shlex.quote(str(home.certificate('admin')))}",
        "",
        f"{kubectl} --context broker-cluster get clusteradvertisements",
        f"{kubectl} --context agent-cluster-1 apply -f {shlex.quote(str(home.request))}",
        f"{kubectl} --context agent-cluster-1 get resourcerequests",
        f"{kubelend} describe reservation small --kube-context agent-cluster-1",
        f"{kubectl} --context agent-cluster-2 get providerinstructions",
        f"{kubectl} --context broker-cluster get reservations",
        f"{kubelend} get clusters",
        f"{kubelend} audit check --store {record.store}",
        f"{kubectl} --context agent-cluster-1 delete resourcerequest small",
        "",
        f"{kubelend} dev lab test",
        f"{kubelend} dev lab status",
        f"{kubelend} dev lab down",
    ]


def _directory(home: LabDirectory) -> list[str]:
    """The variable for the directory, if it is not the default one."""
    from kubelend.lab import state

    if home.directory == state.default_directory().absolute():
        return []
    return [f"export {state.DIRECTORY_VARIABLE}={shlex.quote(str(home.directory))}"]


def _advertisement_cells(found: ClusterAdvertisement) -> tuple[str, ...]:
    known, status = found.spec.resources, found.status
    free, reserved = output.amount_texts(known.available), output.amount_texts(known.reserved)
    return (
        found.spec.cluster_id,
        free.get("cpu", ""),
        output.short_bytes(free.get("memory", "")),
        free.get("gpu", ""),
        f"{reserved.get('cpu', '0')} {output.short_bytes(reserved.get('memory', '0'))}",
        status.score,
        "yes" if status.active else "no",
    )


def _reservation_cells(found: Reservation) -> tuple[str, ...]:
    wanted = found.spec.requested_resources
    return (
        found.metadata.name,
        found.status.phase,
        found.status.target_cluster_id or found.spec.target_cluster_id,
        str(wanted.cpu),
        str(wanted.memory),
    )


def _short(path: str, name: str) -> str:
    """The bare name if it is on the PATH, else the path."""
    if Path(path).name != name or shutil.which(name) is not None:
        return name
    return shlex.quote(path)
