"""Conversion between bodies and records of the core: exact, complete, and with errors that name the field."""

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import make
from kubelend.core import errors, explanations, lending, prices
from kubelend.core.lifecycle import Phase, Reason
from kubelend.core.models import REGION_LABEL, ClusterId
from kubelend.core.resources import Resources
from kubelend.wire import admin_bodies, admin_conversion, bodies, conversion, json_types, quantities
from kubelend.wire.admin_bodies import QuotaRequest
from kubelend.wire.bodies import LendingPolicy
from kubelend.wire.conversion import RequestLimits

A, R = ClusterId("a"), ClusterId("r")
LIMITS = RequestLimits(make.HOUR, 24 * make.HOUR, make.MINUTE)
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
    return conversion.to_request(bodies.ReservationRequest(wanted, **fields), R, key, LIMITS)


@given(amounts)
def test_offered_amounts_round_trip(found):
    assert quantities.parse_offered(quantities.to_quantities(found), "x") == found


@given(amounts.filter(lambda found: found.cpu and found.memory))
def test_requested_amounts_round_trip(found):
    assert quantities.parse_reservation_amounts(quantities.to_quantities(found)) == found


def test_allocatable_defaults_to_capacity_and_allocated_to_zero():
    """The identity is that of the caller, and the region one of the labels."""
    metrics = bodies.Metrics(CAPACITY)
    body = bodies.Advertisement("somebody else", metrics, labels={"x": "y"}, region="eu")
    found = conversion.to_advertisement(body, A, make.T0)
    assert found.allocatable == found.capacity == make.resources("cpu=4,memory=8Gi")
    assert found.allocated == Resources()
    assert (found.cluster, found.sent_at) == ("a", make.T0)
    assert found.labels == {"x": "y", REGION_LABEL: "eu"}


def test_offered_amounts_are_rounded_down_and_allocated_and_requested_ones_up():
    metrics = bodies.Metrics(
        bodies.Quantities("1999999u", "1500m"), allocated=bodies.Quantities("1u", "1m")
    )
    found = conversion.to_advertisement(bodies.Advertisement("a", metrics), A, make.T0)
    assert found.capacity == Resources(cpu=1999, memory=1)
    assert found.allocated == Resources(cpu=1, memory=1)
    assert request(**wanting("1100u", "100m")).resources == Resources(cpu=2, memory=1)


def test_region_counts_as_one_of_the_labels():
    """Otherwise a record could have more labels than an object allows."""
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


def test_request_has_the_requested_values_and_the_defaults():
    found = request(key="k", priority=7, wait="30s", target_cluster_id="a", policy="cost")
    assert (found.requester, found.duration) == ("r", make.HOUR)
    assert (found.priority, found.wait, found.policy) == (7, 30 * make.SECOND, "cost")
    assert (found.constraints.pinned, found.key) == ("a", "k")
    plain = request()
    assert (plain.constraints.pinned, plain.key, plain.policy) == (None, None, "headroom")
    assert not any(request(wait=text).wait for text in ("", "0", "0s", "0h0m0s"))


def wanting(cpu="1", memory="1Gi", **more):
    return {"wanted": bodies.Quantities(cpu, memory, **more)}


def constraining(**constraints):
    return {"constraints": bodies.Constraints(**constraints)}


@pytest.mark.parametrize(
    "fields, kind, problem",
    [
        ({"duration": "25h"}, "Input", "duration: 25h exceeds the broker's maximum; request at"),
        ({"duration": "0"}, "Duration", "duration: '0' is not above zero"),
        ({"duration": "-1h"}, "Duration", "duration: '-1h' is not above zero"),
        ({"duration": "soon"}, "Duration", "duration: "),
        ({"wait": "61s"}, "Input", "wait: 61s exceeds the broker's maximum; wait at most 1m"),
        ({"wait": "-1s"}, "Duration", "wait: '-1s' is below zero"),
        ({"wait": "soon"}, "Duration", "wait: 'soon' "),
        ({"policy": "luck"}, "Input", "policy: 'luck' is unknown"),
        ({"weights": {"price": 1001.0}}, "Input", "weights.price: 1001.0 is not between"),
        (wanting("0"), "Quantity", "requestedResources.cpu: must be more than zero"),
        (wanting("-0"), "Quantity", "requestedResources.cpu: must be more than zero"),
        (wanting(memory="0"), "Quantity", "requestedResources.memory: must be more than zero"),
        (wanting(""), "Quantity", "requestedResources.cpu: '' is not a quantity"),
        (wanting(memory=""), "Quantity", "requestedResources.memory: '' is not a quantity"),
        (wanting(gpu="-1"), "Quantity", "requestedResources.gpu: "),
        (wanting(extended={"gpu": "1"}), "Input", "extended.gpu: not an extended resource; use"),
        (constraining(max_price_per_hour="cheap"), "Input", "constraints.maxPricePerHour: "),
        (constraining(currency="€"), "Input", "constraints.currency: "),
    ],
    ids=str,
)
def test_invalid_request_is_rejected_with_its_field(fields, kind, problem):
    with pytest.raises(errors.InvalidInput) as rejected:
        request(**fields)
    assert rejected.value.code == f"Invalid{kind}"
    assert str(rejected.value).startswith(problem)


LOTS = bodies.Quantities("lots", "1")


@pytest.mark.parametrize(
    "resources, fields, problem",
    [
        (bodies.Metrics(bodies.Quantities("-1", "1")), {}, "resources.capacity.cpu: '-1' is neg"),
        (bodies.Metrics(bodies.Quantities("1", "")), {}, "resources.capacity.memory: '' is not"),
        (bodies.Metrics(CAPACITY, LOTS), {}, "resources.allocatable.cpu: "),
        (bodies.Metrics(CAPACITY, CAPACITY, LOTS), {}, "resources.allocated.cpu: "),
        (bodies.Metrics(CAPACITY), {"valid_for": "0s"}, "validFor: '0s' is not above zero"),
        (bodies.Metrics(CAPACITY), {"valid_for": "long"}, "validFor: "),
        (bodies.Metrics(CAPACITY), {"cost": bodies.Cost("-1")}, "cost.cpuCost: "),
        (bodies.Metrics(CAPACITY), {"cost": bodies.Cost(currency="E U")}, "cost.currency: "),
    ],
    ids=str,
)
def test_invalid_advertisement_is_rejected_with_its_field(resources, fields, problem):
    with pytest.raises(errors.InvalidInput) as rejected:
        conversion.to_advertisement(bodies.Advertisement("a", resources, **fields), A, make.T0)
    assert str(rejected.value).startswith(problem)


def test_prices_round_trip():
    cost = bodies.Cost("0.05", "0.000000001", "2.5", "", "EUR")
    found = conversion.to_prices(cost)
    body = conversion.from_cluster(make.cluster(prices=found), Resources())
    assert body.cost == bodies.Cost("0.05", "0.000000001", "2.5", "", "EUR")


@pytest.mark.parametrize(
    "cost", [bodies.Cost(), bodies.Cost(currency="EUR"), bodies.Cost("", "", "", "", "")], ids=str
)
def test_cost_without_an_amount_is_no_price(cost):
    """A price of zero would be the lowest of all."""
    assert conversion.to_prices(cost) is None
    assert conversion.to_prices(bodies.Cost("0")) == prices.Prices("USD")


def test_currency_is_optional_and_normalized():
    constraints = bodies.Constraints(max_price_per_hour="1")
    assert request(constraints=constraints).constraints.currency == ""
    constraints = bodies.Constraints(currency="eur")
    assert request(constraints=constraints).constraints.currency == "EUR"


def test_overcommitted_cluster_has_no_negative_amount_and_a_message():
    cluster = make.cluster("a", "cpu=4,memory=8Gi", allocated="cpu=3,memory=1Gi")
    reserved = make.resources("cpu=2,memory=1Gi")
    body = conversion.from_cluster(cluster, reserved)
    assert body.resources.reserved == bodies.Quantities("2", "1Gi")
    assert body.resources.available == bodies.Quantities("0", "6Gi")
    status = conversion.from_cluster_status(cluster, reserved, 2, None, make.T0)
    assert status.message == "Overcommitted: the cluster's own pods use resources that it has lent"
    assert status.reservations == 2


def test_reservation_has_all_timestamps():
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
    waiting = msgspec.json.encode(conversion.from_reservation(make.reservation()))
    assert msgspec.json.decode(waiting)["targetClusterID"] == "", "always there, as published"


def test_explanation_has_a_summary_and_the_candidates():
    ledger = make.ledger(a="cpu=4,memory=8Gi", b="cpu=1,memory=8Gi")
    question = make.question("cpu=2,memory=1Gi")
    body = conversion.from_explanation(explanations.explain_placement(question, ledger.fleet, 5))
    assert body.summary == "1/2 clusters fit: 1 InsufficientCPU"
    assert (body.total, body.fitting, body.rejections) == (2, 1, {"InsufficientCPU": 1})
    fits, misses = body.candidates
    assert (fits.cluster_id, fits.fits, fits.rejections) == ("a", True, [])
    assert (misses.cluster_id, misses.fits, misses.rejections) == ("b", False, ["InsufficientCPU"])
    assert misses.suggestion is not None
    assert misses.suggestion.less == {"cpu": "1"}


# -- policies and quotas


FULL = LendingPolicy(
    allow=["team-*", "x"],
    deny=["team-b"],
    keep_back={"cpu": "4", "memory": "8Gi"},
    max_lent={"gpu": "0", "cpu": "32"},
    max_per_requester={"cpu": "8", "example.com/fpga": "1"},
    hours=["Mon-Fri 18:00-08:00 Europe/Rome", "Sat,Sun 00:00-24:00"],
)


def test_policy_round_trips():
    policy = admin_conversion.to_policy(FULL)
    assert policy == make.policy(
        allow=["team-*", "x"],
        deny=["team-b"],
        keep_back="cpu=4,memory=8Gi",
        max_lent="gpu=0,cpu=32",
        max_per_requester="cpu=8,example.com/fpga=1",
        hours=FULL.hours,
    )
    assert admin_conversion.from_policy(policy) == FULL
    assert admin_conversion.from_policy(None) is None


def test_amounts_are_rounded_against_lending_more():
    """keepBack is rounded up, the maximum amounts down."""
    body = LendingPolicy(keep_back={"cpu": "0.0005"}, max_lent={"cpu": "0.0015", "gpu": 2})
    policy = admin_conversion.to_policy(body)
    assert (policy.keep_back.cpu, policy.max_lent) == (1, {"cpu": 1, "gpu": 2})


@pytest.mark.parametrize(
    "body, problem",
    [
        (LendingPolicy(allow=[" "]), "policy.allow: ' ' is not a cluster name or pattern"),
        (LendingPolicy(deny=["a\nb"]), "policy.deny: 'a\\nb' is not a cluster name or pattern"),
        (LendingPolicy(keep_back={"cpu": "many"}), "policy.keepBack.cpu: "),
        (LendingPolicy(max_lent={"cpu": "-1"}), "policy.maxLent.cpu: '-1' is negative"),
        (LendingPolicy(max_lent={"no such name!": "1"}), "is not a Kubernetes resource name"),
        (
            LendingPolicy(max_per_requester={"gpu": "1", "nvidia.com/gpu": "2"}),
            "policy.maxPerRequester.nvidia.com/gpu: is given twice",
        ),
        (
            LendingPolicy(hours=["08:00-18:00", "late"]),
            "policy.hours: 'late' is not a valid opening-hours text",
        ),
        (LendingPolicy(hours=["08:00-18:00 Mars/Base"]), "Mars/Base is not a known time zone"),
    ],
    ids=str,
)
def test_invalid_policy_is_rejected_with_its_field(body, problem):
    with pytest.raises(errors.InvalidInput) as raised:
        admin_conversion.to_policy(body, "policy")
    assert problem in str(raised.value)


def test_effective_policy_has_the_lists_of_both_policies():
    other = make.policy(allow=["team-a"], hours=["08:00-18:00"])
    holds = lending.effective_policy(admin_conversion.to_policy(FULL), other)
    body = admin_conversion.from_lending(holds)
    assert body == bodies.EffectivePolicy(
        allow=[["team-*", "x"], ["team-a"]],
        deny=["team-b"],
        keep_back={"cpu": "4", "memory": "8Gi"},
        max_lent={"cpu": "32", "gpu": "0"},
        max_per_requester={"cpu": "8", "example.com/fpga": "1"},
        hours=[FULL.hours, ["08:00-18:00"]],
    )
    assert admin_conversion.from_lending(None) is None


def test_withheld_amounts_are_available_and_not_lendable():
    holds = lending.effective_policy(make.policy(keep_back="cpu=2", max_lent="gpu=1"), None)
    available, reserved = make.resources("cpu=8,memory=8Gi,gpu=4"), make.resources("gpu=1")
    assert admin_conversion.withheld_amounts(holds, available, reserved) == {"cpu": "2", "gpu": "4"}
    assert admin_conversion.withheld_amounts(None, available, reserved) == {}
    assert admin_conversion.withheld_amounts(holds, make.resources("cpu=1"), reserved) == {
        "cpu": "1"
    }


def test_quota_has_its_usage():
    runner = make.CommandRunner()
    runner.advertise("a", "cpu=8,memory=8Gi", prices=make.price_list("EUR", cpu="0.25"))
    body = QuotaRequest({"cpu": "32", "gpu": 0}, reservations=5, budget="50", currency="eur")
    runner.allot("r", admin_conversion.to_quota(body))
    runner.allot("s", admin_conversion.to_quota(QuotaRequest()))
    runner.reserve("cpu=6,memory=1Gi")
    runner.reserve("cpu=4,memory=1Gi", wait=make.HOUR)
    usages = runner.ledger.quota_usages.by_requester
    shown = {str(r): admin_conversion.from_quota(r, usages[r], runner.now) for r in usages}
    assert shown["r"] == admin_bodies.QuotaStatus(
        "r",
        admin_bodies.Quota({"cpu": "32", "gpu": "0"}, 5, "50", "EUR"),
        admin_bodies.QuotaUse(
            held={"cpu": "6", "memory": "1Gi"},
            waited_for={"cpu": "4", "memory": "1Gi"},
            reservations=1,
            waiting=1,
            spent_today="1.5",
        ),
    )
    assert shown["s"] == admin_bodies.QuotaStatus(
        "s", admin_bodies.Quota(), admin_bodies.QuotaUse()
    )


@pytest.mark.parametrize(
    "body, problem",
    [
        (QuotaRequest({"cpu": "x"}), "amounts.cpu: "),
        (QuotaRequest(budget="-1"), "budget: '-1' is not a price"),
        (QuotaRequest(currency="E"), "currency: 'E' is not a currency code"),
    ],
    ids=str,
)
def test_quota_that_cannot_be_is_refused_with_its_field(body, problem):
    with pytest.raises(errors.InvalidInput, match=re.escape(problem)):
        admin_conversion.to_quota(body)


HOURS = st.from_regex(json_types.HOURS["pattern"].replace("$", r"\Z"))


@given(HOURS.filter(lambda text: len(text) <= 160))
def test_hours_that_match_the_pattern_are_parsed_or_rejected_for_their_meaning(text):
    assert re.search(
        "^$|is not a known time zone|begins and ends at the same time", problem_of(text)
    )


@given(st.text("0123456789:- ,MonTueUTC/Z", max_size=24))
def test_hours_that_are_parsed_match_the_pattern(text):
    assert problem_of(text) or re.fullmatch(json_types.HOURS["pattern"], text)


@given(st.text(st.characters(max_codepoint=0x200), max_size=6))
def test_accepted_names_are_those_that_match_the_pattern(text):
    try:
        lending.check_name_patterns((text,), "allow")
        accepted = True
    except errors.InvalidInput:
        accepted = False
    fits = re.search(json_types.REQUESTERS["pattern"].replace("$", r"\Z"), text) is not None
    assert fits == accepted or "\xad" in text, (
        "a soft hyphen is invisible, for which there is no character class"
    )


def problem_of(text):
    """Error of the parser of opening hours; empty if it accepts the text."""
    try:
        lending.parse_opening_hours(text)
    except errors.InvalidInput as problem:
        return problem.message
    return ""
