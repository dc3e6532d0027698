"""The provider holds or refuses what the broker places on it, and only the broker ends a hold."""

from asyncio import sleep

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

import make
from fake_broker import UNREACHABLE
from kubelend.agent import holds as agent_holds
from kubelend.core.errors import Unavailable, WrongPhase
from kubelend.core.inventory import Hold
from kubelend.core.lifecycle import Phase, Reason
from kubelend.core.pod_requests import OffloadedFrom, Pod
from kubelend.core.resources import Resources
from kubelend.wire.objects import Metadata, ProviderInstruction, ProviderInstructionSpec
from make import HOUR, MINUTE
from providers import EIGHT, FINISHED_FOR, Rig, provider
from virtual_time import in_virtual_time, settled

# -- admission


FREE = "cpu=8,memory=16Gi,gpu=2"
NIGHTLY = "Mon-Fri 18:00-08:00"
NOON = make.T0  # a Thursday


def refusal(wanted="cpu=4,memory=8Gi", *, free=FREE, lent=(), at=NOON, requester="r", **policy):
    lent = [Hold(whom, make.resources(amounts)) for whom, amounts in lent]
    free = make.resources(free) if isinstance(free, str) else free
    hold = Hold(requester, make.resources(wanted))
    return next(agent_holds.refusal_reasons(hold, at, make.policy(**policy), free, lent), "")


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"wanted": FREE},
        {"allow": ["team-*", "r"]},
        {"deny": ["team-*"]},
        {"keep_back": "cpu=4,memory=8Gi"},
        {"keep_back": "gpu=2"},
        {"max_lent": "cpu=4"},
        {"max_lent": "cpu=6", "lent": [("x", "cpu=2,memory=1Gi")]},
        {"max_lent": "gpu=0"},
        {"max_lent": "gpu=1", "lent": [("x", "gpu=2")]},
        {"max_per_requester": "cpu=4", "lent": [("x", "cpu=4,memory=8Gi")]},
        {"hours": [NIGHTLY], "at": NOON + 6 * make.HOUR},
        {"free": None, "wanted": "cpu=100,memory=1Ti", "keep_back": "cpu=8"},
    ],
    ids=str,
)
def test_admissible_reservation(case):
    assert refusal(**case) == ""


@pytest.mark.parametrize(
    "case, reason",
    [
        ({"wanted": "cpu=9,memory=8Gi"}, "requested 9 CPU / 8Gi Memory, but only {free}"),
        (
            {"wanted": "cpu=1,memory=1Gi,example.com/fpga=1"},
            "requested 1 CPU / 1Gi Memory / 1 example.com/fpga, but only {free}",
        ),
        (
            {"free": Resources(cpu=-1000, memory=8 << 30), "wanted": "cpu=1,memory=1Gi"},
            "requested 1 CPU / 1Gi Memory, but only 0 CPU / 8Gi Memory is free",
        ),
        (
            {"keep_back": "cpu=5"},
            "requested 4 CPU / 8Gi Memory, but of 8 CPU / 16Gi Memory free "
            "this cluster keeps back 5 CPU / 0 Memory",
        ),
        ({"max_lent": "cpu=5", "lent": [("x", "cpu=2,memory=1Gi")]}, "{cpu} 5, of which 2 is lent"),
        (
            {"max_lent": "memory=0"},
            "requested 8Gi memory, but this cluster lends at most 0, of which 0 is lent",
        ),
        (
            {"max_per_requester": "cpu=5", "lent": [("r", "cpu=2,memory=1Gi")]},
            "{cpu} 5 to r, of which 2 is lent",
        ),
        ({"deny": ["r"]}, "this cluster does not lend to r"),
        ({"deny": ["r"], "allow": ["r"]}, "this cluster does not lend to r"),
        ({"allow": ["team-*"]}, "r is not in this cluster's list of allowed requesters"),
        ({"hours": [NIGHTLY]}, "outside this cluster's lending hours: Mon-Fri 18:00-08:00"),
        ({"free": None, "deny": ["*"]}, "this cluster does not lend to r"),
        ({"free": None, "max_lent": "cpu=3"}, "{cpu} 3, of which 0 is lent"),
    ],
    ids=str,
)
def test_refusal_reason(case, reason):
    cpu = "requested 4 cpu, but this cluster lends at most"
    assert refusal(**case) == reason.format(cpu=cpu, free="8 CPU / 16Gi Memory is free")


# -- holding

THREE = make.resources("cpu=3,memory=1Gi")
RETENTION = FINISHED_FOR.total_seconds()


ALL = "cpu=8,memory=8Gi,gpu=4,storage=8Gi,example.com/fpga=1"


@provider(nodes=ALL)
async def test_reservation_is_held_written_and_acknowledged(rig):
    rig.broker.runner.advertise("me", ALL)
    found = await rig.place("cpu=3,memory=1Gi,gpu=0,example.com/fpga=0")
    instruction = await rig.instruction(found)
    assert rig.holds() == {found: THREE}
    assert rig.is_acknowledged(found)
    assert rig.reservations.find(found) == rig.broker.body(found)
    assert instruction.spec == ProviderInstructionSpec(
        reservation_name=found,
        requester_cluster_id="r",
        requested_cpu="3",
        requested_memory="1Gi",
        message="Hold 3 CPU / 1Gi Memory for requester r",
        expires_at=rig.broker.body(found).status.expires_at,
    )
    assert (instruction.status.phase, instruction.status.enforced) == ("Held", True)
    assert instruction.status.last_update_time == rig.now()
    wanted = "cpu=3,memory=1Gi,gpu=2,storage=4Gi,example.com/fpga=1"
    full = await rig.place(wanted)
    spec = (await rig.instruction(full)).spec
    assert (spec.requested_gpu, spec.requested_storage) == ("2", "4Gi")
    assert spec.extended_resources == {"example.com/fpga": "1"}
    assert rig.holds()[full] == make.resources(wanted)


@provider()
async def test_object_that_is_watched_is_not_read_again(rig):
    found = await rig.place()
    rig.objects.reads.clear()
    rig.broker.runner.activate(found)
    await rig.notify(found)
    rig.broker.runner.release(found)
    await rig.notify(found)
    assert await rig.phase(found) == "Withdrawn"
    assert rig.objects.reads == {ProviderInstruction: 1}, "by this test"


@provider()
async def test_publisher_is_notified_of_every_change_of_holds(rig):
    first, second = await rig.place(), await rig.place()
    rig.release(first)
    await rig.notify(first)
    assert rig.hold_changes == [{first: THREE}, {first: THREE, second: THREE}, {second: THREE}]


@provider()
async def test_reservation_that_does_not_fit_is_refused_and_moves_on(rig):
    rig.measure(pods="cpu=6,memory=1Gi")
    found = rig.broker.runner.reserve("cpu=3,memory=1Gi")
    await rig.notify(found)
    assert rig.broker.runner.target(found) == "other"
    reason = "requested 3 CPU / 1Gi Memory, but only 2 CPU / 7Gi Memory is free"
    assert rig.broker.refusals == {found: reason}
    assert (rig.holds(), rig.hold_changes) == ({}, [])
    status = (await rig.instruction(found)).status
    assert (status.phase, status.enforced, status.message) == ("Refused", False, reason)
    await sleep(RETENTION + 1)
    assert await rig.find_instruction(found) is None


@provider(policy=make.policy(deny=["r"]))
async def test_reservation_that_nobody_else_accepts_fails_and_stays_refused(rig):
    found = await rig.place()
    assert rig.broker.runner[found].reason is Reason.REFUSED
    assert await rig.phase(found) == "Refused"


@provider()
async def test_second_of_two_concurrent_reservations_for_the_last_capacity_is_refused(rig):
    rig.broker.seconds = {"acknowledge": 1, "refuse": 1}
    first, second = rig.reserve("cpu=5,memory=1Gi"), rig.reserve("cpu=5,memory=1Gi")
    await rig.notify(first, second)
    await sleep(2)
    assert rig.is_acknowledged(first)
    assert rig.holds() == {first: make.resources("cpu=5,memory=1Gi")}
    assert rig.broker.refusals[second].endswith("only 3 CPU / 7Gi Memory is free")


@provider(policy=make.policy(max_per_requester="cpu=4"))
async def test_caps_count_existing_holds(rig):
    held = [await rig.place(), await rig.place(), await rig.place(requester="x")]
    assert [await rig.phase(each) for each in held] == ["Held", "Refused", "Held"]


@provider(policy=make.policy(hours=["11:00-13:00"]), offset=5 * HOUR)
async def test_opening_hours_are_checked_at_the_time_of_the_placement(rig):
    """A clock that is hours off refuses nothing, and neither does a late instruction."""
    assert await rig.phase(await rig.place()) == "Held"


@provider(nodes="")
async def test_decision_waits_for_the_first_measurement(rig):
    found = await rig.place()
    await sleep(30)
    assert await rig.find_instruction(found) is None
    assert rig.broker.runner[found].target == "me"
    rig.measure()
    await sleep(1)
    assert await rig.phase(found) == "Held"


@pytest.mark.parametrize("is_active", [False, True], ids=["acknowledged", "active"])
@provider(nodes="cpu=1,memory=1Gi")
async def test_reservation_that_can_no_longer_be_refused_is_held_whatever_is_free(rig, is_active):
    found = rig.reserve()
    if is_active:
        rig.broker.runner.activate(found)
    else:
        rig.broker.runner.acknowledge(found, "me")
    await rig.notify(found)
    assert rig.holds() == {found: THREE}
    assert await rig.phase(found) == "Held"
    assert rig.is_acknowledged(found)


@provider(nodes="", enforce=False)
async def test_without_enforcement_it_is_held_whatever_is_free(rig):
    found = await rig.place("cpu=50,memory=1Gi")
    status = (await rig.instruction(found)).status
    assert (status.phase, status.enforced) == ("Held", False)
    assert "enforcement is off" in status.message
    assert rig.is_acknowledged(found)
    assert rig.holds() == {found: make.resources("cpu=50,memory=1Gi")}


@provider(enforce=False, policy=make.policy(max_lent="cpu=4"))
async def test_without_enforcement_the_policy_still_applies(rig):
    assert [await rig.phase(await rig.place()) for _ in range(2)] == ["Held", "Refused"]


@pytest.mark.parametrize("enforce", [True, False])
@in_virtual_time
async def test_pods_of_a_reservation_count_once(enforce):
    rig = Rig(enforce=enforce)
    async with rig.running():
        found = await rig.place()
        offloaded = OffloadedFrom("r", found)
        amounts = make.resources("cpu=2,memory=1Gi")
        rig.inventory.put_pod(Pod("p", "n", amounts, offloaded_from=offloaded))
        # The broker, which is sent this, subtracts what it has reserved by itself.
        assert rig.inventory.totals().allocated == Resources()
        assert rig.inventory.free() == make.resources("cpu=5,memory=7Gi")


@provider()
async def test_reservations_of_other_clusters_are_ignored(rig):
    found = rig.broker.runner.reserve("cpu=3,memory=1Gi", pinned="other")
    await rig.notify(found)
    assert await rig.find_instruction(found) is None
    assert rig.broker.calls == []
    own = rig.broker.runner.reserve("cpu=3,memory=1Gi", requester="me", pinned="other")
    rig.release(own)
    await rig.notify(own)
    await sleep(2 * RETENTION)
    assert rig.reservations.find(own) is not None, "left to the requester to evict"


@provider(policy=make.policy(hours=[f"Mon 00:00-00:{each:02}" for each in range(1, 60)] * 2))
async def test_reason_is_never_longer_than_the_api_allows(rig):
    found = await rig.place()
    assert len(rig.broker.refusals[found]) == 1024


# -- the end of a hold


@provider()
async def test_renewal_updates_the_object_and_keeps_labels_of_others(rig):
    found = await rig.place()
    instruction = await rig.instruction(found)
    labelled = replace(instruction.metadata, labels={"team": "a"})
    await rig.objects.apply(replace(instruction, metadata=labelled))
    rig.broker.runner.renew(found, 2 * HOUR)
    await rig.notify(found)
    instruction = await rig.instruction(found)
    assert instruction.spec.expires_at == make.T0 + 2 * HOUR
    assert instruction.status.phase == "Held"
    assert instruction.metadata.labels == {"team": "a"}
    assert len(rig.hold_changes) == 1


def expire(runner, _):
    runner.pass_time(HOUR)
    runner.expire()


DRAINED = (
    "Cluster me was drained: maintenance; then 0/2 clusters fit: 1 NotPinned, 1 PreviousProvider"
)


@pytest.mark.parametrize(
    "end, message",
    [
        (lambda runner, found: runner.release(found), "Released by requester r"),
        (expire, "Duration elapsed"),
        (lambda runner, _: runner.drain("me"), DRAINED),
    ],
    ids=["released", "expired", "drained"],
)
@provider()
async def test_ended_hold_is_withdrawn_and_its_object_deleted_after_the_retention(
    rig, end, message
):
    found = await rig.place()
    end(rig.broker.runner, found)
    await rig.notify(found)
    status = (await rig.instruction(found)).status
    assert rig.holds() == {}
    assert (status.phase, status.enforced) == ("Withdrawn", False)
    assert status.message.startswith(message)
    assert status.finished_at == rig.now()
    await sleep(RETENTION - 1)
    assert await rig.phase(found) == "Withdrawn"
    await sleep(2)
    assert await rig.find_instruction(found) is None
    assert rig.reservations.find(found) is None


@provider()
async def test_reservation_that_moved_elsewhere_is_withdrawn_and_evicted_after_each_update(rig):
    found = rig.broker.runner.reserve("cpu=3,memory=1Gi")
    await rig.notify(found)
    assert rig.holds() == {found: THREE}
    rig.broker.runner.drain("me")
    await rig.notify(found)
    assert (await rig.instruction(found)).status.message == "Moved to cluster other"
    assert rig.holds() == {}
    for phase in ["Withdrawn", None]:
        rig.broker.runner.renew(found, 2 * HOUR)
        await rig.notify(found)
        assert rig.reservations.find(found) is None
        assert await rig.phase(found) == phase
        await sleep(RETENTION + 1)
    assert rig.broker.named("find") == []
    rig.release(found)
    await rig.notify(found)
    await sleep(RETENTION + 1)
    assert rig.reservations.find(found) is None


@provider()
async def test_reservation_that_the_broker_does_not_know_is_withdrawn(rig):
    found = await rig.place()
    rig.broker.archive(found)
    await sleep(3)
    rig.reservations.remove(found)
    await settled()
    assert rig.holds() == {}
    message = (await rig.instruction(found)).status.message
    assert message == "Reservation not found on the broker"


@provider()
async def test_reservation_that_ended_before_it_was_held_is_evicted_after_the_retention(rig):
    found = rig.reserve()
    rig.release(found)
    await rig.notify(found)
    assert await rig.find_instruction(found) is None
    assert rig.reservations.find(found) is not None
    await sleep(RETENTION + 1)
    assert rig.reservations.find(found) is None


@provider()
async def test_finished_object_without_a_time_is_deleted_too(rig):
    found = await rig.place()
    rig.release(found)
    await rig.notify(found)
    instruction = await rig.instruction(found)
    timeless = replace(instruction.status, finished_at=None)
    await rig.objects.set_status(replace(instruction, status=timeless))
    await sleep(2 * RETENTION)
    assert await rig.find_instruction(found) is None


# -- clocks


@provider(offset=HOUR + MINUTE)
async def test_clock_that_is_an_hour_ahead_withdraws_nothing(rig):
    found = await rig.place()
    assert rig.holds() == {found: THREE}
    await sleep(59 * 60)
    assert rig.holds() == {found: THREE}
    assert await rig.phase(found) == "Held"
    assert len(rig.broker.named("find")) < 65


@provider()
async def test_broker_is_asked_when_a_hold_has_expired_by_the_local_clock(rig):
    found = await rig.place()
    expire(rig.broker.runner, found)
    await sleep(HOUR.total_seconds() - 1)
    assert rig.holds() == {found: THREE}
    await sleep(3)
    assert rig.holds() == {}
    assert await rig.phase(found) == "Withdrawn"


@provider()
async def test_overdue_hold_stays_while_the_broker_is_unreachable(rig):
    found = await rig.place()
    rig.broker.error = UNREACHABLE
    await sleep(2 * HOUR.total_seconds())
    assert rig.holds() == {found: THREE}
    rig.broker.error = None
    rig.broker.runner.pass_time(2 * HOUR)
    rig.broker.runner.expire()
    await rig.notify(found)
    assert rig.holds() == {}


# -- failures: restarts


async def restarted(**settings):
    """A rig after a restart, and a reservation that it held before."""
    rig = Rig(**settings)
    async with rig.running():
        found = await rig.place()
    rig.restart()
    return rig, found


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
    rig, found = await restarted()
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


# -- failures: objects


@pytest.mark.parametrize("is_deleted", [True, False], ids=["deleted", "modified"])
@provider()
async def test_deleted_or_modified_object_is_restored_without_a_new_decision(rig, is_deleted):
    found = await rig.place()
    rig.measure(pods=EIGHT)  # by now it would be refused
    instruction = await rig.instruction(found)
    if is_deleted:
        await rig.objects.delete(ProviderInstruction, instruction.key)
    else:
        modified = replace(instruction.spec, requested_cpu="100")
        await rig.objects.apply(replace(instruction, spec=modified))
    await settled()
    again = await rig.instruction(found)
    assert (again.metadata.uid != instruction.metadata.uid) == is_deleted
    assert (again.spec, again.status.phase) == (instruction.spec, "Held")
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
async def test_nothing_is_written_or_called_while_nothing_changes(rig):
    found = await rig.place()
    instruction, calls = await rig.instruction(found), len(rig.broker.calls)
    await sleep(50 * 60)
    rig.reservations.put(rig.broker.body(found))
    await settled()
    assert await rig.instruction(found) == instruction
    assert len(rig.broker.calls) == calls


@in_virtual_time
async def test_objects_that_cannot_be_read_are_reported_and_retried():
    rig, found = await restarted()
    rig.health.require("provider")
    rig.objects.list_error = Unavailable("no API server")
    async with rig.running():
        await sleep(10)
        assert rig.health.errors == {"provider": "cannot read ProviderInstructions: no API server"}
        rig.objects.list_error = None
        await sleep(3)
        assert rig.health.not_ready_reason == ""
        assert rig.holds() == {found: THREE}


# -- failures: the broker


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


@pytest.mark.parametrize("is_refused", [False, True])
@provider()
async def test_decision_whose_call_got_no_response_is_repeated_and_not_changed(rig, is_refused):
    rig.measure(pods=EIGHT if is_refused else "")
    rig.broker.loses_responses = True
    found = rig.broker.runner.reserve("cpu=3,memory=1Gi")
    await rig.notify(found)
    rig.measure(pods=EIGHT)  # by now any would be refused
    rig.broker.loses_responses = False
    await sleep(5)
    assert rig.broker.runner.target(found) == ("other" if is_refused else "me")
    assert bool(rig.broker.named("refuse")) == is_refused
    assert await rig.phase(found) == ("Refused" if is_refused else "Held")
    assert rig.holds() == ({} if is_refused else {found: THREE})


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
