"""The Events of a ProviderInstruction: one for each change of its phase."""

import pytest
from msgspec.structs import replace

import object_samples
import providers
from kubelend.agent import events
from virtual_time import in_virtual_time

HELD = object_samples.PROVIDER_INSTRUCTION


def in_phase(phase, message="because"):
    return replace(HELD, status=replace(HELD.status, phase=phase, message=message))


@pytest.mark.parametrize(
    "before, after, wanted",
    [
        ("", "Held", [("Normal", "Accepted")]),
        ("Held", "Held", []),
        ("Held", "Withdrawn", [("Normal", "Withdrawn")]),
        ("", "Refused", [("Warning", "Refused")]),
        ("Withdrawn", "Held", [("Normal", "Accepted")]),
    ],
)
def test_change_of_phase_is_an_event(before, after, wanted):
    found = list(events.hold_events(in_phase(before), in_phase(after)))
    assert [(one.type, one.reason) for one in found] == wanted
    assert {one.message for one in found} <= {"because"}


def test_event_without_a_message_has_that_of_the_spec():
    [found] = events.hold_events(in_phase(""), in_phase("Held", ""))
    assert found.message == HELD.spec.message


@pytest.mark.parametrize("cpu, wanted", [("3", ["Accepted", "Withdrawn"]), ("9", ["Refused"])])
@in_virtual_time
async def test_provider_emits_them(cpu, wanted):
    rig = providers.Rig(nodes="cpu=4,memory=8Gi")
    async with rig.running():
        found = rig.broker.runner.reserve(f"cpu={cpu},memory=1Gi")
        await rig.notify(found)
        if len(wanted) > 1:
            rig.broker.runner.release(found)
            await rig.notify(found)
    assert [one.reason for one in rig.emitted] == wanted
