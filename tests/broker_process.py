"""A real broker in a process of its own, as a user starts it, for tests from outside.

with running(certificates.server(), tmp_path) as broker:
    ... broker.url ...
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kubelend.envtest.servers import LocalCluster
from waiting import PATIENCE, wait_until


class Running(NamedTuple):
    """A broker that answers."""

    url: str
    store: Path
    process: subprocess.Popen[bytes]


@contextlib.contextmanager
def running(certificates: Path, directory: Path, *flags: str) -> Iterator[Running]:
    """Start it on a free port of loopback, with its store and log in `directory`; stop it at the end."""
    log, store = directory / "broker.log", directory / "kubelend.db"
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [
                *(Path(sys.executable).with_name("kubelend"), "broker", "--http-port=0"),
                *("--http-host=127.0.0.1", f"--http-cert-path={certificates}", f"--store={store}"),
                *("--health-probe-bind-address=0", "--metrics-bind-address=0", *flags),
            ],
            stdout=stderr,
            stderr=stderr,
        )
    try:
        yield Running(f"https://localhost:{_port(process, log)}", store, process)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE)


def _port(process: subprocess.Popen[bytes], log: Path) -> int:
    """The port in its log, once it is ready: to decide, or to follow another that does."""
    lines: list[Any] = []

    def is_up() -> bool:
        assert process.poll() is None, f"the broker has ended: {log.read_text()}"
        lines[:] = [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]
        return any(line["event"] in ("Ledger loaded", "Following leader") for line in lines)

    wait_until(is_up, explain=log.read_text)
    return next(int(line["port"]) for line in lines if line.get("component") == "api")


def election_flags(
    cluster: LocalCluster, namespace: str, identity: str, lease: float, renew: float, retry: float
) -> tuple[str, ...]:
    """Of a broker that shares a store in Kubernetes with others; the last three are in seconds."""
    return (
        f"--store=kubernetes://{cluster.admin_kubeconfig}?namespace={namespace}",
        f"--http-namespace={namespace}",
        "--broker-interface=http,kubernetes",
        "--rate-limit=0",
        f"--leader-elect-identity={identity}",
        f"--leader-elect-lease-duration={lease}s",
        f"--leader-elect-renew-deadline={renew}s",
        f"--leader-elect-retry-period={retry}s",
    )
