"""What holds for every test: no task outlives it, children get default signals, CI rolls no dice."""

import asyncio
import atexit
import gc
import inspect
import os
import shutil
import signal
import tempfile
from pathlib import Path

import hypothesis
import pytest

import waiting

HERE = Path(__file__).parent

pytest_plugins = ["broker_fixtures", "kube_fixtures"]

# Neither tests nor their processes read the configuration of the user who runs them. Helm needs a directory.
os.environ["XDG_CONFIG_HOME"] = tempfile.mkdtemp(prefix="kubelend-config-")
atexit.register(shutil.rmtree, os.environ["XDG_CONFIG_HOME"], ignore_errors=True)
os.environ.pop("KUBELEND_CONFIG", None)

# Two busy cores make single examples slow at random, which says nothing about the code.
hypothesis.settings.register_profile("dev", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("long", deadline=None, max_examples=5000, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")


# Collection makes objects that stay: to look for garbage among them took half of its time, in every worker.
gc.disable()


def pytest_collection_finish():
    gc.enable()
    gc.freeze()


def pytest_configure(config):
    """Children of tests get default signals, wherever the tests were started.

    A script's background processes ignore SIGINT, those of `nohup` SIGHUP, and children inherit that.
    A signal that has a handler here is reset to its default in a child.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)  # still ignored by this process


SLOWEST_FIRST = (
    *("contract", "kube/test_liqo.py", "kube/test_liqo_faults", "kube/test_agent"),
    *("kube/test_install", "kube"),
    *("faults", "e2e", "mtls", "unit"),
)
"""The order in which workers take modules, or groups of them: none ends with a long one, alone."""


def pytest_collection_modifyitems(items):
    items.sort(key=_rank)
    for item in items:
        if waiting.FACTOR != 1:
            _scale_time_limit(item)
        # First in line, so that it is torn down after all other fixtures.
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.function):
            item.fixturenames.insert(0, "no_leftover_tasks")


def _rank(item):
    path = str(item.path.relative_to(HERE))
    found = (rank for rank, prefix in enumerate(SLOWEST_FIRST) if path.startswith(prefix))
    return next(found, len(SLOWEST_FIRST))


def _scale_time_limit(item):
    marker = item.get_closest_marker("timeout")
    seconds = marker.args[0] if marker else float(item.config.getini("timeout"))
    item.add_marker(pytest.mark.timeout(seconds * waiting.FACTOR), append=False)


@pytest.fixture
async def no_leftover_tasks():
    """A task still pending at the end is a leak: nobody will wait for it or see its exception."""
    yield
    leftovers = asyncio.all_tasks() - {asyncio.current_task()}
    if leftovers:
        names = ", ".join(sorted(f"{task.get_name()} ({task.get_coro()})" for task in leftovers))
        pytest.fail(f"tasks left pending: {names}")
