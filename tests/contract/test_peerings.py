"""The joining of two clusters, as every way of peering has to do it."""

import asyncio

import pytest

import make
from fake_liqo import FakeLiqo
from kubelend.agent.ports import Peer
from kubelend.peerings.liqoctl import LiqoctlPeering

AMOUNTS = make.resources("cpu=500m,memory=1Gi,gpu=2,example.com/fpga=1")
FIRST = Peer("rsv-home-1", "one", AMOUNTS)
SECOND = Peer("rsv-home-2", "one", make.resources("cpu=2,memory=4Gi"))
ELSEWHERE = Peer("rsv-home-3", "two", AMOUNTS)


@pytest.fixture(params=["liqoctl"])
def peering(tmp_path):
    liqo = FakeLiqo(tmp_path)
    return LiqoctlPeering(liqo.kubeconfigs, "home", **liqo.programs)


async def join(peering, peer):
    await peering.connect(peer)
    await peering.size(peer)
    return await peering.ready(peer)


async def test_a_peer_that_is_connected_and_sized_is_ready_with_a_reason(peering):
    found = await join(peering, FIRST)
    assert found.is_ready
    assert found.reason


async def test_readiness_can_be_asked_for_at_any_time_and_has_a_reason(peering):
    assert (await peering.ready(FIRST)).reason
    await peering.connect(FIRST)
    assert (await peering.ready(FIRST)).reason


async def test_every_call_may_be_repeated(peering):
    for _ in range(2):
        await peering.connect(FIRST)
    for _ in range(2):
        await peering.size(FIRST)
    assert (await peering.ready(FIRST)) == (await peering.ready(FIRST))
    for _ in range(2):
        await peering.disconnect(FIRST)
    assert (await join(peering, FIRST)).is_ready


async def test_what_was_never_connected_can_be_disconnected(peering):
    await peering.disconnect(FIRST)
    assert (await join(peering, FIRST)).is_ready


async def test_others_on_the_same_provider_stay(peering):
    await join(peering, FIRST)
    await join(peering, SECOND)
    await peering.disconnect(FIRST)
    assert (await peering.ready(SECOND)).is_ready
    await peering.disconnect(SECOND)
    assert (await join(peering, FIRST)).is_ready


async def test_several_are_joined_at_once(peering):
    found = await asyncio.gather(*(join(peering, peer) for peer in (FIRST, SECOND, ELSEWHERE)))
    assert all(one.is_ready for one in found)
    await asyncio.gather(*(peering.disconnect(peer) for peer in (FIRST, SECOND, ELSEWHERE)))


async def test_another_size_is_taken_up(peering):
    await join(peering, FIRST)
    larger = FIRST._replace(resources=make.resources("cpu=8,memory=16Gi"))
    assert (await join(peering, larger)).is_ready
