"""The three clusters of a set-up: API servers of the lab, or what Kind has made."""

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
    """They are ready."""

    kubeconfigs: dict[str, Path]
    """Of their administrators."""
    kubectl: str
    are_real: bool
    """Whether nodes and pods are there already."""


@contextmanager
def own(home: Home) -> Iterator[Hosts]:
    """API servers, each with its own part of one etcd. They are gone at the end."""
    found = assets.find()
    with servers.running(found, home.directory / "lab") as lab:
        started = lab.start(*NAMES)
        kubeconfigs = {cluster.name: cluster.admin_kubeconfig for cluster in started}
        yield Hosts(kubeconfigs, str(found.kubectl), are_real=False)


@contextmanager
def of_kind(home: Home, making: Callable[[tuple[str, ...]], None]) -> Iterator[Hosts]:
    """The same by Kind; `making` hears of all names before the first is made, and of none at the end."""
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
