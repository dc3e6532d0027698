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


async def test_connected_and_sized_peer_is_ready_and_every_call_may_be_repeated(peering):
    assert (await peering.ready(FIRST)).reason
    await peering.disconnect(FIRST)
    for call in (peering.connect, peering.size):
        await call(FIRST)
        await call(FIRST)
    found = await peering.ready(FIRST)
    assert found == await peering.ready(FIRST)
    assert found.is_ready
    assert found.reason
    larger = FIRST._replace(resources=make.resources("cpu=8,memory=16Gi"))
    assert (await join(peering, larger)).is_ready
    for _ in range(2):
        await peering.disconnect(larger)
    assert (await join(peering, FIRST)).is_ready


async def test_several_are_joined_at_once_and_the_others_on_a_provider_stay(peering):
    found = await asyncio.gather(*(join(peering, peer) for peer in (FIRST, SECOND, ELSEWHERE)))
    assert all(one.is_ready for one in found)
    await peering.disconnect(FIRST)
    assert (await peering.ready(SECOND)).is_ready
    await asyncio.gather(*(peering.disconnect(peer) for peer in (SECOND, ELSEWHERE)))
    assert (await join(peering, FIRST)).is_ready
