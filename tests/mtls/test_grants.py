"""Grants over the wire: both parties get one, nobody else does, and it can be checked offline."""

import msgspec
import pytest

import brokers
import make
from callers import offer
from kubelend.pki.grants import JwkSet, verify_grant


@pytest.fixture
async def broker(broker):
    await broker.cluster("a").post("advertisements", offer("a"))
    return broker


@pytest.fixture
def r(broker):
    return broker.cluster("r")


async def keys(caller):
    answer = await caller.get("keys")
    assert answer.status == 200
    return msgspec.json.decode(answer.content, type=JwkSet).keys


async def test_both_parties_get_the_same_grant_and_it_says_what_was_promised(broker, r):
    made = await r.reserve("1500m", "2Gi")
    mine = await r.read("reservations", made["id"], "grant")
    theirs = await broker.cluster("a").read("reservations", made["id"], "grant")
    assert mine == theirs
    grant = verify_grant(mine["grant"], await keys(broker.viewer()))
    assert (grant.jti, grant.sub, grant.aud) == (made["id"], "r", "a")
    assert grant.resources == {"cpu": "1500m", "memory": "2Gi"}
    assert grant.exp == int((make.T0 + make.HOUR).timestamp())
    grant.check(provider="a", now=broker.clock())


async def test_grant_comes_with_the_instruction(broker, r):
    async with broker.cluster("a").stream() as provider, r.stream() as requester:
        await provider.event()
        await requester.event()
        made = await r.reserve()
        hold, use = await provider.event(), await requester.event()
        assert hold.data["grant"] == use.data["grant"]
        assert verify_grant(hold.data["grant"], await keys(r)).jti == made["id"]
        await r.delete("reservations", made["id"])
        assert "grant" not in (await provider.event()).data


async def test_renewal_gives_a_longer_grant(broker, r):
    made = await r.reserve()
    await r.post("reservations", made["id"], "renew", {"duration": "5h"})
    grant = (await r.read("reservations", made["id"], "grant"))["grant"]
    assert verify_grant(grant, await keys(r)).exp == int((make.T0 + 5 * make.HOUR).timestamp())


async def test_nobody_else_gets_one(broker, r):
    made = await r.reserve()
    path = ("reservations", made["id"], "grant")
    assert (await broker.cluster("c").get(*path)).refusal == (404, "NotFound")
    assert (await broker.admin().get(*path)).refusal == (403, "Forbidden")
    assert (await broker.viewer().get(*path)).refusal == (403, "Forbidden")


async def test_provider_that_it_was_moved_away_from_gets_none(broker, r):
    made = await r.reserve("1")
    await broker.cluster("b").post("advertisements", offer("b"))
    await broker.cluster("a").post("instructions", made["id"], "refuse")
    answer = await broker.cluster("a").get("reservations", made["id"], "grant")
    assert answer.refusal == (409, "WrongPhase")
    assert (
        verify_grant(
            (await r.read("reservations", made["id"], "grant"))["grant"], await keys(r)
        ).aud
        == "b"
    )


async def test_reservation_that_is_over_has_no_grant(broker, r):
    made = await r.reserve()
    await r.delete("reservations", made["id"])
    answer = await r.get("reservations", made["id"], "grant")
    assert answer.refusal == (409, "WrongPhase")


async def test_key_outlives_the_broker(certificates, tmp_path):
    store = str(tmp_path / "kubelend.db")
    async with brokers.running(certificates, store=store) as broker:
        before = await keys(broker.viewer())
    async with brokers.running(certificates, store=store) as broker:
        assert await keys(broker.viewer()) == before
    (found,) = tmp_path.glob("*.key")
    assert found.stat().st_mode & 0o777 == 0o600
