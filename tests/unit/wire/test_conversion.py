"""Between bodies and records: texts are parsed once, amounts stay exact, nothing is lost on the way back."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import make
from kubelend.core import errors, explanations, prices
from kubelend.core.lifecycle import Phase, Reason
from kubelend.core.models import REGION_LABEL, ClusterId
from kubelend.core.resources import Resources
from kubelend.wire import bodies, conversion, quantities
from kubelend.wire.conversion import RequestLimits

A, R = ClusterId("a"), ClusterId("r")
TERMS = RequestLimits(make.HOUR, 24 * make.HOUR, make.MINUTE)
CAPACITY = bodies.Quantities("4", "8Gi")

amounts = st.builds(
    Resources,
    cpu=st.integers(0, 2**62),
    memory=st.integers(0, 2**62),
    gpu=st.integers(0, 2**20),
    storage=st.integers(0, 2**62),
    extended=st.dictionaries(
        st.sampled_from(["example.com/fpga", "hugepages-2Mi"]), st.integers(1, 2**20)
    ),
)


def request(key="", **fields):
    wanted = fields.pop("wanted", bodies.Quantities("1", "1Gi"))
    return conversion.to_request(bodies.ReservationRequest(wanted, **fields), R, key, TERMS)


@given(amounts)
def test_amounts_come_back_exactly_as_offered(found):
    assert quantities.parse_offered(quantities.to_quantities(found), "x") == found


@given(amounts.filter(lambda found: found.cpu and found.memory))
def test_amounts_come_back_exactly_as_asked(found):
    assert quantities.parse_reservation_amounts(quantities.to_quantities(found)) == found


def test_identity_is_the_callers_and_not_the_bodys():
    body = bodies.Advertisement("somebody else", bodies.Metrics(CAPACITY))
    assert conversion.to_advertisement(body, A, make.T0).cluster == "a"


def test_capacity_stands_in_for_allocatable_and_nothing_for_allocated():
    body = bodies.Advertisement("a", bodies.Metrics(CAPACITY))
    found = conversion.to_advertisement(body, A, make.T0)
    assert found.allocatable == found.capacity == make.resources("cpu=4,memory=8Gi")
    assert found.allocated == Resources()
    assert found.sent_at == make.T0


def test_offers_are_rounded_down_and_what_is_used_up():
    metrics = bodies.Metrics(
        bodies.Quantities("1999999u", "1500m"), allocated=bodies.Quantities("1u", "1m")
    )
    found = conversion.to_advertisement(bodies.Advertisement("a", metrics), A, make.T0)
    assert found.capacity == Resources(cpu=1999, memory=1)
    assert found.allocated == Resources(cpu=1, memory=1)


def test_region_counts_as_one_of_the_labels():
    """Else a record could be made that no object has room for."""
    labels = {f"l{number}": "x" for number in range(64)}
    body = bodies.Advertisement("a", bodies.Metrics(CAPACITY), labels=labels, region="eu")
    with pytest.raises(
        errors.InvalidInput, match="labels: too many labels: 65 including the region"
    ):
        conversion.to_advertisement(body, A, make.T0)
    with pytest.raises(errors.InvalidInput, match=r"constraints\.labels: too many labels"):
        request(constraints=bodies.Constraints(labels=labels, region="eu"))
    named = {**dict(list(labels.items())[1:]), REGION_LABEL: "us"}
    found = request(constraints=bodies.Constraints(labels=named, region="eu"))
    assert (len(found.constraints.labels), found.constraints.labels[REGION_LABEL]) == (64, "eu")


def test_region_is_a_label_like_any_other():
    body = bodies.Advertisement("a", bodies.Metrics(CAPACITY), labels={"x": "y"}, region="eu")
    found = conversion.to_advertisement(body, A, make.T0)
    assert found.labels == {"x": "y", REGION_LABEL: "eu"}
    constraints = bodies.Constraints(region="eu", labels={"x": "y"})
    assert request(constraints=constraints).constraints.labels == {"x": "y", REGION_LABEL: "eu"}


def test_request_has_what_was_asked_and_what_the_broker_adds():
    found = request(key="k", priority=7, wait="30s", target_cluster_id="a", policy="cost")
    assert found.requester == "r"
    assert found.duration == make.HOUR
    assert (found.priority, found.wait, found.policy) == (7, 30 * make.SECOND, "cost")
    assert (found.constraints.pinned, found.key) == ("a", "k")
    plain = request()
    assert (plain.constraints.pinned, plain.key, plain.policy) == (None, None, "headroom")


@pytest.mark.parametrize(
    "fields, problem",
    [
        ({"duration": "25h"}, r"^duration: 25h exceeds the broker's maximum; request at most 24h"),
        ({"wait": "61s"}, r"^wait: 61s exceeds the broker's maximum; wait at most 1m"),
        ({"wait": "-1s"}, r"^wait: '-1s' is below zero"),
        ({"wait": "soon"}, r"^wait: 'soon' "),
        ({"duration": "0"}, r"^duration: '0' is not above zero"),
        ({"policy": "luck"}, r"^policy: 'luck' is unknown"),
        ({"wanted": bodies.Quantities("0", "1Gi")}, r"^requestedResources\.cpu: must be more"),
        ({"wanted": bodies.Quantities("1", "0")}, r"^requestedResources\.memory: must be more"),
        (
            {"wanted": bodies.Quantities("1", "")},
            r"^requestedResources\.memory: '' is not a quantity",
        ),
        ({"wanted": bodies.Quantities("1", "1Gi", gpu="-1")}, r"^requestedResources\.gpu: "),
        (
            {"wanted": bodies.Quantities("1", "1Gi", extended={"gpu": "1"})},
            r"^extended\.gpu: not an extended resource; use the field gpu",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_its_field(fields, problem):
    with pytest.raises(errors.InvalidInput, match=problem):
        request(**fields)


@pytest.mark.parametrize("text", ["", "0", "0s", "0h0m0s"])
def test_no_wait_is_none(text):
    assert not request(wait=text).wait


def test_prices_come_back_as_they_were_written():
    cost = bodies.Cost("0.05", "0.000000001", "2.5", "", "EUR")
    found = conversion.to_prices(cost)
    body = conversion.from_cluster(make.cluster(prices=found), Resources())
    assert body.cost == bodies.Cost("0.05", "0.000000001", "2.5", "", "EUR")


@pytest.mark.parametrize(
    "cost", [bodies.Cost(), bodies.Cost(currency="EUR"), bodies.Cost("", "", "", "", "")], ids=str
)
def test_cost_without_an_amount_is_no_price(cost):
    """It would be the cheapest of all: neither punished nor rewarded is who names none."""
    assert conversion.to_prices(cost) is None
    assert conversion.to_prices(bodies.Cost("0")) == prices.Prices("USD")


def test_currency_is_named_or_left_to_those_who_fit():
    constraints = bodies.Constraints(max_price_per_hour="1")
    assert request(constraints=constraints).constraints.currency == ""
    constraints = bodies.Constraints(currency="eur")
    assert request(constraints=constraints).constraints.currency == "EUR"


def test_cluster_shows_reserved_and_what_is_left_of_it():
    cluster = make.cluster("a", "cpu=4,memory=8Gi", allocated="cpu=1,memory=1Gi")
    body = conversion.from_cluster(cluster, make.resources("cpu=2,memory=1Gi"))
    assert body.resources.reserved == bodies.Quantities("2", "1Gi")
    assert body.resources.available == bodies.Quantities("1", "6Gi")


def test_overcommitted_cluster_has_nothing_left_and_says_so():
    cluster = make.cluster("a", "cpu=4,memory=8Gi", allocated="cpu=3,memory=1Gi")
    reserved = make.resources("cpu=2,memory=1Gi")
    body = conversion.from_cluster(cluster, reserved)
    assert body.resources.available == bodies.Quantities("0", "6Gi")
    status = conversion.from_cluster_status(cluster, reserved, 2, None, make.T0)
    assert status.message == "Overcommitted: the cluster's own pods use resources that it has lent"
    assert status.reservations == 2


def test_reservation_is_shown_with_all_its_moments():
    found = make.reservation(
        "rsv-1",
        make.request("cpu=1,memory=1Gi", "r", duration=90 * make.MINUTE, priority=3),
        phase=Phase.ACTIVE,
        reason=Reason.IN_USE,
        message="Resources in use in cluster a",
        target=A,
        left=(ClusterId("b"),),
        reserved_at=make.T0,
        expires_at=make.T0 + make.HOUR,
        acknowledged_at=make.T0,
        activated_at=make.T0,
    )
    assert msgspec.json.decode(msgspec.json.encode(conversion.from_reservation(found))) == {
        "id": "rsv-1",
        "requesterID": "r",
        "targetClusterID": "a",
        "requestedResources": {"cpu": "1", "memory": "1Gi"},
        "status": {
            "phase": "Active",
            "message": "Resources in use in cluster a",
            "reason": "InUse",
            "reservedAt": "2026-01-01T12:00:00Z",
            "expiresAt": "2026-01-01T13:00:00Z",
            "acknowledgedAt": "2026-01-01T12:00:00Z",
            "activatedAt": "2026-01-01T12:00:00Z",
        },
        "createdAt": "2026-01-01T12:00:00Z",
        "priority": 3,
        "duration": "1h30m0s",
        "previousClusterIDs": ["b"],
    }


def test_waiting_reservation_has_an_empty_target():
    """The field is always there: clients of the published system read it."""
    body = msgspec.json.decode(msgspec.json.encode(conversion.from_reservation(make.reservation())))
    assert body["targetClusterID"] == ""


def test_explanation_says_the_same_in_words_and_numbers():
    ledger = make.ledger(a="cpu=4,memory=8Gi", b="cpu=1,memory=8Gi")
    question = make.question("cpu=2,memory=1Gi")
    body = conversion.from_explanation(explanations.explain_placement(question, ledger.fleet, 5))
    assert body.summary == "1/2 clusters fit: 1 InsufficientCPU"
    assert (body.total, body.fitting, body.refusals) == (2, 1, {"InsufficientCPU": 1})
    fits, misses = body.candidates
    assert (fits.cluster_id, fits.fits, fits.refusals) == ("a", True, [])
    assert (misses.cluster_id, misses.fits, misses.refusals) == ("b", False, ["InsufficientCPU"])
    assert misses.remedy is not None
    assert misses.remedy.less == {"cpu": "1"}
