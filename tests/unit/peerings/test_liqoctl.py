"""Which commands are run with which arguments, and what happens when they fail."""

import asyncio
import os
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest

import make
from clocks import Seconds
from fake_liqo import FakeLiqo
from kubelend.agent.ports import Peer
from kubelend.core.errors import InvalidInput, InvalidSettings, Unavailable, UnexpectedResponse
from kubelend.peerings import liqoctl
from kubelend.peerings.liqoctl import LiqoctlPeering
from kubelend.wire import bodies
from waiting import until

PEER = Peer("rsv-home-1", "one", make.resources("cpu=500m,memory=1Gi,gpu=2,storage=5Gi"))
OTHER = Peer("rsv-home-2", "one", make.resources("cpu=1,memory=1Gi"))
ELSEWHERE = Peer("rsv-home-3", "two", make.resources("cpu=1,memory=1Gi"))
SHORT = timedelta(seconds=1.5)


@pytest.fixture
def liqo(tmp_path):
    return FakeLiqo(tmp_path)


@pytest.fixture
def clock():
    return Seconds()


@pytest.fixture
def peering(liqo, clock):
    return made(liqo, now=clock)


def made(liqo, **changes):
    return LiqoctlPeering(liqo.kubeconfigs, "home", **{**liqo.programs, **changes})


async def connect(peering, peer):
    await peering.connect(peer)
    await peering.size(peer)


# -- commands


async def test_peer_creates_no_slice(liqo, peering):
    await peering.connect(PEER)
    own, remote = liqo.kubeconfigs / "home.kubeconfig", liqo.kubeconfigs / "one.kubeconfig"
    assert liqo.log[0] == [
        *("liqoctl", "peer", "--kubeconfig", str(own), "--remote-kubeconfig", str(remote)),
        *("--create-resource-slice=false", "--gw-server-service-type", "NodePort"),
        *("--timeout", "270s", "--skip-confirm"),
    ]


async def test_slice_has_the_size_and_name_of_the_reservation(liqo, peering):
    await connect(peering, PEER)
    own = str(liqo.kubeconfigs / "home.kubeconfig")
    assert liqo.log[2] == [
        *("liqoctl", "create", "resourceslice", "rsv-home-1", "--remote-cluster-id", "one"),
        *("--class", "kubelend"),
        *("--cpu", "500m", "--memory", "1Gi", "--resource", "nvidia.com/gpu=2"),
        *("--resource", "ephemeral-storage=5Gi", "--kubeconfig", own, "--skip-confirm"),
    ]


class Grants:
    """What the broker says about a handshake."""

    async def exchange_handshake(self, reservation, handshake):
        return bodies.HandshakeResult(None, grant=f"signed for {handshake.cluster_id}")


async def test_slice_carries_the_grant_that_the_provider_asks_for(liqo):
    await connect(made(liqo, exchange=Grants()), PEER)
    [created] = [call for call in liqo.log if call[1:3] == ["create", "resourceslice"]]
    place = created.index("--global-annotations")
    assert created[place + 1] == "kubelend.io/grant=signed for home"


async def test_peering_is_recognized_by_its_identity_and_not_by_its_foreign_cluster(liqo, peering):
    """Liqo leaves the ForeignCluster, and `unpeer` fails without a peering."""
    await connect(peering, PEER)
    for _ in range(2):
        await peering.disconnect(PEER)
    assert liqo.commands.count("liqoctl unpeer") == 1
    asked = [call[2] for call in liqo.log if call[:2] == ["kubectl", "get"]]
    assert asked[-1] == "identities.authentication.liqo.io/controlplane-one"
    assert not [kind for kind in asked if kind.startswith("foreignclusters")]


async def test_two_reservations_on_one_provider_share_the_peering_and_no_slice(liqo, peering):
    await connect(peering, PEER)
    await connect(peering, OTHER)
    assert liqo.commands == ["liqoctl peer", "liqoctl create", "liqoctl create"]
    assert liqo.slices == {PEER.reservation, OTHER.reservation}
    assert (await peering.ready(PEER)).reason == (
        "node rsv-home-1 offers 500m CPU / 1Gi Memory / 2 GPU / 5Gi Storage"
    )


async def test_without_an_own_kubeconfig_the_programs_use_their_default(liqo, peering):
    (liqo.kubeconfigs / "home.kubeconfig").unlink()
    await connect(peering, PEER)
    await peering.ready(PEER)
    assert all("--kubeconfig" not in call for call in liqo.log)


async def test_slice_that_is_being_deleted_is_not_ready_and_does_not_count(liqo, peering):
    await connect(peering, PEER)
    await connect(peering, OTHER)
    file = liqo.slice("one", OTHER.reservation)
    objects = msgspec.json.decode(file.read_bytes())
    objects[0]["metadata"]["deletionTimestamp"] = "2026-01-01T12:00:00Z"
    file.write_bytes(msgspec.json.encode(objects))
    found = await peering.ready(OTHER)
    assert found[:2] == (False, "ResourceSlice rsv-home-2 is being deleted")
    await made(liqo).disconnect(PEER)
    assert liqo.peered == set()


async def test_reservation_without_a_slice_yet_keeps_the_peering(liqo, peering):
    await connect(peering, PEER)
    await peering.connect(OTHER)
    await peering.disconnect(PEER)
    assert liqo.peered == {"one"}


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_peering_is_removed_with_the_last_slice(liqo, peering, is_restarted):
    await connect(peering, PEER)
    await connect(peering, OTHER)
    afterwards = made(liqo) if is_restarted else peering
    await afterwards.disconnect(PEER)
    assert (liqo.slices, liqo.peered) == ({OTHER.reservation}, {"one"})
    await afterwards.disconnect(OTHER)
    assert (liqo.slices, liqo.peered) == (set(), set())


async def test_peering_that_another_client_removed_is_created_again(liqo, peering):
    await connect(peering, PEER)
    liqo.slice("one", PEER.reservation).unlink()
    (liqo.root / "peered" / "one").unlink()
    assert (await peering.ready(PEER)).reason == "ResourceSlice rsv-home-1 not found yet"
    await connect(peering, PEER)
    assert (await peering.ready(PEER)).is_ready


async def test_failed_slice_makes_the_peering_be_checked_again(liqo, peering):
    await peering.connect(PEER)
    (liqo.root / "peered" / "one").unlink()
    with pytest.raises(Unavailable, match="tenant namespace not found for cluster one"):
        await peering.size(PEER)
    await connect(peering, PEER)
    assert (await peering.ready(PEER)).is_ready


async def test_environment_of_the_agent_is_not_passed_on(liqo, peering, tmp_path):
    shown = tmp_path / "shown"
    liqo.environment["KUBELEND_SECRET"] = "hush"
    program = tmp_path / "printing"
    program.write_text(f"#!/bin/sh\nenv > {shown}\n")
    program.chmod(0o755)
    await made(liqo, liqoctl=str(program)).connect(PEER)
    assert "KUBELEND_SECRET" not in shown.read_text()
    assert "FAKE_LIQO" in shown.read_text()


# -- one at a time


async def test_commands_for_one_provider_follow_each_other(liqo, peering):
    await asyncio.gather(*(connect(peering, peer) for peer in (PEER, OTHER)))
    assert [call == "end" for call in liqo.log] == [False, True] * 3


async def test_provider_that_hangs_blocks_no_other(liqo, peering):
    liqo.behave("liqoctl peer", "hang")
    hanging = asyncio.create_task(peering.connect(PEER))
    await until((liqo.root / "pids").exists)
    liqo.behave("liqoctl peer")
    await connect(peering, ELSEWHERE)
    assert (await peering.ready(ELSEWHERE)).is_ready
    assert not hanging.done()
    hanging.cancel()
    with suppress(asyncio.CancelledError):
        await hanging
    await until(lambda: not alive(liqo))


@pytest.mark.timeout(30)
async def test_provider_that_hangs_is_tried_once_for_all_waiters(liqo):
    liqo.behave("liqoctl peer", "hang")
    peering = made(liqo, timeout=SHORT)
    peers = [PEER._replace(reservation=f"rsv-home-{number}") for number in range(20)]
    found = await asyncio.gather(*map(peering.connect, peers), return_exceptions=True)
    assert liqo.commands == ["liqoctl peer"]
    assert {str(problem) for problem in found} == {
        "liqoctl peer timed out after 1.5s;"
        " check that the provider's API server is reachable from this cluster"
    }
    assert all(isinstance(problem, Unavailable) for problem in found)


@pytest.mark.parametrize(
    "took, believed",
    [(300, liqoctl.MAX_FAILURE_CACHE_TIME.total_seconds()), (4, 4)],
    ids=["long", "short"],
)
async def test_failure_is_cached_for_as_long_as_it_took_within_bounds(
    liqo, peering, clock, took, believed
):
    liqo.behave("liqoctl peer", "wait")
    waiting = asyncio.create_task(peering.connect(PEER))
    await until((liqo.root / "waiting").exists)
    clock.now += took
    (liqo.root / "waiting").unlink()
    with pytest.raises(Unavailable, match="liqoctl peer failed: exit status 3"):
        await waiting
    liqo.behave("liqoctl peer")
    clock.now += believed - 0.001
    with pytest.raises(Unavailable, match="liqoctl peer failed: exit status 3"):
        await peering.connect(OTHER)
    assert liqo.commands == ["liqoctl peer"]
    await connect(peering, ELSEWHERE)
    clock.now += 0.001
    await connect(peering, OTHER)
    assert liqo.peered == {"one", "two"}


async def test_disconnect_goes_before_waiting_connects(liqo, peering):
    await connect(peering, PEER)
    await peering.connect(OTHER)
    liqo.behave("liqoctl create resourceslice", "wait")
    waiting = [asyncio.create_task(peering.size(OTHER))]
    await until((liqo.root / "waiting").exists)
    liqo.behave("liqoctl create resourceslice")
    for number in range(3, 6):
        another = OTHER._replace(reservation=f"rsv-home-{number}")
        waiting.append(asyncio.create_task(peering.size(another)))
    await asyncio.sleep(0)
    parting = asyncio.create_task(peering.disconnect(PEER))
    await asyncio.sleep(0)
    (liqo.root / "waiting").unlink()
    await parting
    assert liqo.commands[2:5] == ["liqoctl create", "kubectl get", "kubectl delete"]
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_all_commands_of_a_call_share_its_time(liqo, clock):
    class SlowGrants(Grants):
        async def exchange_handshake(self, reservation, handshake):
            clock.now += liqoctl.COMMAND_TIMEOUT.total_seconds()
            return await super().exchange_handshake(reservation, handshake)

    peering = made(liqo, exchange=SlowGrants(), now=clock)
    await peering.connect(PEER)
    with pytest.raises(Unavailable, match="peering commands for one exceeded 5m"):
        await peering.size(PEER)
    assert liqo.commands == ["liqoctl peer"]


# -- what goes wrong


@pytest.mark.parametrize(
    "call, command, how, error",
    [
        ("connect", "liqoctl peer", "fail", r"^liqoctl peer failed: ERRO no route$"),
        ("ready", "kubectl get", "fail", "kubectl get failed: ERRO no route"),
        ("ready", "kubectl get", "say", "cannot decode the output of kubectl"),
        ("disconnect", "kubectl delete", "fail", "kubectl delete failed: ERRO no route"),
    ],
)
async def test_failure_has_the_last_line_of_the_output_and_is_retried(
    liqo, peering, call, command, how, error
):
    if call == "disconnect":
        await connect(peering, PEER)
    liqo.behave(command, how, "ERRO  no route")
    with pytest.raises(Unavailable if how == "fail" else UnexpectedResponse, match=error) as failed:
        await getattr(peering, call)(PEER)
    assert failed.value.retryable == (how == "fail")
    liqo.behave(command)
    await getattr(peering, call)(PEER)
    assert liqo.peered == ({"one"} if call == "connect" else set())


@pytest.mark.parametrize("program", ["liqoctl", "kubectl"])
@pytest.mark.parametrize("problem", ["missing", "no program"])
async def test_program_that_cannot_be_run_is_named(liqo, tmp_path, program, problem):
    path = tmp_path / "absent"
    if problem == "no program":
        path.write_text("")
    peering = made(liqo, **{program: str(path)})
    call = peering.connect if program == "liqoctl" else peering.ready
    with pytest.raises(InvalidSettings, match=f"{path} cannot be run: ") as refused:
        await call(PEER)
    assert not refused.value.retryable


async def test_missing_kubeconfig_is_named(liqo, peering):
    stranger = PEER._replace(cluster="stranger")
    path = liqo.kubeconfigs / "stranger.kubeconfig"
    with pytest.raises(InvalidSettings, match=f"kubeconfig of cluster stranger not found: {path}"):
        await peering.connect(stranger)
    path.write_text("{}")
    await peering.connect(stranger)
    assert liqo.peered == {"stranger"}


@pytest.mark.parametrize("name", ["../one", "--help", "", "a b", ".", "one\n"])
async def test_invalid_name_reaches_no_program(liqo, peering, name):
    for call in (peering.connect, peering.size, peering.ready, peering.disconnect):
        for peer in (PEER._replace(cluster=name), PEER._replace(reservation=name)):
            with pytest.raises(InvalidInput):
                await call(peer)
    assert liqo.log == []


def alive(liqo):
    """Those of the hanging program's processes that still run."""
    pids = map(int, (liqo.root / "pids").read_text().split())
    return [pid for pid in pids if _runs(pid)]


def _runs(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # Nobody waits for the orphan of an orphan in every container.
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]
