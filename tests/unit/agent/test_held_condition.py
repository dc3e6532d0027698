"""The condition Held of a ProviderInstruction, as the provider writes it."""

import asyncio

from msgspec.structs import replace

import providers
from kubelend.agent import holds, provider
from kubelend.apps.agent_settings import AgentSettings
from virtual_time import in_virtual_time, now


async def instruction(rig, reservation):
    found = await rig.find_instruction(reservation)
    assert found is not None
    return found


def told(rig, reservation):
    """What the broker knows."""
    found = rig.broker.body(reservation).status.held
    assert found is not None
    return found


def held(found):
    return [(one.type, one.status, one.reason) for one in found.status.conditions]


@in_virtual_time
async def test_without_placeholders_it_says_that_nothing_is_configured():
    rig = providers.Rig()
    async with rig.running():
        reservation = await rig.place()
        found = await instruction(rig, reservation)
        assert found.status.enforced
        assert held(found) == [("Held", "False", "NotConfigured")]


@in_virtual_time
async def test_it_ends_with_the_hold():
    rig = providers.Rig()
    async with rig.running():
        reservation = await rig.place()
        rig.release(reservation)
        await rig.notify(reservation)
        assert held(await instruction(rig, reservation)) == [("Held", "False", "Withdrawn")]


@in_virtual_time
async def test_what_placeholders_have_reported_stays():
    rig = providers.Rig()
    async with rig.running():
        reservation = await rig.place()
        found = await instruction(rig, reservation)
        condition = holds.held_condition("True", "Held", "all of it")
        reported = replace(found, status=holds.with_held_condition(found, condition, now()))
        kept = holds.conditions_of(reported, reported.status, now(), None)
        assert kept == reported.status.conditions
        assert held(reported) == [("Held", "True", "Held")]


@in_virtual_time
async def test_broker_is_told_with_the_acknowledgement_what_is_held():
    rig = providers.Rig()
    async with rig.running():
        reservation = await rig.place()
        assert rig.is_acknowledged(reservation)
        report = told(rig, reservation)
        assert (report.held, report.reason) == (False, "NotConfigured")
        assert len(rig.broker.named("acknowledge")) == 1


@in_virtual_time
async def test_broker_is_told_each_change_of_what_placeholders_hold_and_nothing_else():
    rig = providers.Rig(has_placeholders=True)
    async with rig.running():
        reservation = await rig.place()
        assert rig.broker.body(reservation).status.held is None
        for status, reason, wanted in (
            ("Unknown", "Holding", None),
            ("False", "PartiallyHeld", (False, "PartiallyHeld", "2 of 3")),
            ("Unknown", "Holding", (False, "PartiallyHeld", "2 of 3")),
            ("True", "Held", (True, "Held", "2 of 3")),
        ):
            await rig.report_held(reservation, status, reason, "2 of 3")
            known = rig.broker.body(reservation).status.held
            assert wanted == (None if known is None else (known.held, known.reason, known.message))
        assert len(rig.broker.named("acknowledge")) == 3


@in_virtual_time
async def test_provider_refuses_what_it_cannot_hold_if_it_is_told_to():
    rig = providers.Rig(has_placeholders=True, refuses_unheld=True)
    async with rig.running():
        reservation, used = await rig.place(), await rig.place()
        await rig.report_held(used, "True", "Held", "all")
        await rig.report_held(used, "False", "PartiallyHeld", "some")
        await rig.report_held(reservation, "False", "PartiallyHeld", "2 of 3")
        assert await rig.phase(reservation) == "Refused"
        assert rig.broker.refusals == {reservation: "cannot be held: 2 of 3"}
        assert list(rig.holds()) == [used], "it was held once, and its requester relies on it"


@in_virtual_time
async def test_overcommitment_is_condition_event_and_report_after_a_while():
    rig = providers.Rig(nodes="cpu=4,memory=8Gi")
    async with rig.running():
        reservation = await rig.place()
        rig.measure("cpu=4,memory=8Gi", pods="cpu=2")
        rig.provider.notify_measured()
        await asyncio.sleep(provider.OVERCOMMITMENT_DELAY.total_seconds() - 1)
        assert told(rig, reservation).reason == "NotConfigured"
        await asyncio.sleep(2)
        found = await instruction(rig, reservation)
        assert held(found) == [("Held", "False", "Overcommitted")]
        message = "Pods of this cluster use 1 CPU / 0 Memory of the resources that it has lent"
        assert told(rig, reservation).message == message
        assert [(one.type, one.reason) for one in rig.emitted][-1] == ("Warning", "Overcommitted")
        rig.measure("cpu=4,memory=8Gi")
        rig.provider.notify_measured()
        await asyncio.sleep(provider.OVERCOMMITMENT_DELAY.total_seconds() + 1)
        assert told(rig, reservation).reason == "NotConfigured"


def test_placeholders_need_a_real_cluster_and_a_class_that_is_known():
    settings = AgentSettings(
        hold="placeholders",
        source="simulated",
        simulation="x",
        broker_transport="",
        hold_priority_class="low",
    )
    assert settings.problems() == [
        "--hold: placeholders is only valid with --source=kubernetes",
        "--hold-priority-class: must begin with kubelend-hold",
    ]
