"""A provider that was killed, or whose broker or objects fail, frees nothing and forgets nothing."""

from asyncio import sleep

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

import make
from kubelend.core.errors import BrokerUnreachable, Unavailable, WrongPhase
from kubelend.core.lifecycle import Phase
from kubelend.wire.objects import Metadata, ProviderInstruction
from providers import EIGHT, FINISHED_FOR, Rig, provider
from virtual_time import in_virtual_time, settled

THREE = make.resources("cpu=3,memory=1Gi")
RETENTION = FINISHED_FOR.total_seconds()
UNREACHABLE = BrokerUnreachable("gone")


async def restarted(**settings):
    """A rig after a restart, and a reservation that it held before."""
    rig = Rig(**settings)
    async with rig.running():
        found = await rig.place()
    rig.restart()
    return rig, found


# -- restarts


@pytest.mark.parametrize("enforce", [True, False])
@in_virtual_time
async def test_holds_are_restored_before_anything_else(enforce):
    rig, found = await restarted(enforce=enforce)
    rig.broker.error = UNREACHABLE
    await rig.provider.restore()
    assert rig.holds() == {found: THREE}
    async with rig.running():
        await sleep(600)
        assert rig.holds() == {found: THREE}
        assert len(rig.hold_changes) == 1


@in_virtual_time
async def test_hold_that_ended_during_a_restart_is_withdrawn_when_the_broker_says_so():
    rig = Rig()
    async with rig.running():
        over, live = await rig.place(), await rig.place()
    rig.restart()
    rig.release(over)
    async with rig.running():
        await rig.notify(live)  # as the broker's list does
        await sleep(5)
        assert rig.holds() == {live: THREE}
        assert await rig.phase(over) == "Withdrawn"
        assert [call.reservation for call in rig.broker.named("find")] == [over]


@in_virtual_time
async def test_restored_hold_is_not_decided_again():
    rig, found = await restarted()
    rig.measure(pods=EIGHT)
    async with rig.running():
        await rig.notify(found)
        assert rig.holds() == {found: THREE}
        assert rig.broker.refusals == {}


@in_virtual_time
async def test_provider_killed_before_the_acknowledgement_continues_there():
    rig = Rig()
    rig.broker.seconds["acknowledge"] = 10
    async with rig.running():
        found = await rig.place()
        assert await rig.phase(found) == ""
    rig.restart()
    rig.measure()
    rig.broker.seconds = {}
    async with rig.running():
        await rig.notify(found)
        assert await rig.phase(found) == "Held"
        assert rig.holds() == {found: THREE}


@in_virtual_time
async def test_finished_object_is_deleted_after_a_restart_too():
    rig = Rig()
    async with rig.running():
        found = await rig.place()
        rig.release(found)
        await rig.notify(found)
    rig.restart()
    async with rig.running():
        assert rig.holds() == {}
        await sleep(RETENTION + 1)
        assert await rig.find_instruction(found) is None
        assert rig.broker.named("find") == []


@in_virtual_time
async def test_invalid_object_is_restored_from_the_broker():
    rig, found = await restarted()
    instruction = await rig.instruction(found)
    invalid = replace(instruction.spec, requested_cpu="much")
    await rig.objects.apply(replace(instruction, spec=invalid))
    async with rig.running():
        assert rig.holds() == {}
        await sleep(3)
        assert rig.holds() == {found: THREE}


@in_virtual_time
async def test_holds_stay_when_enforcement_is_turned_off():
    rig = Rig()
    async with rig.running():
        found = await rig.place()
    rig.enforce = False
    rig.restart()
    async with rig.running():
        await rig.notify(found)
        status = (await rig.instruction(found)).status
        assert rig.holds() == {found: THREE}
        assert (status.phase, status.enforced) == ("Held", False)


@pytest.mark.parametrize("name, namespace", [("by-hand", "lending"), ("rsv-9-provider", "else")])
@in_virtual_time
async def test_objects_that_the_agent_does_not_manage_are_ignored(name, namespace):
    rig, found = await restarted()
    instruction = await rig.instruction(found)
    other = replace(instruction, metadata=Metadata(name, namespace))
    stored = await rig.objects.apply(other)
    stored = await rig.objects.set_status(replace(stored, status=instruction.status)) or stored
    async with rig.running():
        assert list(rig.holds()) == [found]
        await sleep(2 * RETENTION)
        assert await rig.objects.find(ProviderInstruction, other.key) == stored


# -- objects


@provider()
async def test_deleted_object_is_restored_without_a_new_decision(rig):
    found = await rig.place()
    rig.measure(pods=EIGHT)  # by now it would be refused
    instruction = await rig.instruction(found)
    await rig.objects.delete(ProviderInstruction, instruction.key)
    await settled()
    again = await rig.instruction(found)
    assert again.metadata.uid != instruction.metadata.uid
    assert again.status.phase == "Held"
    assert rig.holds() == {found: THREE}


@in_virtual_time
async def test_object_that_was_deleted_unwatched_is_restored():
    rig, found = await restarted()
    await rig.provider.restore()
    await rig.objects.delete(ProviderInstruction, (await rig.instruction(found)).key)
    async with rig.running():
        assert rig.holds() == {found: THREE}
        await sleep(3)
        assert rig.holds() == {found: THREE}
        assert await rig.phase(found) == "Held"


@provider()
async def test_modified_object_is_corrected(rig):
    found = await rig.place()
    instruction = await rig.instruction(found)
    modified = replace(instruction.spec, requested_cpu="100")
    await rig.objects.apply(replace(instruction, spec=modified))
    await settled()
    assert (await rig.instruction(found)).spec == instruction.spec
    assert rig.holds() == {found: THREE}


@provider()
async def test_nothing_is_written_or_called_while_nothing_changes(rig):
    found = await rig.place()
    instruction, calls = await rig.instruction(found), len(rig.broker.calls)
    await sleep(50 * 60)
    rig.reservations.put(rig.broker.body(found))
    await settled()
    assert await rig.instruction(found) == instruction
    assert len(rig.broker.calls) == calls


@provider()
async def test_status_is_written_though_another_client_modifies_the_object(rig):
    rig.objects.has_conflicts = True
    with capture_logs() as lines:
        found = await rig.place()
    instruction = await rig.instruction(found)
    assert (instruction.status.phase, instruction.metadata.labels) == ("Held", {"team": "a"})
    assert [line["event"] for line in lines] == ["Reservation held"]


@in_virtual_time
async def test_objects_that_cannot_be_read_are_reported_and_retried():
    rig, found = await restarted()
    rig.health.require("provider")
    rig.objects.error = Unavailable("no API server")
    async with rig.running():
        await sleep(10)
        assert rig.health.errors == {"provider": "cannot read ProviderInstructions: no API server"}
        rig.objects.error = None
        await sleep(3)
        assert rig.health.not_ready_reason == ""
        assert rig.holds() == {found: THREE}


# -- the broker


@provider()
async def test_transient_error_is_retried_logged_once_and_ended_by_a_reconnect(rig):
    rig.broker.error = UNREACHABLE
    with capture_logs() as lines:
        found = await rig.place()
        await sleep(300)
    assert rig.holds() == {found: THREE}
    assert 5 < len(rig.broker.named("acknowledge")) < 30
    assert [line["log_level"] for line in lines] == ["warning"]
    rig.broker.error = None
    rig.reservations.notify_reconnected()
    await settled()
    assert rig.is_acknowledged(found)
    assert await rig.phase(found) == "Held"


@pytest.mark.parametrize("pods", ["", EIGHT], ids=["acknowledges", "refuses"])
@pytest.mark.parametrize("end", ["released", "archived"])
@provider()
async def test_outdated_state_is_corrected_when_the_broker_rejects_the_call(rig, pods, end):
    rig.measure(pods=pods)
    found = rig.reserve()
    outdated = rig.broker.body(found)
    rig.release(found) if end == "released" else rig.broker.archive(found)
    rig.reservations.put(outdated)
    await sleep(3)
    assert rig.holds() == {}
    assert await rig.phase(found) in ("Withdrawn", None)
    known = rig.reservations.find(found)
    assert known is None or known.status.phase == Phase.RELEASED
    assert len(rig.broker.calls) <= 3


@provider()
async def test_slow_call_blocks_no_other_reservation(rig):
    rig.broker.seconds["acknowledge"] = 10
    slow = await rig.place("cpu=1,memory=1Gi")
    rig.broker.seconds = {}
    quick = await rig.place("cpu=1,memory=1Gi")
    assert [await rig.phase(slow), await rig.phase(quick)] == ["", "Held"]
    await sleep(11)


@provider()
async def test_hold_whose_acknowledgement_got_no_response_is_kept(rig):
    rig.broker.lost_responses.add("acknowledge")
    found = await rig.place()
    rig.measure(pods=EIGHT)  # by now it would be refused
    rig.broker.lost_responses.clear()
    await sleep(5)
    assert rig.broker.named("refuse") == []
    assert rig.holds() == {found: THREE}
    assert await rig.phase(found) == "Held"


@provider()
async def test_refusal_that_got_no_response_is_repeated(rig):
    rig.measure(pods=EIGHT)
    rig.broker.lost_responses.add("refuse")
    found = rig.broker.desk.reserve("cpu=3,memory=1Gi")
    await rig.notify(found)
    rig.broker.lost_responses.clear()
    await sleep(5)
    assert rig.broker.desk.target(found) == "other"
    assert await rig.phase(found) == "Refused"
    assert rig.holds() == {}


@provider()
async def test_broker_that_contradicts_itself_is_asked_again(rig):
    rig.broker.errors["acknowledge"] = WrongPhase("not now")
    found = await rig.place()
    await sleep(30)
    assert await rig.phase(found) == ""
    assert rig.holds() == {found: THREE}
    rig.broker.errors.clear()
    await sleep(61)
    assert await rig.phase(found) == "Held"
