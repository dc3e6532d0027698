"""Each step of the agent is one log line at info, with the keys that an operator searches for."""

import pytest
from structlog.testing import capture_logs

import listeners
import make
import peers
import providers
import requesters
from kubelend.core.models import ReservationId
from virtual_time import in_virtual_time, passed, settled

REQUEST = {"namespace": "default", "name": "w"}
AMOUNTS = {"cpu": "2", "memory": "1Gi"}
EXPIRES = (make.T0 + make.HOUR).isoformat()
PLACED = REQUEST | AMOUNTS | {"reservation": "rsv-1", "cluster": "p1", "expires_at": EXPIRES}


@pytest.fixture
def lines():
    with capture_logs() as captured:
        yield captured


def logged(lines, prefix):
    """The message and the keys of the lines at info whose message begins so."""
    return [
        (line["event"], {k: v for k, v in line.items() if k not in ("event", "log_level")})
        for line in lines
        if line["event"].startswith(prefix) and line["log_level"] == "info"
    ]


@in_virtual_time
async def test_request_that_is_received_reserved_and_expires(lines):
    async with requesters.running() as rig:
        await rig.create_request(cpu="2")
        await passed(3700)
    assert logged(lines, "ResourceRequest ") == [
        ("ResourceRequest received", REQUEST | AMOUNTS),
        ("ResourceRequest reserved", PLACED),
        ("ResourceRequest expired", PLACED),
    ]


@in_virtual_time
async def test_request_that_is_active_and_released_by_the_broker(lines):
    async with requesters.running() as rig:
        await rig.create_request(cpu="2")
        rig.broker.runner.activate(ReservationId("rsv-1"))
        await rig.notify("rsv-1")
        rig.broker.runner.release(ReservationId("rsv-1"))
        await rig.notify("rsv-1")
    assert logged(lines, "ResourceRequest ")[2:] == [
        ("ResourceRequest active", PLACED),
        ("ResourceRequest released", PLACED),
    ]


@in_virtual_time
async def test_request_that_is_deleted_is_released(lines):
    async with requesters.running() as rig:
        key = await rig.create_request(cpu="2")
        await rig.delete(key)
        await passed(60)
    assert logged(lines, "ResourceRequest ")[2:] == [
        ("ResourceRequest released", REQUEST | {"reservation": "rsv-1"})
    ]


@pytest.mark.parametrize(
    "cpu, reason, steps",
    [("99", "NoCapacity", ["received", "rejected"]), ("none", "InvalidQuantity", ["rejected"])],
)
@in_virtual_time
async def test_request_that_is_rejected_has_its_reason(lines, cpu, reason, steps):
    async with requesters.running() as rig:
        key = await rig.create_request(cpu=cpu)
        await passed(60)
        message = (await rig.status(key)).message
    found = logged(lines, "ResourceRequest ")
    assert [event for event, _ in found] == [f"ResourceRequest {step}" for step in steps]
    assert found[-1][1] == REQUEST | {"reason": reason, "error": message}


@in_virtual_time
async def test_request_that_is_queued(lines):
    async with requesters.running() as rig:
        await rig.create_request("first", cpu="8")
        await rig.create_request(cpu="8", wait="10m")
    ((_, keys),) = logged(lines, "ResourceRequest queued")
    assert keys.items() >= (REQUEST | {"reservation": "rsv-2"}).items()


@in_virtual_time
async def test_renewal_has_its_new_expiry(lines):
    async with requesters.running() as rig:
        await rig.create_request(renew=True)
        await passed(2500)
    expiry = (make.T0 + make.HOUR + 40 * make.MINUTE).isoformat()
    assert logged(lines, "Reservation renewed") == [
        ("Reservation renewed", {"reservation": "rsv-1", "expires_at": expiry})
    ]


@in_virtual_time
async def test_reservation_instruction_that_is_delivered_and_finishes(lines):
    async with requesters.running() as rig:
        key = await rig.create_request(cpu="2")
        await rig.delete(key)
        await passed(60)
    found = logged(lines, "ReservationInstruction ")
    assert [event for event, _ in found] == [
        "ReservationInstruction delivered",
        "ReservationInstruction finished",
    ]
    for _, keys in found:
        assert keys.items() >= (PLACED | {"name": "rsv-1"}).items()


@pytest.mark.parametrize("source", ["stream", "poll"])
@in_virtual_time
async def test_instruction_of_the_broker(lines, source):
    rig = listeners.Rig()
    async with rig.running():
        lines.clear()
        found = rig.reserve()
        if source == "stream":
            rig.broker.send(found)
        else:
            rig.broker.disconnect(requesters.UNREACHABLE)
            rig.broker.stream_error = requesters.UNREACHABLE
            await passed(10)
        await settled()
    ((_, keys),) = logged(lines, "Instruction received")
    revision = keys.pop("revision")
    assert revision == rig.broker.body(found).revision
    assert keys == {
        "reservation": found,
        "phase": "Reserved",
        "cluster": "me",
        "requester": "r",
        "source": source,
    }


@in_virtual_time
async def test_hold_that_is_made_and_withdrawn(lines):
    rig = providers.Rig()
    async with rig.running():
        found = await rig.place()
        rig.release(found)
        await rig.notify(found)
        await settled()
    body = rig.broker.body(found)
    keys = {
        "reservation": found,
        "requester": "r",
        "cpu": "3",
        "memory": "1Gi",
        "expires_at": EXPIRES,
    }
    assert logged(lines, "Reservation ") == [
        ("Reservation held", keys),
        ("Reservation withdrawn", keys | {"reason": body.status.message}),
    ]


@in_virtual_time
async def test_hold_that_is_refused_has_its_reason(lines):
    rig = providers.Rig(policy=make.policy(deny=["r"]))
    async with rig.running():
        found = await rig.place()
    ((_, keys),) = logged(lines, "Reservation refused")
    assert (keys["reservation"], keys["reason"]) == (found, "this cluster does not lend to r")


@in_virtual_time
async def test_peering_from_its_start_to_its_end(lines):
    async with peers.running() as rig:
        key = await rig.instruct("rsv-1", "one")
        await rig.finish(key)
        await passed(60)
    keys = {"namespace": "default", "name": "rsv-1", "reservation": "rsv-1", "cluster": "one"}
    keys |= {"cpu": "500m", "memory": "1Gi"}
    assert logged(lines, "Peering ") == [
        ("Peering started", keys),
        ("Peering ready", keys | {"reason": "node ready"}),
        ("Peering disconnecting", keys),
        ("Peering disconnected", keys),
    ]
    assert logged(lines, "Reservation activated") == [
        ("Reservation activated", {"reservation": "rsv-1", "cluster": "one"})
    ]


@in_virtual_time
async def test_peering_that_breaks_is_logged_once(lines):
    async with peers.running() as rig:
        await rig.instruct("rsv-1", "one")
        rig.peering.unready["rsv-1"] = "node NotReady"
        await passed(300)
    (line,) = [line for line in lines if line["event"].startswith("Peering no longer ready")]
    assert (line["log_level"], line["reason"]) == ("warning", "node NotReady")
