"""Agents that die between the broker's answer and the object, or elsewhere: the next life puts it right."""

import pytest

import agents
import fates
from waiting import until_resolved

ASKING = {
    "before the object is marked": ("before", "apply ResourceRequest"),
    "before the question is written down": ("before", "set_status ResourceRequest"),
    "before the question is asked": ("before", "request"),
    "before the answer is heard": ("after", "request"),
    "before the answer is written down": ("before", "set_status ResourceRequest", 2),
    "after the answer is written down": ("after", "set_status ResourceRequest", 2),
    "before the instruction is written": ("before", "apply ReservationInstruction"),
    "after the instruction is written": ("after", "apply ReservationInstruction"),
    "before the instruction is delivered": ("before", "set_status ReservationInstruction"),
    "before it is activated": ("before", "activate"),
    "after it is activated": ("after", "activate"),
}
PARTING = {
    "before it is given back": ("before", "release"),
    "after it is given back": ("after", "release"),
    "before the object may go": ("before", "apply ResourceRequest"),
    "after the object has gone": ("after", "apply ResourceRequest"),
    "before the instruction is finished": ("before", "set_status ReservationInstruction"),
}
HOLDING = {
    "before it is told": ("before", "instruction"),
    "before the object is written": ("before", "apply ProviderInstruction"),
    "after the object is written": ("after", "apply ProviderInstruction"),
    "before it is acknowledged": ("before", "acknowledge"),
    "after it is acknowledged": ("after", "acknowledge"),
    "before the object says so": ("before", "set_status ProviderInstruction"),
    "after the object says so": ("after", "set_status ProviderInstruction"),
}
WITHDRAWING = {
    "before it is told": ("before", "instruction"),
    "before the object says so": ("before", "set_status ProviderInstruction"),
    "after the object says so": ("after", "set_status ProviderInstruction"),
}


def table(places):
    return pytest.mark.parametrize("place", places.values(), ids=places.keys())


@pytest.fixture
async def scene(certificates, tmp_path):
    async with agents.scene(certificates, tmp_path) as scene:
        yield scene


@pytest.fixture
def fate_of():
    """By the name of the agent."""
    return {}


@pytest.fixture
async def lender(scene, fate_of):
    return await scene.start("lender", scene.broker.port, prepare=fated(fate_of))


@pytest.fixture
async def borrower(scene, fate_of):
    nothing = agents.NOTHING
    return await scene.start("borrower", scene.broker.port, cluster=nothing, prepare=fated(fate_of))


def fated(fate_of):
    def bind(agent):
        fate_of[agent.name] = fates.bind(agent)

    return bind


async def reborn(agent, fate):
    """It dies where it is to die; and another begins with what it has left."""
    await fate.has_come()
    await agent.kill()
    fates.bind(agent)
    await agent.start()


async def one_lock_is_taken(scene, *members):
    """And never was another."""
    (lock,) = await agents.until_agreed(scene.broker, *members)
    every = await scene.broker.viewer().read("reservations")
    assert [found["id"] for found in every["reservations"]] == [lock]


@table(ASKING)
async def test_requester_that_dies_while_it_asks_has_one_lock(
    scene, lender, borrower, fate_of, place
):
    fate = fate_of["borrower"]
    fate.comes(*place)
    await borrower.create_request("w")
    await reborn(borrower, fate)
    await borrower.becomes("w", "Active")
    await one_lock_is_taken(scene, lender, borrower)
    await agents.until_over(scene.broker, lender, borrower)


@table(ASKING)
async def test_request_that_is_deleted_while_nobody_lives_leaves_nothing(
    scene, lender, borrower, fate_of, place
):
    fate = fate_of["borrower"]
    fate.comes(*place)
    await borrower.create_request("w")
    await fate.has_come()
    await borrower.kill()
    await borrower.delete_request("w")
    fates.bind(borrower)
    await borrower.start()
    await agents.until_over(scene.broker, lender, borrower)


@table(PARTING)
async def test_requester_that_dies_while_it_gives_back_gives_back(
    scene, lender, borrower, fate_of, place
):
    fate = fate_of["borrower"]
    await borrower.create_request("w")
    await borrower.becomes("w", "Active")
    await one_lock_is_taken(scene, lender, borrower)
    fate.comes(*place)
    await borrower.delete_request("w")
    await reborn(borrower, fate)
    await agents.until_over(scene.broker, lender, borrower)


@table(HOLDING)
async def test_provider_that_dies_while_it_promises_holds_it_once(
    scene, lender, borrower, fate_of, place
):
    fate = fate_of["lender"]
    fate.comes(*place)
    await borrower.create_request("w")
    await reborn(lender, fate)
    await borrower.becomes("w", "Active")
    await one_lock_is_taken(scene, lender, borrower)
    await until_resolved(lambda: unacknowledged(scene.broker))
    await agents.until_over(scene.broker, lender, borrower)


async def unacknowledged(broker):
    found = await agents.open_reservations(broker)
    return ", ".join(name for name, one in found.items() if "acknowledgedAt" not in one["status"])


@table(WITHDRAWING)
async def test_provider_that_dies_while_it_lets_go_holds_nothing(
    scene, lender, borrower, fate_of, place
):
    fate = fate_of["lender"]
    await borrower.create_request("w")
    await borrower.becomes("w", "Active")
    await one_lock_is_taken(scene, lender, borrower)
    fate.comes(*place)
    await borrower.delete_request("w")
    await reborn(lender, fate)
    await agents.until_over(scene.broker, lender, borrower)
