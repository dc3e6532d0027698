"""The three clusters of the lab: local API servers (`envtest`), or clusters created by kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from kubelend.apps import interrupts
from kubelend.lab import assets, inhabitants, kind, servers
from kubelend.lab.records import Home

BROKER = "broker-cluster"
AGENTS = tuple(inhabitants.EVERYONE)
NAMES = (BROKER, *AGENTS)


class Hosts(NamedTuple):
    """The clusters, when ready."""

    kubeconfigs: dict[str, Path]
    """Administrator kubeconfigs by cluster."""
    kubectl: str
    are_real: bool
    """Whether they have real nodes and pods."""


@contextmanager
def own(home: Home) -> Iterator[Hosts]:
    """Starts API servers that share one etcd; stops them at exit."""
    found = assets.find()
    with servers.running(found, home.directory / "lab") as lab:
        started = lab.start(*NAMES)
        kubeconfigs = {cluster.name: cluster.admin_kubeconfig for cluster in started}
        yield Hosts(kubeconfigs, str(found.kubectl), are_real=False)


@contextmanager
def of_kind(home: Home, making: Callable[[tuple[str, ...]], None]) -> Iterator[Hosts]:
    """Creates clusters with kind and deletes them at exit.

    `making` is called with all names before the first is created and with none after deletion, so that the
    state file always lists the clusters to delete.
    """
    kind.check()
    kind.check_names(NAMES)
    kubeconfigs = {name: _kubeconfig(home, name) for name in NAMES}
    with interrupts.like_ctrl_c():
        try:
            making(NAMES)
            for name, path in kubeconfigs.items():
                kind.create(name, path)
            yield Hosts(kubeconfigs, "kubectl", are_real=True)
        finally:
            with interrupts.put_off():
                delete_kind(home, NAMES)
                making(())


def delete_kind(home: Home, names: tuple[str, ...]) -> None:
    for name in names:
        kind.delete(name, _kubeconfig(home, name))


def _kubeconfig(home: Home, name: str) -> Path:
    directory = home.directory / "kind" / name
    directory.mkdir(parents=True, exist_ok=True)
    return directory / "admin.kubeconfig"
