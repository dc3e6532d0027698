"""The condition Held of a ProviderInstruction, as the provider writes it."""

from msgspec.structs import replace

import providers
from kubelend.agent import holds
from kubelend.apps.agent_settings import AgentSettings
from virtual_time import in_virtual_time, now


async def instruction(rig, reservation):
    found = await rig.find_instruction(reservation)
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
        kept = holds.conditions_of(reported, reported.status, now(), has_placeholders=True)
        assert kept == reported.status.conditions
        assert held(reported) == [("Held", "True", "Held")]


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
