"""The background process of the lab: starts clusters, broker and agents, and stops them on SIGTERM.

Started as `python -m kubelend.lab.supervisor DIRECTORY LOCK [--kind]` in its own session, with DIRECTORY as
working directory. It writes progress messages to stdout (`lab.state`); if the reader is gone, it stops
everything.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from msgspec.structs import replace

from kubelend.apps import interrupts
from kubelend.core.errors import KubelendError
from kubelend.kits import logs
from kubelend.lab import accounts, fleet, furnishing, hosts, inhabitants, messages, rights
from kubelend.lab.fleet import Fleet
from kubelend.lab.furnishing import Furnished, Wanted
from kubelend.lab.hosts import Hosts
from kubelend.lab.messages import Begun, Done, Failed, Message, Ready
from kubelend.lab.records import Home, Record
from kubelend.wire import crds, objects

REQUEST = """\
apiVersion: rear.fluidos.eu/v1alpha1
kind: ResourceRequest
metadata: {name: small}
spec: {requestedCPU: 500m, requestedMemory: 256Mi, duration: 1h}
"""


def main() -> int:
    """Returns the exit code: 0 if the start succeeded or was interrupted."""
    directory, lock, *flags = sys.argv[1:]
    # Child processes must not hold the lock.
    os.set_inheritable(int(lock), False)
    logs.setup("warning")
    supervisor = Supervisor(Home(Path(directory)), uses_kind="--kind" in flags)
    with interrupts.like_ctrl_c():
        try:
            supervisor.run()
        except KeyboardInterrupt:
            return 0
        except KubelendError as error:
            supervisor.fail(error)
            return 1
        except BrokenPipeError:
            # The process that started us is gone, so nobody would know that anything runs.
            return 1
    return 0


class Supervisor:
    """Starts everything, and keeps the state file up to date."""

    def __init__(self, home: Home, *, uses_kind: bool) -> None:
        self._home = home
        self._uses_kind = uses_kind
        self._record = Record(os.getpid())
        self._lines: list[str] = []

    def run(self) -> None:
        """Runs until a signal or an error."""
        self._keep()
        with self._hosts() as found, fleet.opened(self._home) as running:
            self._set_up(found, running)
            self._keep(is_ready=True, processes=running.processes())
            _tell(Ready())
            _fall_silent()
            while True:
                signal.pause()

    def fail(self, error: KubelendError) -> None:
        sys.stderr.write(f"{error}\n")
        with contextlib.suppress(OSError):
            _tell(Failed(error.code, str(error)))

    @contextmanager
    def _hosts(self) -> Iterator[Hosts]:
        made: AbstractContextManager[Hosts] = (
            hosts.of_kind(self._home, lambda names: self._keep(kind=names))
            if self._uses_kind
            else hosts.own(self._home)
        )
        with contextlib.ExitStack() as stack:
            with self._step("Start three clusters"):
                found = stack.enter_context(made)
                self._write_kubeconfigs(found)
            yield found

    def _write_kubeconfigs(self, found: Hosts) -> None:
        """Writes one kubeconfig per cluster, and one with all contexts."""
        accounts.together(found.kubeconfigs, self._home.kubeconfig)
        clusters = {}
        for name, path in found.kubeconfigs.items():
            clusters[name] = str(self._home.kubeconfig_of(name))
            accounts.together({name: path}, self._home.kubeconfig_of(name))
        self._keep(clusters=clusters, kubectl=found.kubectl)
        self._lines += clusters.values()

    def _set_up(self, found: Hosts, running: Fleet) -> None:
        with self._step("Install CRDs, RBAC, service accounts, nodes and pods"):
            furnished = asyncio.run(_furnish(found))
            version = str(furnished[hosts.BROKER].version)
            self._lines += [f"Kubernetes {version}"]
        with self._step("Start the broker, with its store in broker-cluster"):
            running.make_certificates()
            account = furnished[hosts.BROKER].account
            url = running.start_broker(account)
            self._keep(kubernetes=version, broker=url, store=fleet.store(account))
            self._lines += [url]
        with self._step("Enrol both agents with tokens"):
            for name in hosts.AGENTS:
                asyncio.run(running.join(name))
        with self._step("Start both agents and wait for their advertisements"):
            running.start_agents({name: furnished[name].account for name in hosts.AGENTS})
            asyncio.run(running.advertised())
        self._home.request.write_text(REQUEST, "utf-8")

    @contextmanager
    def _step(self, title: str) -> Iterator[None]:
        _tell(Begun(title))
        began, self._lines = time.perf_counter(), []
        yield
        _tell(Done(title, time.perf_counter() - began, tuple(self._lines)))

    def _keep(self, **known: object) -> None:
        self._record = replace(self._record, **known)
        self._home.keep(self._record)


async def _furnish(found: Hosts) -> dict[str, Furnished]:
    """Installs in all clusters in parallel."""
    made = await asyncio.gather(
        *(
            furnishing.furnish(path, _wanted(name, are_real=found.are_real))
            for name, path in found.kubeconfigs.items()
        )
    )
    return dict(zip(found.kubeconfigs, made, strict=True))


def _wanted(name: str, *, are_real: bool) -> Wanted:
    if name == hosts.BROKER:
        return Wanted(rights.BROKER, rights.BROKERS_ROLES, crds.KINDS)
    population = None if are_real else inhabitants.EVERYONE[name]
    return Wanted(rights.AGENT, rights.AGENTS_ROLES, objects.KINDS, population)


def _tell(message: Message) -> None:
    sys.stdout.buffer.write(messages.encode(message))
    sys.stdout.buffer.flush()


def _fall_silent() -> None:
    """Closes the pipe, whose reader waits for its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


if __name__ == "__main__":
    sys.exit(main())
