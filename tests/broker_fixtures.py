"""The one `broker` fixture, and what comes with it.

    async def test_reserve(broker):                                  a broker in this process, over TLS

    pytestmark = pytest.mark.broker(read_timeout=QUICK)              the same with other settings
    pytestmark = pytest.mark.broker("enrolling", trust_proxies=True) one that issues certificates
    pytestmark = pytest.mark.broker("service", rules=RULES)          the use cases alone, without a network
    pytestmark = pytest.mark.broker("objects")                       in the namespace of a real API server
    pytestmark = pytest.mark.broker("scripted", answers=[VERSION])   answers as it is told

Keywords are those of the function that starts it. For all but the last two, `offers={"a": ("4", "8Gi")}`
names clusters that advertise, and `fails=True` puts it on the fixture `store`, which a test can break.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from certificates import Certificates


# Late imports: most unit tests need none of these, and collect in half the time without.

Request = pytest.FixtureRequest
Offers = dict[str, tuple[str, str]]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "broker(kind, **parameters): what `broker` is")


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """One throw-away authority for all tests that only need somebody to be let in."""
    from certificates import Certificates

    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def clock() -> Any:
    """Stands still until it is moved."""
    from clocks import Clock

    return Clock()


@pytest.fixture
def store() -> Any:
    """In memory; can be stopped, slowed down and broken."""
    from failing_store import FailingStore

    return FailingStore()


@pytest.fixture
async def start(certificates: Certificates) -> AsyncIterator[Callable[..., Any]]:
    """Starts brokers in this process; the parameters are those of `brokers.running`."""
    import brokers

    async with contextlib.AsyncExitStack() as stack:

        async def start(**parameters: Any) -> brokers.Running:
            running = brokers.running(certificates, **parameters)
            return await stack.enter_async_context(running)

        yield start


@pytest.fixture
async def broker(request: Request) -> AsyncIterator[Any]:
    """A broker that is ready, in memory, with a clock to move; or what the mark says."""
    mark = request.node.get_closest_marker("broker")
    kind, parameters = "rest", {}
    if mark is not None:
        [kind] = mark.args or ["rest"]
        parameters = dict(mark.kwargs)
    async with _KINDS[kind](request, **parameters) as broker:
        yield broker


@contextlib.asynccontextmanager
async def _rest(
    request: Request, *, offers: Offers | None = None, fails: bool = False, **parameters: Any
) -> AsyncIterator[Any]:
    import brokers
    from clocks import Clock

    if fails:
        parameters["open_store"] = brokers.reopening(request.getfixturevalue("store"))
    if parameters.pop("since_now", False):
        parameters["clock"] = Clock(datetime.now(UTC))
    certificates = request.getfixturevalue("certificates")
    async with brokers.running(certificates, **parameters) as broker:
        for name, amounts in (offers or {}).items():
            await broker.cluster(name).advertise(*amounts)
        yield broker


def _enrolling(request: Request, **parameters: Any) -> AbstractAsyncContextManager[Any]:
    """Its clock begins with the machine's, by which certificates are checked."""
    import applicants

    certificates, root = map(request.getfixturevalue, ("certificates", "tmp_path"))
    authority = str(applicants.authority(certificates, root))
    return _rest(request, since_now=True, **{"ca_path": authority, "enrol_port": 0, **parameters})


@contextlib.asynccontextmanager
async def _service(
    request: Request, *, offers: Offers | None = None, fails: bool = False, **parameters: Any
) -> AsyncIterator[Any]:
    import brokers
    import make

    if fails:
        parameters["store"] = request.getfixturevalue("store")
    async with brokers.loaded(clock=request.getfixturevalue("clock"), **parameters) as broker:
        for name, (cpu, memory) in (offers or {}).items():
            await broker.advertise(make.advertisement(name, f"cpu={cpu},memory={memory}"))
        yield broker


def _objects(request: Request, **parameters: Any) -> AbstractAsyncContextManager[Any]:
    import kube_broker

    cluster, namespace = map(request.getfixturevalue, ("kube", "namespace"))
    return kube_broker.running(cluster, namespace, **parameters)


@contextlib.asynccontextmanager
async def _scripted(request: Request, *, answers: Any = ()) -> AsyncIterator[Any]:
    from scripted_broker import ScriptedBroker

    async with ScriptedBroker(request.getfixturevalue("certificates").server()) as broker:
        broker.responses.extend(answers)
        yield broker


_KINDS: dict[str, Callable[..., AbstractAsyncContextManager[Any]]] = {
    "rest": _rest,
    "enrolling": _enrolling,
    "service": _service,
    "objects": _objects,
    "scripted": _scripted,
}
