"""The process behind `kubelend dev lab up`: starts a set-up, stays with it, and ends all of it when told to.

`python -m kubelend.lab.supervisor DIRECTORY LOCK [--kind]`, in a session of its own and in that directory.
Its output is for whoever has started it, see `lab.messages`; if nobody listens, it ends what it began.
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
    """The exit code says whether it came to its work at all."""
    directory, lock, *flags = sys.argv[1:]
    # What we start must not hold the lock for us.
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
            # Whoever has started us is gone, and would not know that anything runs.
            return 1
    return 0


class Supervisor:
    """Made once for a process."""

    def __init__(self, home: Home, *, uses_kind: bool) -> None:
        self._home = home
        self._uses_kind = uses_kind
        self._record = Record(os.getpid())
        self._lines: list[str] = []

    def run(self) -> None:
        """Ends by a signal, or an error."""
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
            with self._step("Three clusters start"):
                found = stack.enter_context(made)
                self._write_kubeconfigs(found)
            yield found

    def _write_kubeconfigs(self, found: Hosts) -> None:
        """One for each cluster, and one for all of them."""
        accounts.together(found.kubeconfigs, self._home.kubeconfig)
        clusters = {}
        for name, path in found.kubeconfigs.items():
            clusters[name] = str(self._home.kubeconfig_of(name))
            accounts.together({name: path}, self._home.kubeconfig_of(name))
        self._keep(clusters=clusters, kubectl=found.kubectl)
        self._lines += clusters.values()

    def _set_up(self, found: Hosts, running: Fleet) -> None:
        with self._step("Our kinds, roles and accounts, and what lives in the clusters"):
            furnished = asyncio.run(_furnish(found))
            version = str(furnished[hosts.BROKER].version)
            self._lines += [f"Kubernetes {version}"]
        with self._step("The broker starts, with its ledger in broker-cluster"):
            running.make_certificates()
            account = furnished[hosts.BROKER].account
            url = running.start_broker(account)
            self._keep(kubernetes=version, broker=url, store=fleet.store(account))
            self._lines += [url]
        with self._step("Both agents join with a token, over mutual TLS"):
            for name in hosts.AGENTS:
                asyncio.run(running.join(name))
        with self._step("Their processes start, measure and advertise"):
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
    """All at once: most of the time is the API servers'."""
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
    """Whoever reads our output waits for its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


if __name__ == "__main__":
    sys.exit(main())
