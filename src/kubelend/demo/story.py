"""The command `kubelend dev demo`: runs the steps in order and prints their results."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from kubelend.core.errors import KubelendError
from kubelend.core.lifecycle import Role
from kubelend.demo import screen, steps
from kubelend.demo.screen import ProgressDisplay
from kubelend.demo.steps import DemoContext
from kubelend.envtest.processes import BrokerProcess, TemporaryDeployment
from kubelend.kits import logs, tasks

_REFRESH_SECONDS = 0.3


class Step(NamedTuple):
    """A title and a function that returns the lines to print."""

    title: str
    run: Callable[[DemoContext], Awaitable[list[str]]]


LIFECYCLE_STEPS = (
    Step("Start four agents, which measure and advertise their clusters", steps.wait_for_agents),
    Step("Dry run: which clusters fit a request?", steps.dry_run),
    Step("A user creates a ResourceRequest in berlin", steps.create_request),
    Step("The broker has reserved the resources", steps.check_reserved),
    Step("Both clusters have received an instruction", steps.check_instructions),
    Step("The reservation becomes Active", steps.wait_active),
    Step("The agent of the provider paris is killed", steps.kill_provider),
    Step("The new provider holds the resources", steps.check_new_provider),
    Step("A request that fits nowhere fails with the reasons", steps.reject_oversized_request),
    Step("The user deletes the ResourceRequest", steps.delete_request),
    Step("All resources are available again", steps.check_released),
)
FINAL_STEPS = (
    Step("Audit of the store", steps.run_audit),
    Step("Stop all processes", steps.stop_processes),
)


def run_demo(deployment: TemporaryDeployment, broker: BrokerProcess, *, stay: bool) -> None:
    """Runs all steps; raises at the first that has not the expected result."""
    # Log messages would disturb the output; failures arrive as exceptions.
    logs.setup("critical")
    with screen.open_display() as display:
        display.heading("Kubelend demo: one broker, four clusters, the lifecycle of a reservation")
        seconds = broker.wait_until_ready()
        display.step(
            1,
            "Start the broker",
            seconds,
            [f"{broker.url}, with a SQLite store and new certificates"],
        )
        with steps.open_context(deployment, broker) as context:
            asyncio.run(_run_with_display(context, display, stay))
        display.heading("\nDemo finished.")


async def _run_with_display(context: DemoContext, display: ProgressDisplay, stay: bool) -> None:
    await tasks.run_all(
        {"fleet": _refresh_clusters(context, display), "story": _run_all(context, display, stay)}
    )


async def _refresh_clusters(context: DemoContext, display: ProgressDisplay) -> None:
    """Updates the table of clusters while the broker runs."""
    async with context.client(steps.ADMIN_NAME) as admin:
        while True:
            try:
                display.show_clusters(await admin.all_clusters())
            except KubelendError:
                display.show_clusters(())
            await asyncio.sleep(_REFRESH_SECONDS)


async def _run_all(context: DemoContext, display: ProgressDisplay, stay: bool) -> None:
    number = await _run_steps(LIFECYCLE_STEPS, context, display, 2)
    if stay:
        await _wait_for_ctrl_c(context, display)
    await _run_steps(FINAL_STEPS, context, display, number)


async def _run_steps(
    steps_to_run: tuple[Step, ...], context: DemoContext, display: ProgressDisplay, number: int
) -> int:
    for step in steps_to_run:
        began = time.perf_counter()
        display.begin(number, step.title)
        try:
            lines = await step.run(context)
        except KubelendError as error:
            raise KubelendError(f"step {number}, {step.title!r}: {error}") from error
        display.step(number, step.title, time.perf_counter() - began, lines)
        number += 1
    return number


async def _wait_for_ctrl_c(context: DemoContext, display: ProgressDisplay) -> None:
    """Keeps everything running until Ctrl-C."""
    with _handle_ctrl_c() as pressed:
        display.show_commands(
            "Running until Ctrl-C. Try in another terminal:", _example_commands(context)
        )
        await pressed.wait()


@contextmanager
def _handle_ctrl_c() -> Iterator[asyncio.Event]:
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


def _example_commands(context: DemoContext) -> list[str]:
    called = sys.argv[0] if Path(sys.argv[0]).name == "kubelend" else "kubelend"
    admin = context.deployment.certificate(steps.ADMIN_NAME, Role.ADMIN)
    requests = context.agents[steps.BERLIN].objects / "resourcerequests"
    return [
        f"export KUBELEND_BROKER_URL={context.broker.url}",
        f"export KUBELEND_CERT_PATH={context.deployment.certificate(steps.BERLIN)}",
        f"cat > {requests}/default.mine.yaml <<'EOF'",
        *steps.request_manifest("mine", steps.REQUEST_SPEC).splitlines(),
        "EOF",
        f"cat {requests}/default.mine.yaml",
        f"{called} get reservations",
        f"{called} explain --cpu 4 --memory 16Gi --gpu 1",
        f"rm {requests}/default.mine.yaml",
        f"{called} get clusters --cert-path {admin}",
        f"{called} audit check --store {context.deployment.store}",
    ]


def command(
    stay: Annotated[
        bool, typer.Option("--stay", help="Keep everything running until Ctrl-C.")
    ] = False,
) -> None:
    """Run a broker and four simulated clusters through the lifecycle of a reservation.

    Uses free ports and a temporary directory, which is removed at the end.
    """
    from kubelend.envtest import processes

    with (
        processes.temporary_deployment() as deployment,
        deployment.broker("--shutdown-timeout=5s", "--lost-after=1s") as broker,
    ):
        run_demo(deployment, broker, stay=stay)
