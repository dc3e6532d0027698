"""The demo as a story: its steps in order, told while the simulated clusters live their lives beside it."""

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
from kubelend.demo import stage as staging
from kubelend.demo import steps, telling
from kubelend.demo.stage import Stage
from kubelend.kits import logs, tasks
from kubelend.wire import bodies


class Step(NamedTuple):
    """A title, and what happens below it."""

    title: str
    run: Callable[[Stage], Awaitable[list[str]]]


LIFE = (
    Step("Three clusters say what they offer, over mutual TLS", steps.clusters_advertise),
    Step("Where would it go? Nothing changes yet", steps.explain_shows_where_it_fits),
    Step("lyon borrows", steps.borrow_locks_the_amount),
    Step("The provider's instruction arrives, pushed", steps.provider_hears_of_it),
    Step("The provider has set it aside, and acknowledges", steps.provider_acknowledges),
    Step("lyon asks again, as after a lost answer", steps.retry_changes_nothing),
    Step("lyon starts to use it", steps.borrower_starts),
    Step("A request that does not fit", steps.no_is_explained),
    Step("lyon needs it for longer", steps.renew_keeps_it_longer),
    Step("lyon gives it back", steps.release_gives_it_back),
    Step("Every amount is where it was", steps.capacity_is_back),
)
END = (
    Step("The audit checks all invariants from scratch", steps.audit_finds_nothing),
    Step("The broker stops", steps.broker_stops),
)


def tell(trial: Trial, broker: BrokerProcess, *, stay: bool) -> None:
    """All of it; raises at the first step that does not show what it should."""
    # What tasks report of their ends is part of no story; failures reach us as exceptions.
    logs.setup("critical")
    telling.heading("Kubelend: three clusters, one broker, and a reservation's whole life")
    seconds = broker.wait_until_ready()
    telling.step(
        1,
        "A broker starts, in a process of its own",
        seconds,
        [f"{broker.url}, on a SQLite file and certificates made just now"],
    )
    asyncio.run(_play(trial, broker, stay))
    telling.heading("\nThat was the whole life of a reservation.")


async def _play(trial: Trial, broker: BrokerProcess, stay: bool) -> None:
    async with staging.open_stage(trial, broker) as stage:
        lives = {name: member.run() for name, member in stage.clusters.items()}
        await tasks.run_all({**lives, "story": _story(stage, stay)})


async def _story(stage: Stage, stay: bool) -> None:
    number = await _tell(LIFE, stage, 2)
    if stay:
        await _stay(stage)
    await _tell(END, stage, number)


async def _tell(chapter: tuple[Step, ...], stage: Stage, number: int) -> int:
    for step in chapter:
        began = time.perf_counter()
        try:
            lines = await step.run(stage)
        except (KubelendError, TimeoutError) as problem:
            why = "it took too long" if isinstance(problem, TimeoutError) else problem
            raise KubelendError(f"step {number}, {step.title!r}: {why}") from problem
        telling.step(number, step.title, time.perf_counter() - began, lines)
        number += 1
    return number


async def _stay(stage: Stage) -> None:
    """Leave everything running, with the clusters doing their part, until Ctrl-C."""
    for name, member in stage.clusters.items():
        member.on_instruction = _teller(name)
    with _ctrl_c() as pressed:
        telling.heading("\nThe broker stays until Ctrl-C. To try, in another terminal:")
        print("\n".join(["", *_commands(stage), ""]), flush=True)
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


def _teller(cluster: str) -> Callable[[bodies.Instruction], None]:
    def tell_of(instruction: bodies.Instruction) -> None:
        print(f"{cluster}: {instruction.message}", flush=True)

    return tell_of


def _commands(stage: Stage) -> list[str]:
    called = sys.argv[0] if Path(sys.argv[0]).name == "kubelend" else "kubelend"
    admin = stage.certificates[staging.ADMIN]
    return [
        f"export KUBELEND_BROKER={stage.broker.url}",
        f"export KUBELEND_CERT_PATH={stage.certificates[stage.borrower.name]}",
        f"{called} explain --cpu 4 --memory 16Gi --gpu 1",
        f"{called} borrow --cpu 4 --memory 16Gi --gpu 1 --duration 10m",
        f"{called} get reservations",
        f"{called} get clusters --cert-path {admin}",
        f"{called} audit --store {stage.trial.store}",
    ]
