"""A broker in Kubernetes, used over REST and by objects at the same time, while something goes wrong.

    async with kube_faults.loaded(cluster, namespace, certificates) as loaded:
        done = await loaded.load.under(fault)
        await loaded.load.check(done)

Clients do not give up: a request without a response is repeated, with the same key or the same name. So at
the end it is known what everybody was promised, and that has to be what the broker says, what the objects
show, and what the store holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, closing
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import aiohttp

import brokers
from certificates import Certificates
from clocks import RunningClock
from kube_broker import Explain, Objects
from kubelend.cli import main
from kubelend.core import audit
from kubelend.core.errors import AlreadyExists, Conflict, KubelendError, NoCapacity
from kubelend.core.ledger import Ledger
from kubelend.envtest.servers import LocalCluster
from kubelend.kits.backoff import NO_RETRIES
from kubelend.kube import config, resources
from kubelend.kube.client import Client
from kubelend.stores.kubernetes.store import KubernetesStore
from kubelend.transports.client import BrokerClient
from kubelend.wire import bodies
from kubelend.wire.broker_objects import ClusterAdvertisement, Reservation
from waiting import PATIENCE, until

Answer = TypeVar("Answer")
Fault = Callable[[], Awaitable[None]]

POLL = 0.1
BY_OBJECT, BY_REST = "lender-by-object", "lender-by-rest"
CPUS = 3
"""Of each lender: as many reservations of one CPU fit."""
BORROWERS = 2
"""Borrowers of either kind at once, each of which keeps one; there is no room for all that they want."""
LIVE = {"Pending", "Reserved", "Active"}
LEASE: dict[str, Any] = {
    "leader_elect_lease_duration": timedelta(seconds=3),
    "leader_elect_renew_deadline": timedelta(seconds=2),
    "leader_elect_retry_period": timedelta(milliseconds=500),
}
REQUEST = bodies.ReservationRequest(bodies.Quantities("1", "1Gi"), duration="1h")


class RetryingObjects(Objects):
    """Waits for a server that is away, too."""

    async def until(self, condition: Callable[[], Any], explain: Explain = lambda: "") -> None:
        await eventually(condition, explain)


class Load:
    """Borrowers that ask over REST, at any of several brokers, and others that apply objects."""

    def __init__(
        self, cluster: LocalCluster, objects: Objects, urls: list[str], certificates: Certificates
    ) -> None:
        self.objects = objects
        self.answered = 0
        """How many questions so far, of either kind."""
        self._cluster = cluster
        self._urls = urls
        self._certificates = certificates
        self._is_over = False
        self._clients: dict[tuple[Path, str], BrokerClient] = {}
        self.stack = AsyncExitStack()

    # -- who lends

    async def offer(self) -> None:
        """Both lenders advertise, each in its own way, and are seen."""
        await self.publish()
        await self.advertise()
        for lender in (BY_OBJECT, BY_REST):
            await self.objects.shows(
                ClusterAdvertisement, f"{lender}-adv", lambda one: one.status.score != ""
            )

    async def publish(self) -> None:
        amounts = bodies.Metrics(bodies.Quantities(str(CPUS), "64Gi"))
        offer = bodies.Advertisement(BY_REST, amounts)
        await self.rest(BY_REST, lambda client: client.publish(offer))

    async def advertise(self) -> None:
        await self.apply(lambda: self.objects.advertise(BY_OBJECT, str(CPUS), "64Gi"))

    # -- who borrows

    async def under(self, fault: Fault) -> set[str]:
        """Have `fault` while some ask and give back, and ask and keep; then all ask that there is room for.

        Gives the names of all that is promised in the end.
        """
        self._is_over = False
        async with asyncio.timeout(6 * PATIENCE), asyncio.TaskGroup() as group:
            workers = [
                group.create_task(work(number))
                for number in range(BORROWERS)
                for work in (self._borrow_on, self._apply_on)
            ]
            await eventually(lambda: self.answered > BORROWERS)
            try:
                await fault()
            finally:
                self._is_over = True
        kept = {one.result() for one in workers}
        return kept | await self.fill_up()

    async def answers(self, count: int) -> None:
        """Waits for so many more answers, of either kind."""
        enough = self.answered + count
        await eventually(lambda: self.answered >= enough)

    async def borrow(self, borrower: str, key: str) -> str:
        """Over REST; gives its name, or nothing if there was no room."""
        try:
            found = await self.rest(borrower, lambda client: client.reserve(REQUEST, key=key))
        except NoCapacity:
            return ""
        finally:
            self.answered += 1
        return found.id

    async def release(self, borrower: str, name: str) -> None:
        await self.rest(borrower, lambda client: client.release(name))

    async def apply_request(self, name: str) -> str:
        """With an object; the same."""
        await self.apply(lambda: self.objects.reserve(name))
        found = await self.objects.shows(Reservation, name, lambda one: one.status.phase != "")
        self.answered += 1
        return name if found.status.phase == "Reserved" else ""

    async def remove(self, name: str) -> None:
        await self.objects_do(lambda: self.objects.delete(Reservation, name))
        await self.objects.gone(Reservation, name)

    async def _borrow_on(self, number: int) -> str:
        """Until it is over, and one is kept; not the first, so that it falls into the time of fault."""
        kept, borrower = "", f"borrower-{number}"
        for turn in itertools.count():
            name = await self.borrow(borrower, f"key-{number}-{turn}")
            if name and not kept and turn > number:
                kept = name
            elif name:
                await self.release(borrower, name)
            if kept and self._is_over:
                break
        return kept

    async def _apply_on(self, number: int) -> str:
        kept = ""
        for turn in itertools.count():
            name = f"request-{number}-{turn % 2 if not kept else 'again'}"
            is_granted = await self.apply_request(name)
            if is_granted and not kept and turn > number:
                kept = name
            else:
                await self.remove(name)
            if kept and self._is_over:
                break
        return kept

    async def fill_up(self) -> set[str]:
        """Ask for as much as both lenders have; gives the names of what is promised."""
        asked = [
            *(self.borrow("borrower-last", f"last-{number}") for number in range(CPUS)),
            *(self.apply_request(f"last-request-{number}") for number in range(CPUS)),
        ]
        return {name for name in await asyncio.gather(*asked) if name}

    # -- how they ask

    async def rest(
        self, caller: str, what: Callable[[BrokerClient], Awaitable[Answer]], *, admin: bool = False
    ) -> Answer:
        """Until a broker answers, or refuses for good."""
        issue = self._certificates.admin if admin else self._certificates.cluster
        async with asyncio.timeout(2 * PATIENCE):
            while True:
                for url in self._urls:
                    client = await self._client(issue(caller), url)
                    try:
                        async with asyncio.timeout(2.0):
                            return await what(client)
                    except TimeoutError:
                        continue
                    except KubelendError as error:
                        if isinstance(error, Conflict) or not error.retryable:
                            raise
                await asyncio.sleep(POLL)

    async def apply(self, make: Callable[[], Awaitable[None]]) -> None:
        """Until the object is there; also if it was made by a call that was never answered."""
        with contextlib.suppress(AlreadyExists):
            await self.objects_do(make)

    async def objects_do(self, what: Callable[[], Awaitable[Answer]]) -> Answer:
        async with asyncio.timeout(2 * PATIENCE):
            while True:
                try:
                    return await what()
                except KubelendError as error:
                    if not error.retryable:
                        raise
                await asyncio.sleep(POLL)

    async def _client(self, directory: Path, url: str) -> BrokerClient:
        if (directory, url) not in self._clients:
            made = BrokerClient(url, directory, backoff=NO_RETRIES)
            self._clients[directory, url] = await self.stack.enter_async_context(made)
        return self._clients[directory, url]

    # -- what has to be true in the end

    async def check(self, promised: set[str]) -> None:
        """Broker, objects and store agree, all that fits is used and no more, and the audit is clean."""
        found = await self.all_reservations()
        lent = Counter(one.target_cluster_id for one in found if one.id in promised)
        assert lent.total() == len(promised)
        assert lent == {BY_OBJECT: CPUS, BY_REST: CPUS}
        await self._agree(promised, lent)
        await asyncio.to_thread(self._audit, promised)

    async def _agree(self, promised: set[str], lent: Counter[str]) -> None:
        """The broker and the objects say so, at the latest after a moment."""
        reserved = {lender: str(lent[lender]) for lender in (BY_OBJECT, BY_REST)}
        seen: list[Any] = []

        async def do_they() -> bool:
            by_rest, offers = await self.all_reservations(), await self.listed(ClusterAdvertisement)
            shown = [one.spec for one in offers if one.spec.resources.reserved]
            seen[:] = [
                {one.id for one in by_rest if one.status.phase in LIVE},
                {one.metadata.name for one in await self.listed(Reservation) if is_live(one)},
                {spec.cluster_id: spec.resources.reserved.cpu for spec in shown},
            ]
            return seen == [promised, promised, reserved]

        await eventually(do_they, lambda: f"promised is {promised}, {lent}; seen is {seen}")

    async def all_reservations(self) -> list[bodies.Reservation]:
        return await self.rest("auditor", lambda one: one.all_reservations(), admin=True)

    async def listed(self, kind: type[Any]) -> list[Any]:
        resource = resources.resource_for(kind)
        return list((await self.objects.client.list(resource, self.objects.namespace)).objects)

    def _audit(self, promised: set[str]) -> None:
        namespace = self.objects.namespace
        found = config.config_from_kubeconfig(self._cluster.admin_kubeconfig)
        with closing(KubernetesStore.open_readonly(found, namespace)) as store:
            ledger = Ledger.restore(store.load())
        assert audit.invariant_violations(ledger) == []
        assert audit.overcommitted_clusters(ledger) == []
        assert {one.id for one in ledger.reservations.values() if one.is_live} == promised
        url = f"kubernetes://{self._cluster.admin_kubeconfig}?namespace={namespace}"
        assert main.run(["audit", "check", f"--store={url}"]) == 0


def is_live(found: Reservation) -> bool:
    return found.status.phase in LIVE and found.metadata.deletion_timestamp is None


async def eventually(condition: Callable[[], Any], explain: Explain = lambda: "") -> None:
    """Like `until`, but polls less often, and again after errors that may pass."""
    await until(condition, 2 * PATIENCE, poll=POLL, explain=explain, retry=_may_pass)


def _may_pass(error: Exception) -> bool:
    return isinstance(error, KubelendError) and error.retryable


@contextlib.asynccontextmanager
async def loading(
    cluster: LocalCluster, namespace: str, urls: list[str], certificates: Certificates
) -> AsyncIterator[Load]:
    """Borrowers of brokers that run, over the way to the API server that nobody breaks."""
    async with Client.open(config.config_from_kubeconfig(cluster.admin_kubeconfig)) as client:
        load = Load(cluster, RetryingObjects(client, namespace), urls, certificates)
        async with load.stack:
            yield load


class LoadedBroker(NamedTuple):
    """A broker in this process that serves both interfaces, and those who use it."""

    broker: brokers.Running
    load: Load

    async def readiness(self) -> str:
        """What the probe says."""
        url = f"http://127.0.0.1:{self.broker.process.ports['probes']}/readyz"
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            return await response.text()

    async def is_ready(self) -> bool:
        return await self.readiness() == "ok"

    async def is_unready(self) -> bool:
        return not await self.is_ready()


@contextlib.asynccontextmanager
async def loaded(
    cluster: LocalCluster,
    namespace: str,
    certificates: Certificates,
    kubeconfig: Path | None = None,
    lease: Mapping[str, Any] = LEASE,
) -> AsyncIterator[LoadedBroker]:
    """Ready, and with what both lenders offer."""
    async with starting(cluster, namespace, certificates, kubeconfig, lease) as made:
        await eventually(made.is_ready)
        await made.load.offer()
        yield made


@contextlib.asynccontextmanager
async def starting(
    cluster: LocalCluster,
    namespace: str,
    certificates: Certificates,
    kubeconfig: Path | None = None,
    lease: Mapping[str, Any] = LEASE,
) -> AsyncIterator[LoadedBroker]:
    """Perhaps not ready. `kubeconfig`: another way to the same API server."""
    way = kubeconfig or cluster.admin_kubeconfig
    found = config.config_from_kubeconfig(way)
    async with brokers.listening(
        certificates,
        open_store=lambda: KubernetesStore.open(found, namespace),
        clock=RunningClock(),
        broker_interface="http,kubernetes",
        store=f"kubernetes://{way}",
        http_namespace=namespace,
        **lease,
    ) as broker:
        urls = [f"https://localhost:{broker.port}"]
        async with loading(cluster, namespace, urls, certificates) as load:
            yield LoadedBroker(broker, load)
