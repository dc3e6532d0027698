"""A broker in trouble is called ever less often, told the newest when it is back, and logged but once."""

import pytest
from structlog.testing import capture_logs

from kubelend.core.errors import (
    BrokerUnreachable,
    Forbidden,
    IdentityInUse,
    InvalidInput,
    NotReady,
    RateLimited,
)
from make import SECOND
from publishers import Rig, unreachable, until
from virtual_time import in_virtual_time, now


@in_virtual_time
async def test_an_hour_without_a_broker_costs_two_lines_of_log_and_nothing_else():
    rig = Rig(chance=0.5)
    rig.measure("1")
    with capture_logs() as logged:
        async with rig.running():
            await until(10)
            rig.broker.trouble = unreachable
            for second in range(10, 3610, 2):
                await until(second)
                rig.use(f"{1000 + second}m")
            tries = len(rig.broker.tries)
            rig.broker.trouble = None
            await until(3640)
            assert (await rig.shown()).status.published
    assert [(line["event"], line["component"]) for line in logged] == [
        ("Component unhealthy", "publisher"),
        ("Component healthy", "publisher"),
    ]
    assert rig.cpus()[:2] == ["1", "4608m"]  # what was measured last, and nothing of before
    # After 1, 2, 4, 8 and 16 s each 30 s, of which chance takes a quarter.
    assert 155 <= tries <= 170


@in_virtual_time
async def test_the_pauses_double_from_a_second_up_to_the_interval():
    rig = Rig()
    rig.broker.trouble = unreachable
    rig.measure()
    async with rig.running():
        await until(125)
    assert rig.tries() == [0, 1, 3, 7, 15, 31, 61, 91, 121]


@in_virtual_time
async def test_the_place_of_another_agent_is_tried_for_every_two_seconds():
    rig = Rig()
    rig.broker.trouble = lambda: IdentityInUse("another agent")
    rig.measure()
    async with rig.running():
        await until(10)
    assert rig.tries() == [0, 1, 3, 5, 7, 9]


@in_virtual_time
async def test_chance_keeps_clusters_from_coming_back_in_step():
    rig = Rig(chance=1.0)
    rig.broker.trouble = unreachable
    rig.measure()
    async with rig.running():
        await until(4)
    assert rig.tries() == [0, 0.5, 1.5, 3.5]


@in_virtual_time
async def test_new_trouble_begins_with_the_first_pause_again():
    rig = Rig()
    rig.broker.trouble = unreachable
    rig.measure()
    async with rig.running():
        await until(14)
        rig.broker.trouble = None
        await until(29)
        rig.broker.trouble = unreachable
        await until(31.5)
    assert rig.tries() == [0, 1, 3, 7, 15, 30, 31]


@in_virtual_time
async def test_changes_do_not_have_a_broker_in_trouble_called_more_often():
    rig = Rig()
    rig.broker.trouble = unreachable
    rig.measure()
    async with rig.running():
        for step in range(60):
            await until(step / 10)
            rig.use(str(step % 9))
    assert len(rig.broker.tries) == 3


@in_virtual_time
async def test_trouble_in_other_words_is_the_same_trouble():
    rig = Rig()
    rig.measure()
    rig.broker.trouble = lambda: BrokerUnreachable(f"no answer at {now()}")
    with capture_logs() as logged:
        async with rig.running():
            await until(100)
            assert len(logged) == 1
            rig.broker.trouble = lambda: NotReady("the broker is starting")
            await until(150)
            assert rig.health.errors == {"publisher": "the broker is starting"}
    assert len(logged) == 2


@in_virtual_time
async def test_trouble_that_comes_again_is_told_again():
    rig = Rig()
    rig.measure()
    with capture_logs() as logged:
        async with rig.running():
            for second, trouble in ((10, unreachable), (40, None), (70, unreachable), (100, None)):
                await until(second)
                rig.broker.trouble = trouble
            await until(130)
    assert [line["event"] for line in logged] == ["Component unhealthy", "Component healthy"] * 2


@in_virtual_time
async def test_a_broker_that_never_answers_is_given_up_and_tried_again():
    rig = Rig()
    rig.broker.seconds = 1e6
    rig.measure()
    async with rig.running():
        await until(31.5)
        assert rig.health.errors == {"publisher": "the broker did not answer within 30s"}
    assert rig.tries() == [0, 31]


@in_virtual_time
async def test_a_short_interval_does_not_make_it_impatient():
    rig = Rig(interval=SECOND)
    rig.broker.seconds = 9
    rig.measure()
    async with rig.running():
        await until(9.5)
    assert rig.moments() == [9]


@pytest.mark.parametrize(
    "refusal",
    [
        pytest.param(Forbidden("the cluster was removed"), id="forbidden"),
        pytest.param(InvalidInput("policy.hours: is no time"), id="invalid"),
    ],
)
@in_virtual_time
async def test_a_refusal_is_reported_and_tried_again_at_the_next_moment_only(refusal):
    rig = Rig()
    rig.broker.trouble = lambda: refusal
    rig.measure()
    with capture_logs() as logged:
        async with rig.running():
            await until(10)
            rig.use("9")
            await until(70)
            assert rig.health.errors == {"publisher": str(refusal)}
            assert (await rig.shown()).status.message == str(refusal)
    assert rig.tries() == [0, 30, 60]
    assert len(logged) == 1


@in_virtual_time
async def test_another_refusal_is_reported_in_its_own_words():
    rig = Rig()
    rig.broker.trouble = lambda: Forbidden("one")
    rig.measure()
    async with rig.running():
        await until(10)
        rig.broker.trouble = lambda: Forbidden("two")
        await until(31)
        assert rig.health.errors == {"publisher": "two"}


@pytest.mark.parametrize(
    "asked, expected",
    [
        pytest.param(5, [0, 5, 10], id="as asked"),
        pytest.param(0, [0, 1, 3, 7], id="not before the own pause is over"),
        pytest.param(1e9, [0, 30, 60], id="and not for ever"),
    ],
)
@in_virtual_time
async def test_a_broker_that_asks_for_time_gets_it(asked, expected):
    rig = Rig()
    rig.broker.trouble = lambda: RateLimited("slowly", retry_after=asked)
    rig.measure()
    async with rig.running():
        await until(expected[-1] + 1)
    assert rig.tries() == expected
