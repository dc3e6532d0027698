"""What the contract cannot see: who is named in the audit log, grants, limits, and a broker that hangs."""

import asyncio
from contextlib import aclosing
from datetime import timedelta

import pytest

from in_process import InProcessCommunicator
from kubelend.broker.writer import CURRENT_ACTOR
from kubelend.core.audit_log import BROKER_ACTOR
from kubelend.core.errors import BrokerUnreachable, InvalidInput, QueueFull
from kubelend.wire import bodies
from kubelend.wire.conversion import RequestLimits

REQUEST = bodies.ReservationRequest(bodies.Quantities("1", "1Gi"))

pytestmark = pytest.mark.broker(max_waiting=0)


@pytest.fixture
async def lender(broker):
    found = InProcessCommunicator(broker.service, "lender")
    await found.publish(offer())
    return found


def offer():
    return bodies.Advertisement("lender", bodies.Metrics(bodies.Quantities("4", "8Gi")))


async def test_the_audit_log_names_the_cluster_and_the_caller_is_itself_afterwards(broker, lender):
    borrower = InProcessCommunicator(broker.service, "borrower")
    await borrower.request(REQUEST, "k")
    assert CURRENT_ACTOR.get() == BROKER_ACTOR
    lines = (await broker.admin().read("audit"))["lines"]
    assert {"name": "borrower", "role": "cluster"} in [line["actor"] for line in lines]


async def test_an_instruction_carries_the_grant(broker, lender):
    async def granting(found, reader):
        return f"{found.id} for {reader}"

    borrower = InProcessCommunicator(broker.service, "borrower", granting=granting)
    found = await borrower.request(REQUEST, "k")
    async with aclosing(borrower.stream(lambda: None)) as stream:
        assert (await anext(stream)).grant == f"{found.id} for borrower"


async def test_its_terms_are_those_it_was_given(broker, lender):
    hour = timedelta(hours=1)
    strict = InProcessCommunicator(broker.service, "b", terms=RequestLimits(hour, 2 * hour, hour))
    with pytest.raises(InvalidInput, match="3h exceeds the broker's maximum"):
        await strict.request(
            bodies.ReservationRequest(REQUEST.requested_resources, duration="3h"), ""
        )
    found = await strict.request(REQUEST, "")
    assert found.duration == "1h0m0s"


async def test_a_limit_says_after_how_long_to_ask_again(broker, lender):
    with pytest.raises(QueueFull) as full:
        await lender.request(
            bodies.ReservationRequest(bodies.Quantities("9", "1Gi"), wait="1m"), "k"
        )
    assert full.value.retry_after >= 1


async def test_a_broker_that_hangs_is_given_up(broker, lender):
    async def never(*_):
        await asyncio.Event().wait()

    broker.service.advertise = never
    impatient = InProcessCommunicator(broker.service, "lender", timeout=timedelta(milliseconds=20))
    with pytest.raises(BrokerUnreachable, match="the broker did not answer within 20ms"):
        await impatient.publish(offer())


async def test_what_was_sent_is_not_shared(broker, lender):
    labels = {"tier": "gold"}
    body = bodies.Advertisement("lender", offer().resources, labels=labels)
    answer = await lender.publish(body)
    labels["tier"] = "lead"
    assert answer.advertisement.labels == {"tier": "gold"}
    assert (await broker.cluster("lender").read("advertisements", "lender"))["labels"] == {
        "tier": "gold"
    }


async def test_more_than_a_page_of_instructions_comes(broker, lender, monkeypatch):
    monkeypatch.setattr("in_process.PAGE", 2)
    borrower = InProcessCommunicator(broker.service, "borrower")
    small = bodies.ReservationRequest(bodies.Quantities("1m", "1Mi"))
    made = [await borrower.request(small, str(number)) for number in range(5)]
    assert await borrower.instructions() == made
