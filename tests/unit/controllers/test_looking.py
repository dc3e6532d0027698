"""A look that fails: repeated if that helps, told once, and never the end of all others."""

import asyncio
import contextlib
from functools import partial

import msgspec
import pytest
from structlog.testing import capture_logs

from kubelend.controllers.reconciler import ReconcileQueue
from kubelend.core.errors import Conflict
from waiting import until


@contextlib.asynccontextmanager
async def working(look):
    looks = ReconcileQueue("things", look)
    task = asyncio.create_task(looks.run())
    try:
        yield looks
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_object_that_fits_no_type_is_left_alone_and_told_once():
    seen = []

    async def look(name):
        seen.append(name)
        if name == "odd":
            msgspec.convert({}, int)

    def has(name, count):
        return seen.count(name) == count

    with capture_logs() as logs:
        async with working(look) as looks:
            for count in (1, 2):
                looks.add("odd")
                await until(partial(has, "odd", count))
            looks.add("good")
            await until(lambda: "good" in seen)
    assert [(one["name"], one["log_level"]) for one in logs] == [("odd", "warning")]
    assert seen.count("odd") == 2


async def test_error_of_ours_is_tried_again():
    tries = []

    async def look(name):
        tries.append(name)
        if len(tries) == 1:
            raise Conflict("not yet")

    async with working(look) as looks:
        looks.add("a")
        await until(lambda: len(tries) == 2)


async def test_mistake_in_the_code_ends_it():
    async def look(name):
        raise KeyError(name)

    looks = ReconcileQueue("things", look)
    looks.add("a")
    with pytest.raises(KeyError):
        await looks.run()
