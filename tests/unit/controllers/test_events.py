"""Which events are recorded for an object, and how they are written."""

from typing import Any, cast

import pytest

import broker_samples as samples
import make
from kubelend.controllers import events
from kubelend.core.lifecycle import Reason
from kubelend.kube.codec import UndecodableObject
from kubelend.wire.broker_objects import Reservation

RESERVED = samples.written(samples.record(message="Resources locked in cluster lender"))
PHASES = {
    "": samples.wish(),
    "Pending": samples.written(samples.record("Pending")),
    "Reserved": RESERVED,
    "Active": samples.written(samples.record("Active")),
    "Released": samples.written(samples.record("Released", reason=Reason.BY_REQUESTER)),
    "Expired": samples.written(samples.record("Released", reason=Reason.EXPIRED)),
    "Failed": samples.written(samples.record("Failed")),
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
    ],
)
def test_change_of_phase_is_recorded_once(before, after, expected):
    found = events.reservation_events(PHASES[before], PHASES[after])
    assert [(one.type, one.reason) for one in found] == expected


def test_other_provider_is_recorded():
    moved = samples.with_status(RESERVED, target_cluster_id="other")
    assert [one.reason for one in events.reservation_events(RESERVED, moved)] == ["Moved"]


def test_nothing_is_recorded_on_objects_of_the_broker():
    own = samples.written(samples.record("Active"), is_own=True)
    assert list(events.reservation_events(RESERVED, own)) == []
    stale = samples.with_status(samples.advertisement(labels=samples.OWN), phase="Stale")
    assert list(events.advertisement_events(samples.advertisement(), stale)) == []


def advertised(phase, overcommitted="False"):
    said = (samples.condition("Overcommitted", overcommitted),)
    return samples.with_status(samples.advertisement(), phase=phase, conditions=said)


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


def test_event_names_its_object_and_is_cut_to_what_the_server_takes():
    event = events.EventRecord("Warning", "Failed", "x" * 2000, RESERVED)
    body = events.event_body(event, make.T0 + make.MOMENT, "abc")
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


class EmittedEvents(list[Any]):
    """Collects events in place of an `EventRecorder`."""

    def emit(self, event: Any) -> None:
        self.append(event)


def test_object_that_cannot_be_read_is_reported_once_for_each_reason():
    emitted = EmittedEvents()
    reporter = events.UndecodableReporter(Reservation, cast(events.EventRecorder, emitted))
    odd = UndecodableObject("hub", "mine", "u-1", "nonsense")
    for found in (odd, odd, odd._replace(error="worse"), None, odd):
        reporter.report("mine", found)
    assert [one.message for one in emitted] == [
        "Skipped: nonsense",
        "Skipped: worse",
        "Skipped: nonsense",
    ]
    about: Any = events.event_body(emitted[0], make.T0, "abc")["involvedObject"]
    assert (about["kind"], about["name"], about["uid"]) == ("Reservation", "mine", "u-1")
