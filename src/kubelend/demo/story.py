"""The demo as a story: its steps in order, told while the agents live their lives beside it."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from kubelend.apps.children import BrokerProcess
from kubelend.apps.trials import Trial
from kubelend.core.errors import KubelendError
from kubelend.core.roles import Role
from kubelend.demo import clusters, screen, steps
from kubelend.demo import stage as staging
from kubelend.demo.stage import Stage
from kubelend.demo.telling import Teller
from kubelend.kits import logs, tasks

_LOOK_EVERY = 0.3


class Step(NamedTuple):
    """A title, and what happens below it."""

    title: str
    run: Callable[[Stage], Awaitable[list[str]]]


LIFE = (
    Step("Four agents measure their clusters and advertise, a process each", steps.agents_join),
    Step("Where would it go? Nothing changes yet", steps.explain_shows_where_it_fits),
    Step("A user of berlin asks, with a ResourceRequest", steps.user_asks),
    Step("The broker has locked the amount", steps.amount_is_locked),
    Step("Both sides have their instruction", steps.both_sides_are_told),
    Step("berlin uses it", steps.borrower_uses_it),
    Step("paris dies: its agent is killed", steps.provider_dies),
    Step("The next one holds it", steps.next_one_holds_it),
    Step("A request that does not fit", steps.no_is_explained),
    Step("The user deletes the ResourceRequest", steps.request_is_deleted),
    Step("Every amount is where it was", steps.capacity_is_back),
)
END = (
    Step("The audit checks all invariants from scratch", steps.audit_finds_nothing),
    Step("All stop", steps.all_stop),
)


def tell(trial: Trial, broker: BrokerProcess, *, stay: bool) -> None:
    """All of it; raises at the first step that does not show what it should."""
    # What tasks report of their ends is part of no story; failures reach us as exceptions.
    logs.setup("critical")
    with screen.teller() as teller:
        teller.heading("Kubelend: four clusters, one broker, and a reservation's whole life")
        seconds = broker.wait_until_ready()
        teller.step(
            1,
            "A broker starts, in a process of its own",
            seconds,
            [f"{broker.url}, on a SQLite file and certificates made just now"],
        )
        with staging.opened(trial, broker) as stage:
            asyncio.run(_play(stage, teller, stay))
        teller.heading("\nThat was the whole life of a reservation.")


async def _play(stage: Stage, teller: Teller, stay: bool) -> None:
    await tasks.run_all({"fleet": _watch(stage, teller), "story": _story(stage, teller, stay)})


async def _watch(stage: Stage, teller: Teller) -> None:
    """Show the clusters as they are, for as long as there is a broker to ask."""
    async with stage.client(staging.ADMIN) as admin:
        while True:
            try:
                teller.fleet(await admin.all_clusters())
            except KubelendError:
                teller.fleet(())
            await asyncio.sleep(_LOOK_EVERY)


async def _story(stage: Stage, teller: Teller, stay: bool) -> None:
    number = await _tell(LIFE, stage, teller, 2)
    if stay:
        await _stay(stage, teller)
    await _tell(END, stage, teller, number)


async def _tell(chapter: tuple[Step, ...], stage: Stage, teller: Teller, number: int) -> int:
    for step in chapter:
        began = time.perf_counter()
        teller.begin(number, step.title)
        try:
            lines = await step.run(stage)
        except KubelendError as problem:
            raise KubelendError(f"step {number}, {step.title!r}: {problem}") from problem
        teller.step(number, step.title, time.perf_counter() - began, lines)
        number += 1
    return number


async def _stay(stage: Stage, teller: Teller) -> None:
    """Leave everything running until Ctrl-C."""
    with _ctrl_c() as pressed:
        teller.advice("It stays until Ctrl-C. To try, in another terminal:", _commands(stage))
        await pressed.wait()


@contextmanager
def _ctrl_c() -> Iterator[asyncio.Event]:
    """Here it is the way to go on, and no interruption."""
    pressed, loop = asyncio.Event(), asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    for number in numbers:
        loop.add_signal_handler(number, pressed.set)
    try:
        yield pressed
    finally:
        for number, handler in zip(numbers, before, strict=True):
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


def _commands(stage: Stage) -> list[str]:
    called = sys.argv[0] if Path(sys.argv[0]).name == "kubelend" else "kubelend"
    admin = stage.trial.certificate(staging.ADMIN, Role.ADMIN)
    requests = stage.agents[clusters.BERLIN].objects / "resourcerequests"
    return [
        f"export KUBELEND_BROKER_URL={stage.broker.url}",
        f"export KUBELEND_CERT_PATH={stage.trial.certificate(clusters.BERLIN)}",
        f"cat > {requests}/default.mine.yaml <<'EOF'",
        *clusters.request("mine", clusters.SPEC).splitlines(),
        "EOF",
        f"cat {requests}/default.mine.yaml",
        f"{called} get reservations",
        f"{called} explain --cpu 4 --memory 16Gi --gpu 1",
        f"rm {requests}/default.mine.yaml",
        f"{called} get clusters --cert-path {admin}",
        f"{called} audit check --store {stage.trial.store}",
    ]
