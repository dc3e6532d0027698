"""Health of the agent: of its components, of its peerings, and whether it is the active agent of its
cluster.

`/readyz` returns the errors, the metrics count them, and the log has one line when a component becomes
unhealthy and one when it recovers, not one per retry.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Final, NamedTuple

import structlog

from kubelend.core import durations
from kubelend.core.errors import IdentityInUse, KubelendError

log = structlog.get_logger("kubelend.agent")


class HealthMessages(NamedTuple):
    """The log messages for a component that becomes unhealthy, and that recovers."""

    unhealthy: str = "Component unhealthy"
    healthy: str = "Component healthy"


class ComponentHealth:
    """The current error of each component that is unhealthy."""

    def __init__(self, timer: Callable[[], float] = time.monotonic) -> None:
        """`timer` returns seconds, to log how long an outage was."""
        self._timer = timer
        self._errors: dict[str, str] = {}
        self._outages: dict[str, _Outage] = {}
        self._starting: set[str] = set()
        self._partial: set[str] = set()

    def require(self, component: str) -> None:
        """Not ready before this component has reported for the first time."""
        self._starting.add(component)

    def report(
        self,
        component: str,
        error: str = "",
        *,
        is_partial: bool = False,
        messages: HealthMessages = HealthMessages(),  # noqa: B008 - immutable
    ) -> None:
        """Set a component's current error, empty if it is healthy. Logs each change once.

        A partial error affects some of the component's work; the agent stays ready.
        """
        self._starting.discard(component)
        (self._partial.add if is_partial else self._partial.discard)(component)
        if self._errors.get(component, "") == error:
            return
        if error:
            self._errors[component] = error
            began = self._outages[component].began if component in self._outages else self._timer()
            self._outages[component] = _Outage(began, messages)
            log.warning(messages.unhealthy, component=component, error=error)
        else:
            del self._errors[component]
            outage = self._outages.pop(component)
            lasted = timedelta(seconds=round(self._timer() - outage.began))
            text = durations.format_duration_short(lasted)
            log.info(outage.messages.healthy, component=component, outage=text)

    @property
    def errors(self) -> dict[str, str]:
        return dict(self._errors)

    @property
    def not_ready_reason(self) -> str:
        """Why the agent is not ready; empty if it is."""
        starting = [f"{part}: starting" for part in sorted(self._starting)]
        unhealthy = [
            f"{part}: {problem}"
            for part, problem in sorted(self._errors.items())
            if part not in self._partial
        ]
        return "; ".join(starting + unhealthy)


class _Outage(NamedTuple):
    began: float
    messages: HealthMessages


MAX_ERRORS_LISTED: Final = 3
"""How many errors are listed; the others are counted."""


class PeerHealth:
    """Collects the errors of single peerings (partial) and the error that affects all of them."""

    def __init__(self, health: ComponentHealth, component: str) -> None:
        self._health = health
        self._component = component
        self._errors: dict[str, str] = {}
        self._common_error = ""

    def set_error(self, key: str, error: str) -> None:
        # The first error stands until it is cleared: retries word the same failure differently.
        self._errors.setdefault(key, error)
        self._report()

    def clear(self, *keys: str) -> None:
        """Clear the errors of these."""
        for each in keys:
            self._errors.pop(each, None)
        self._report()

    def set_common_error(self, error: str) -> None:
        """Set the error that affects all peerings; empty if there is none."""
        self._common_error = error
        self._report()

    def _report(self) -> None:
        errors = [f"{what}: {problem}" for what, problem in sorted(self._errors.items())]
        text = "; ".join(filter(None, [self._common_error, join_errors(errors)]))
        self._health.report(self._component, text, is_partial=not self._common_error)


def join_errors(errors: Sequence[str]) -> str:
    """Lists the first errors and counts the others; empty if there are none."""
    more = len(errors) - MAX_ERRORS_LISTED
    return "; ".join([*errors[:MAX_ERRORS_LISTED], *([f"and {more} more"] if more > 0 else [])])


TAKEOVER_RETRY_INTERVAL: Final = timedelta(seconds=2)
"""Upper bound for the takeover time after the other agent has stopped."""


class ActiveAgentGate:
    """Use `run` as a root task."""

    def __init__(self) -> None:
        self._is_active = asyncio.Event()
        self._is_replaced = asyncio.Event()
        self._replaced_error: IdentityInUse | None = None

    def on_advertised(self, error: KubelendError | None = None) -> None:
        """Record the result of an advertisement."""
        if not isinstance(error, IdentityInUse):
            self._is_active.set()
        elif self._is_active.is_set():
            self._replaced_error = error
            self._is_replaced.set()

    async def wait(self) -> None:
        """Wait until no other agent is known to be active."""
        await self._is_active.wait()

    async def run(self) -> None:
        """Raises when another agent has taken over: the process ends, and waits after its restart."""
        await self._is_replaced.wait()
        if self._replaced_error is not None:
            raise self._replaced_error
