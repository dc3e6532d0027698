"""Which errors may pass, and which are a verdict: of all that there are."""

from datetime import timedelta

import pytest

from kubelend.agent import resource_requests
from kubelend.core import errors


def tree(kind):
    return {kind}.union(*(tree(child) for child in kind.__subclasses__()))


PASSING = {
    errors.KubelendError,
    errors.Conflict,
    errors.TooSlow,
    errors.IdentityInUse,
    errors.LimitExceeded,
    errors.RateLimited,
    errors.QueueFull,
    errors.Unavailable,
    errors.StoreFailed,
    errors.NotReady,
    errors.NotLeader,
    errors.BrokerUnreachable,
    errors.CertificateRefused,
    errors.UnexpectedAnswer,
}


def test_what_is_none_of_the_brokers_decisions_may_pass_and_nothing_else():
    ours = {kind for kind in tree(errors.KubelendError) if kind.__module__ == errors.__name__}
    assert {kind for kind in ours if resource_requests.is_transient(kind("why"))} == PASSING


@pytest.mark.parametrize(
    "error, seconds",
    [
        (errors.RateLimited("why", retry_after=7), 7),
        (errors.QueueFull("why"), 1),
        (errors.BrokerUnreachable("why"), 0),
    ],
)
def test_who_says_for_how_long_is_left_in_peace_for_so_long(error, seconds):
    assert resource_requests.retry_after(error) == timedelta(seconds=seconds)
