"""Policies and quotas as texts: there and back again, and refused with the name of the field."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import make
from kubelend.core import errors, lending
from kubelend.core.models import ClusterId
from kubelend.wire import admin_bodies, admin_conversion, bodies, json_types
from kubelend.wire.admin_bodies import QuotaRequest
from kubelend.wire.bodies import LendingPolicy

FULL = LendingPolicy(
    allow=["team-*", "x"],
    deny=["team-b"],
    keep_back={"cpu": "4", "memory": "8Gi"},
    max_lent={"gpu": "0", "cpu": "32"},
    max_per_requester={"cpu": "8", "example.com/fpga": "1"},
    hours=["Mon-Fri 18:00-08:00 Europe/Rome", "Sat,Sun 00:00-24:00"],
)


def test_policy_there_and_back_is_the_same():
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
    """What is kept back is rounded up, and the most that is lent down."""
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
def test_what_cannot_hold_is_refused_with_its_field(body, problem):
    with pytest.raises(errors.InvalidInput) as raised:
        admin_conversion.to_policy(body, "policy")
    assert problem in str(raised.value)


def test_what_holds_of_both_is_shown_with_every_list():
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


def test_withheld_is_what_is_there_and_not_lent():
    holds = lending.effective_policy(make.policy(keep_back="cpu=2", max_lent="gpu=1"), None)
    available, reserved = make.resources("cpu=8,memory=8Gi,gpu=4"), make.resources("gpu=1")
    assert admin_conversion.withheld_amounts(holds, available, reserved) == {"cpu": "2", "gpu": "4"}
    assert admin_conversion.withheld_amounts(None, available, reserved) == {}
    assert admin_conversion.withheld_amounts(holds, make.resources("cpu=1"), reserved) == {
        "cpu": "1"
    }


def test_quota_is_shown_with_what_is_used():
    desk = make.Desk()
    desk.advertise("a", "cpu=8,memory=8Gi", prices=make.price_list("EUR", cpu="0.25"))
    body = QuotaRequest({"cpu": "32", "gpu": 0}, reservations=5, budget="50", currency="eur")
    desk.allot("r", admin_conversion.to_quota(body))
    desk.reserve("cpu=6,memory=1Gi")
    desk.reserve("cpu=4,memory=1Gi", wait=make.HOUR)
    account = desk.ledger.quota_usages.get(make.R)
    assert account is not None
    shown = admin_conversion.from_quota(make.R, account, desk.now)
    assert shown == admin_bodies.QuotaStatus(
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


def test_quota_without_a_budget_shows_no_money():
    desk = make.Desk()
    desk.allot("r", admin_conversion.to_quota(QuotaRequest()))
    account = desk.ledger.quota_usages.get(ClusterId("r"))
    assert account is not None
    shown = admin_conversion.from_quota(make.R, account, desk.now)
    assert (shown.quota, shown.used) == (admin_bodies.Quota(), admin_bodies.QuotaUse())


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
def test_hours_that_fit_the_document_are_read_or_refused_for_what_it_cannot_say(text):
    assert re.search(
        "^$|is not a known time zone|begins and ends at the same time", problem_of(text)
    )


@given(st.text("0123456789:- ,MonTueUTC/Z", max_size=24))
def test_hours_that_are_read_fit_the_document(text):
    assert problem_of(text) or re.fullmatch(json_types.HOURS["pattern"], text)


@given(st.text(st.characters(max_codepoint=0x200), max_size=6))
def test_names_that_are_taken_are_those_that_fit_the_document(text):
    try:
        lending.check_name_patterns((text,), "allow")
        taken = True
    except errors.InvalidInput:
        taken = False
    fits = re.search(json_types.REQUESTERS["pattern"].replace("$", r"\Z"), text) is not None
    assert fits == taken or "\xad" in text, "a soft hyphen is invisible, for which there is no word"


def problem_of(text):
    """Why the parser refuses a text of opening hours; empty if it does not."""
    try:
        lending.parse_opening_hours(text)
    except errors.InvalidInput as problem:
        return problem.message
    return ""
