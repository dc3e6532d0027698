"""Which Events are emitted for an object, and how they are written."""

import pytest

import broker_samples as samples
import make
from kubelend.controllers import events
from kubelend.core.lifecycle import Reason
from kubelend.wire.broker_objects import StoredRecord
from kubelend.wire.events import EventRecord, event_body

RESERVED = samples.reservation_object(samples.record(message="Resources locked in cluster lender"))
PHASES = {
    "": samples.request_object(),
    "Pending": samples.reservation_object(samples.record("Pending")),
    "Reserved": RESERVED,
    "Active": samples.reservation_object(samples.record("Active")),
    "Released": samples.reservation_object(samples.record("Released", reason=Reason.BY_REQUESTER)),
    "Expired": samples.reservation_object(samples.record("Released", reason=Reason.EXPIRED)),
    "Failed": samples.reservation_object(samples.record("Failed")),
    "Reserved elsewhere": samples.reservation_object(samples.record(target="other")),
}


@pytest.mark.parametrize(
    "before, after, expected",
    [
        ("", "Reserved", [("Normal", "Reserved")]),
        ("", "Pending", []),
        ("", "Failed", [("Warning", "Failed")]),
        ("Pending", "Reserved", [("Normal", "Reserved")]),
        ("Reserved", "Active", [("Normal", "Activated")]),
        ("Active", "Released", [("Normal", "Released")]),
        ("Active", "Expired", [("Normal", "Expired")]),
        ("Reserved", "Reserved", []),
        ("Reserved", "Reserved elsewhere", [("Normal", "Moved")]),
    ],
)
def test_change_of_phase_or_provider_is_an_event(before, after, expected):
    assert emitted(PHASES[before], PHASES[after]) == expected


def emitted(before, after):
    now = events.recorded(after)
    found = () if now is None else events.reservation_events(events.recorded(before), now, after)
    return [(one.type, one.reason) for one in found]


def test_edited_status_causes_no_event():
    edited = samples.with_status(RESERVED, phase="Failed", target_cluster_id="other")
    assert emitted(RESERVED, edited) == emitted(edited, RESERVED) == []
    assert emitted(RESERVED, samples.with_status(RESERVED, record=None)) == []
    assert emitted(RESERVED, samples.with_status(RESERVED, record=StoredRecord(1, "", "{"))) == []


def test_managed_objects_have_no_events():
    managed = samples.reservation_object(samples.record("Active"), is_managed=True)
    assert events.recorded(managed) is None
    stale = samples.with_status(samples.advertisement(labels=samples.MANAGED), phase="Stale")
    assert list(events.advertisement_events(samples.advertisement(), stale)) == []


def advertised(phase, overcommitted="False"):
    conditions = (samples.condition("Overcommitted", overcommitted),)
    return samples.with_status(samples.advertisement(), phase=phase, conditions=conditions)


@pytest.mark.parametrize(
    "before, after, expected",
    [
        (advertised(""), advertised("Active"), []),
        (advertised("Active"), advertised("Stale"), ["Stale"]),
        (advertised("Stale"), advertised("Active"), ["Active"]),
        (advertised("Active"), advertised("Active", "True"), ["Overcommitted"]),
        (advertised("Active", "True"), advertised("Active", "True"), []),
        (advertised("Active", "True"), advertised("Active"), []),
    ],
)
def test_events_of_advertisements(before, after, expected):
    assert [one.reason for one in events.advertisement_events(before, after)] == expected


def test_event_refers_to_its_object_and_fits_the_servers_limit():
    event = EventRecord("Warning", "Failed", "x" * 2000, RESERVED)
    body = event_body(event, make.T0 + make.MOMENT, "abc", "kubelend-broker")
    assert body["metadata"] == {"name": "mine.abc", "namespace": "hub"}
    assert body["involvedObject"] == {
        "apiVersion": "broker.fluidos.eu/v1alpha1",
        "kind": "Reservation",
        "namespace": "hub",
        "name": "mine",
        "uid": "u-1",
        "resourceVersion": "9",
    }
    assert len(str(body["message"])) == 1024
    assert body["lastTimestamp"] == "2026-01-01T12:00:00Z"
