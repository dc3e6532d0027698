"""How a lab looks to people: its parts, what is advertised and reserved in it, and what to try."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from kubelend.cli import amounts, tables

if TYPE_CHECKING:
    from kubelend.lab.health import Health, Part
    from kubelend.lab.records import Home, Record
    from kubelend.wire.broker_objects import ClusterAdvertisement, Reservation

NEXT = "See `kubelend lab status`; `kubelend lab down` ends them."

_OFFERS = ("CLUSTER", "CPU-FREE", "MEMORY-FREE", "GPU-FREE", "RESERVED", "SCORE", "ACTIVE")
_LOANS = ("RESERVATION", "PHASE", "TARGET", "CPU", "MEMORY")


def health(found: Health) -> str:
    """Three tables; an empty one is a sentence."""
    return "\n\n".join(
        (
            tables.columns(("PART", "STATE", "WHERE"), [_part(one) for one in found.parts]),
            _table(_OFFERS, map(_offer, found.advertisements), "Nothing is advertised."),
            _table(_LOANS, map(_loan, found.reservations), "Nothing is reserved."),
        )
    )


def commands(home: Home, record: Record) -> list[str]:
    """To be copied, in this order."""
    kubectl = _short(record.kubectl, "kubectl")
    kubelend = _short(sys.argv[0], "kubelend")
    return [
        *_directory(home),
        f"export KUBECONFIG={shlex.quote(str(home.kubeconfig))}",
        f"export KUBELEND_BROKER={record.broker}",
        f"export KUBELEND_CERT_PATH={shlex.quote(str(home.certificate('admin')))}",
        "",
        f"{kubectl} --context broker-cluster get clusteradvertisements",
        f"{kubectl} --context agent-cluster-1 apply -f {shlex.quote(str(home.request))}",
        f"{kubectl} --context agent-cluster-1 get resourcerequests",
        f"{kubelend} describe reservation small --context agent-cluster-1",
        f"{kubectl} --context agent-cluster-2 get providerinstructions",
        f"{kubectl} --context broker-cluster get reservations",
        f"{kubelend} get clusters",
        f"{kubelend} audit --store {record.store}",
        f"{kubectl} --context agent-cluster-1 delete resourcerequest small",
        "",
        f"{kubelend} lab test",
        f"{kubelend} lab status",
        f"{kubelend} lab down",
    ]


def _directory(home: Home) -> list[str]:
    """If it is not where commands look by themselves."""
    from kubelend.lab import records

    if home.directory == records.usual().absolute():
        return []
    return [f"export {records.VARIABLE}={shlex.quote(str(home.directory))}"]


def _table(headers: tuple[str, ...], rows: Iterable[tuple[str, ...]], otherwise: str) -> str:
    cells = list(rows)
    return tables.columns(headers, cells) if cells else otherwise


def _part(part: Part) -> tuple[str, ...]:
    return part.name, part.state if part.is_well else "NOT WELL", part.place


def _offer(found: ClusterAdvertisement) -> tuple[str, ...]:
    known, status = found.spec.resources, found.status
    free, reserved = amounts.texts(known.available), amounts.texts(known.reserved)
    return (
        found.spec.cluster_id,
        free.get("cpu", ""),
        amounts.short(free.get("memory", "")),
        free.get("gpu", ""),
        f"{reserved.get('cpu', '0')} {amounts.short(reserved.get('memory', '0'))}",
        status.score,
        "yes" if status.active else "no",
    )


def _loan(found: Reservation) -> tuple[str, ...]:
    wanted = found.spec.requested_resources
    return (
        found.metadata.name,
        found.status.phase,
        found.status.target_cluster_id or found.spec.target_cluster_id,
        str(wanted.cpu),
        str(wanted.memory),
    )


def _short(path: str, name: str) -> str:
    """The bare name, where that is enough to find it."""
    if Path(path).name != name or shutil.which(name) is not None:
        return name
    return shlex.quote(path)
