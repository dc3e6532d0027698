"""When an object that was refused may go: after a while, and only if nothing else knows it."""

import pytest

import broker_samples as samples
import make
from kubelend.controllers import labels
from kubelend.wire.objects import AgentRequest, BrokerResponse

RETENTION = make.HOUR
LATER = make.T0 + make.MINUTE
REFUSED = samples.with_status(samples.wish(), phase="Failed", finished_at=LATER)
PROBLEM = BrokerResponse("q", error="{}")
UNHEARD = samples.with_status(samples.wish(), response=PROBLEM, last_update_time=LATER)


def asked(found, question):
    return samples.with_spec(found, request=AgentRequest(question, "reserve"))


@pytest.mark.parametrize(
    "found, since",
    [
        pytest.param(REFUSED, LATER, id="refused"),
        pytest.param(samples.with_status(REFUSED, finished_at=None), make.T0, id="no time"),
        pytest.param(samples.wish(), None, id="new"),
        pytest.param(samples.leaving(REFUSED), None, id="being deleted"),
        pytest.param(samples.with_metadata(REFUSED, labels=samples.OWN), None, id="the broker's"),
        pytest.param(samples.with_status(REFUSED, phase="Released"), None, id="released"),
        pytest.param(samples.written(samples.record("Failed")), None, id="has a record"),
    ],
)
def test_refused_object_may_go_after_the_retention(found, since):
    assert labels.rejected_until(found, RETENTION) == (since and since + RETENTION)


@pytest.mark.parametrize(
    "found, since",
    [
        pytest.param(UNHEARD, LATER, id="by a person"),
        pytest.param(asked(UNHEARD, "q"), LATER, id="by an agent"),
        pytest.param(asked(UNHEARD, "other"), None, id="asked again"),
        pytest.param(samples.leaving(UNHEARD), None, id="being deleted"),
        pytest.param(samples.with_status(UNHEARD, response=None), None, id="not answered"),
        pytest.param(
            samples.with_status(UNHEARD, response=BrokerResponse("q", "{}", "{}")),
            None,
            id="stands for one",
        ),
    ],
)
def test_refused_question_may_go_after_the_retention(found, since):
    assert labels.rejected_in_cluster_namespace_until(found, RETENTION) == (
        since and since + RETENTION
    )


def test_refusal_stays_for_a_moment_without_any_retention():
    assert labels.rejected_until(REFUSED, 0 * make.SECOND) == LATER + labels.MIN_REJECTION_RETENTION
