"""The command `kubelend dev demo`: runs the steps in order and prints their results."""

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
    """A title and a function that returns the lines to print."""

    title: str
    run: Callable[[Stage], Awaitable[list[str]]]


LIFE = (
    Step("Start four agents, which measure and advertise their clusters", steps.agents_join),
    Step("Dry run: which clusters fit a request?", steps.explain_shows_where_it_fits),
    Step("A user creates a ResourceRequest in berlin", steps.user_asks),
    Step("The broker has reserved the resources", steps.amount_is_locked),
    Step("Both clusters have received an instruction", steps.both_sides_are_told),
    Step("The reservation becomes Active", steps.borrower_uses_it),
    Step("The agent of the provider paris is killed", steps.provider_dies),
    Step("The new provider holds the resources", steps.next_one_holds_it),
    Step("A request that fits nowhere fails with the reasons", steps.no_is_explained),
    Step("The user deletes the ResourceRequest", steps.request_is_deleted),
    Step("All resources are available again", steps.capacity_is_back),
)
END = (
    Step("Audit of the store", steps.audit_finds_nothing),
    Step("Stop all processes", steps.all_stop),
)


def tell(trial: Trial, broker: BrokerProcess, *, stay: bool) -> None:
    """Runs all steps; raises at the first that has not the expected result."""
    # Log messages would disturb the output; failures arrive as exceptions.
    logs.setup("critical")
    with screen.teller() as teller:
        teller.heading("Kubelend demo: one broker, four clusters, the lifecycle of a reservation")
        seconds = broker.wait_until_ready()
        teller.step(
            1,
            "Start the broker",
            seconds,
            [f"{broker.url}, with a SQLite store and new certificates"],
        )
        with staging.opened(trial, broker) as stage:
            asyncio.run(_play(stage, teller, stay))
        teller.heading("\nDemo finished.")


async def _play(stage: Stage, teller: Teller, stay: bool) -> None:
    await tasks.run_all({"fleet": _watch(stage, teller), "story": _story(stage, teller, stay)})


async def _watch(stage: Stage, teller: Teller) -> None:
    """Updates the table of clusters while the broker runs."""
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
    """Keeps everything running until Ctrl-C."""
    with _ctrl_c() as pressed:
        teller.advice("Running until Ctrl-C. Try in another terminal:", _commands(stage))
        await pressed.wait()


@contextmanager
def _ctrl_c() -> Iterator[asyncio.Event]:
    """Makes Ctrl-C continue the demo instead of interrupting it."""
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
