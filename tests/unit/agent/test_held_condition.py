"""What a ProviderInstruction says of its hold: the condition Held, which the broker gets too, and Events."""

import asyncio

import pytest
from msgspec.structs import replace

import object_samples
from kubelend.agent import events, holds
from kubelend.agent.provider import OVERCOMMITMENT_DELAY
from providers import provider
from virtual_time import now


def told(rig, reservation):
    """What the broker knows."""
    found = rig.broker.body(reservation).status.held
    return None if found is None else (found.held, found.reason, found.message)


def held(found):
    return [(one.type, one.status, one.reason) for one in found.status.conditions]


@provider()
async def test_without_placeholders_nothing_is_configured_which_the_broker_is_told_once(rig):
    reservation = await rig.place()
    found = await rig.instruction(reservation)
    assert found.status.enforced
    assert held(found) == [("Held", "False", "NotConfigured")]
    assert rig.is_acknowledged(reservation)
    assert told(rig, reservation)[:2] == (False, "NotConfigured")
    assert len(rig.broker.named("acknowledge")) == 1
    rig.release(reservation)
    await rig.notify(reservation)
    assert held(await rig.instruction(reservation)) == [("Held", "False", "Withdrawn")]


@provider()
async def test_what_placeholders_have_reported_stays(rig):
    found = await rig.instruction(await rig.place())
    condition = holds.held_condition("True", "Held", "all of it")
    reported = replace(found, status=holds.with_held_condition(found, condition, now()))
    assert holds.conditions_of(reported, reported.status, now(), None) == reported.status.conditions
    assert held(reported) == [("Held", "True", "Held")]


@provider(has_placeholders=True)
async def test_broker_is_told_each_change_of_what_placeholders_hold_and_nothing_else(rig):
    reservation = await rig.place()
    assert told(rig, reservation) is None
    for status, reason, wanted in (
        ("Unknown", "Holding", None),
        ("False", "PartiallyHeld", (False, "PartiallyHeld", "2 of 3")),
        ("Unknown", "Holding", (False, "PartiallyHeld", "2 of 3")),
        ("True", "Held", (True, "Held", "2 of 3")),
    ):
        await rig.report_held(reservation, status, reason, "2 of 3")
        assert told(rig, reservation) == wanted
    assert len(rig.broker.named("acknowledge")) == 3


@provider(has_placeholders=True, refuses_unheld=True)
async def test_provider_refuses_what_it_cannot_hold_if_it_is_told_to(rig):
    reservation, used = await rig.place(), await rig.place()
    await rig.report_held(used, "True", "Held", "all")
    await rig.report_held(used, "False", "PartiallyHeld", "some")
    await rig.report_held(reservation, "False", "PartiallyHeld", "2 of 3")
    assert await rig.phase(reservation) == "Refused"
    assert rig.broker.refusals == {reservation: "cannot be held: 2 of 3"}
    assert list(rig.holds()) == [used], "it was held once, and its requester relies on it"


@provider(nodes="cpu=4,memory=8Gi")
async def test_overcommitment_is_condition_event_and_report_after_a_while(rig):
    reservation = await rig.place()
    rig.measure("cpu=4,memory=8Gi", pods="cpu=2")
    rig.provider.notify_measured()
    await asyncio.sleep(OVERCOMMITMENT_DELAY.total_seconds() - 1)
    assert told(rig, reservation)[1] == "NotConfigured"
    await asyncio.sleep(2)
    assert held(await rig.instruction(reservation)) == [("Held", "False", "Overcommitted")]
    message = "Pods of this cluster use 1 CPU / 0 Memory of the resources that it has lent"
    assert told(rig, reservation) == (False, "Overcommitted", message)
    assert [(one.type, one.reason) for one in rig.emitted][-1] == ("Warning", "Overcommitted")
    rig.measure("cpu=4,memory=8Gi")
    rig.provider.notify_measured()
    await asyncio.sleep(OVERCOMMITMENT_DELAY.total_seconds() + 1)
    assert told(rig, reservation)[1] == "NotConfigured"


# -- Events


def in_phase(phase, message="because"):
    found = object_samples.PROVIDER_INSTRUCTION
    return replace(found, status=replace(found.status, phase=phase, message=message))


@pytest.mark.parametrize(
    "before, after, message, wanted",
    [
        ("", "Held", "because", [("Normal", "Accepted", "because")]),
        ("", "Held", "", [("Normal", "Accepted", in_phase("").spec.message)]),
        ("Held", "Held", "because", []),
        ("Held", "Withdrawn", "because", [("Normal", "Withdrawn", "because")]),
        ("", "Refused", "because", [("Warning", "Refused", "because")]),
        ("Withdrawn", "Held", "because", [("Normal", "Accepted", "because")]),
    ],
)
def test_change_of_phase_is_an_event(before, after, message, wanted):
    found = events.hold_events(in_phase(before), in_phase(after, message))
    assert [(one.type, one.reason, one.message) for one in found] == wanted
