"""A cluster's conversation with its broker, as every transport has to carry it; see docs/transports.md."""

import asyncio
import contextlib
from contextlib import aclosing
from functools import partial

import pytest

import make
from failing_store import outage
from kubelend.communicators import factory
from kubelend.communicators.factory import CommunicatorOptions
from kubelend.core.errors import (
    BrokerUnreachable,
    Forbidden,
    InvalidDuration,
    InvalidInput,
    InvalidQuantity,
    KeyReused,
    NoCapacity,
    NotFound,
    NotReady,
    WrongPhase,
)
from kubelend.core.models import ClusterId, ReservationId
from kubelend.pki.grants import GrantKeys, GrantSigner, Jwk, verify_grant
from kubelend.wire import bodies, conversion
from waiting import PATIENCE, until

REQUEST = bodies.ReservationRequest(bodies.Quantities("2", "2Gi"), duration="1h")
LIMITS = conversion.RequestLimits(make.HOUR, 720 * make.HOUR, make.HOUR)
SMALL = bodies.ReservationRequest(bodies.Quantities("10m", "1Mi"))


async def over_http(broker, cluster, **more):
    certificates = broker.certificates.cluster(cluster)
    options = CommunicatorOptions(
        f"https://localhost:{broker.port}", certificates, instance="one", **more
    )
    return await factory.open_communicator("http", options)


KINDS = {kind.__name__: kind for kind in (over_http,)}


@pytest.fixture(params=[*KINDS, pytest.param("kubernetes", marks=pytest.mark.kube)])
async def kind(request):
    """A new transport adds itself here."""
    if request.param in KINDS:
        yield KINDS[request.param]
        return
    async with in_cluster_namespaces(request.getfixturevalue("kube")) as kind:
        yield kind


@contextlib.asynccontextmanager
async def in_cluster_namespaces(kube):
    from tenants import Tenants

    deployment, namespaces = Tenants(kube), {}
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(deployment.close)

        async def in_a_cluster_namespace(broker, cluster, **more):
            if deployment.controller is None:
                signer = GrantSigner(GrantKeys.create())
                stack.callback(signer.close)
                serving = deployment.served_by(
                    broker.service, granting=signer.grant, keys=signer.public
                )
                await stack.enter_async_context(serving)
            if cluster not in namespaces:
                namespaces[cluster] = deployment.create(cluster)
            return await deployment.open(namespaces[cluster], **more)

        yield in_a_cluster_namespace


@pytest.fixture
async def talk(broker, kind):
    """Opens the conversation of a cluster; all are closed at the end."""
    async with contextlib.AsyncExitStack() as stack:

        async def talk(cluster, **options):
            found = await kind(broker, cluster, **options)
            stack.push_async_callback(found.close)
            return found

        yield talk


@pytest.fixture
async def lender(talk):
    found = await talk("lender")
    await found.publish(offer("lender"))
    return found


@pytest.fixture
async def borrower(talk):
    return await talk("borrower")


def offer(cluster, cpu="4"):
    return bodies.Advertisement(cluster, bodies.Metrics(bodies.Quantities(cpu, "8Gi")))


@contextlib.asynccontextmanager
async def listening(communicator, resets=None):
    """Its stream, with patience for each instruction; `resets` takes a mark of each reset."""
    marks = [] if resets is None else resets
    async with aclosing(communicator.stream(lambda: marks.append("reset"))) as stream:

        async def following():
            async with asyncio.timeout(PATIENCE):
                found = await anext(stream)
            return found.role, found.action, found.reservation.id

        yield following


def is_longer_than(found, length):
    return len(found) > length


# -- a provider's advertisement


async def test_an_advertisement_is_answered_with_what_is_to_be_held(borrower, lender):
    assert (await lender.publish(offer("lender"))).provider_instructions == []
    found = await borrower.request(REQUEST, "k")
    answer = await lender.publish(offer("lender"))
    assert answer.provider_instructions == [found]
    assert answer.advertisement.resources.reserved == bodies.Amounts("2", "2Gi")
    assert answer.advertisement.resources.available == bodies.Amounts("2", "6Gi")


async def test_a_cluster_advertises_only_itself(lender):
    message = r"clusterID 'another' is not the (certificate's|namespace's cluster) 'lender'"
    with pytest.raises(Forbidden, match=message):
        await lender.publish(offer("another"))


# -- a requester's life


async def test_a_reservation_is_requested_acknowledged_used_renewed_and_released(
    broker, borrower, lender
):
    found = await borrower.request(REQUEST, "k")
    assert (found.target_cluster_id, found.status.phase) == ("lender", "Reserved")
    assert await borrower.find(found.id) == found
    acknowledged = await lender.acknowledge(found.id)
    assert acknowledged.status.acknowledged_at is not None
    assert await borrower.find(found.id) == acknowledged
    assert (await borrower.activate(found.id)).status.phase == "Active"
    broker.clock.pass_time(30 * make.MINUTE)
    renewed = await borrower.renew(found.id, "3h")
    assert renewed.status.expires_at == broker.clock() + 3 * make.HOUR
    assert (await borrower.renew(found.id)).status.expires_at == renewed.status.expires_at
    released = await borrower.release(found.id)
    assert (released.status.phase, released.status.reason) == ("Released", "ReleasedByRequester")
    assert released.revision > renewed.revision > found.revision


async def test_the_same_key_takes_once_also_at_once(borrower, lender):
    found = await asyncio.gather(*(borrower.request(REQUEST, "k") for _ in range(10)))
    assert await borrower.request(REQUEST, "k") == found[0]
    assert len({one.id for one in found}) == 1
    answer = await lender.publish(offer("lender"))
    assert answer.advertisement.resources.reserved == bodies.Amounts("2", "2Gi")
    assert (await borrower.request(REQUEST, "other")).id != found[0].id


async def test_repeated_call_changes_nothing(borrower, lender):
    found = await borrower.request(REQUEST, "k")
    for call in (lender.acknowledge, borrower.activate, borrower.release):
        assert await call(found.id) == await call(found.id)


async def test_what_would_wait_is_pending_until_it_is_placed(borrower, lender):
    waiting = await borrower.request(
        bodies.ReservationRequest(bodies.Quantities("8", "1Gi"), wait="1h"), "k"
    )
    assert waiting.status.phase == "Pending"
    await lender.publish(offer("lender", cpu="8"))
    assert (await borrower.find(waiting.id)).status.phase == "Reserved"


FULL_OFFER = bodies.Advertisement(
    "lender",
    bodies.Metrics(
        bodies.Quantities("16", "64Gi", "4", "100Gi", {"example.com/fpga": "2"}),
        allocatable=bodies.Quantities("15", "60Gi", "4", "90Gi", {"example.com/fpga": "2"}),
        allocated=bodies.Quantities("1", "2Gi", "1", "5Gi", {"example.com/fpga": "1"}),
    ),
    cluster_name="Lender",
    cost=bodies.Cost("0.05", "0.01", "1.5", "0.001", "EUR"),
    endpoint_url="https://lender.example.org:6443",
    labels={"tier": "gold"},
    region="eu",
    valid_for="5m",
    policy=bodies.LendingPolicy(deny=["mallory"], keep_back={"cpu": "1"}, max_lent={"gpu": "2"}),
)
FULL_REQUEST = bodies.ReservationRequest(
    bodies.Quantities("2", "2Gi", "1", "10Gi", {"example.com/fpga": "1"}),
    priority=7,
    duration="2h",
    wait="10m",
    policy="cost",
    weights={"price": 2.0, "headroom": 1.0},
    target_cluster_id="lender",
    constraints=bodies.Constraints(
        labels={"tier": "gold"},
        region="eu",
        exclude=["other"],
        max_price_per_hour="10",
        currency="EUR",
    ),
)


async def test_every_field_of_an_advertisement_and_of_a_request_arrives(broker, talk):
    lender, borrower = await talk("lender"), await talk("borrower")
    await lender.publish(FULL_OFFER)
    made = await borrower.request(FULL_REQUEST, "k")
    ledger, now = broker.service.current()
    assert ledger.clusters[ClusterId("lender")].advertisement == conversion.to_advertisement(
        FULL_OFFER, ClusterId("lender"), now
    )
    assert ledger.reservations[ReservationId(made.id)].request == conversion.to_request(
        FULL_REQUEST, ClusterId("borrower"), "k", LIMITS
    )
    assert made.status.phase == "Reserved"


# -- errors, by their class and in the broker's words


async def test_no_capacity_comes_with_its_explanation(borrower, lender):
    too_much = bodies.ReservationRequest(bodies.Quantities("5", "1Gi"))
    with pytest.raises(NoCapacity, match="0/1 cluster fits: 1 InsufficientCPU") as refused:
        await borrower.request(too_much, "k")
    assert refused.value.hint == "a cluster fits if you request 1 cpu less"
    assert not refused.value.retryable
    again = await borrower.request(SMALL, "k")
    assert again.status.phase == "Reserved", "its key is free"


AMOUNTS = REQUEST.requested_resources


async def test_invalid_request_or_key_is_refused(borrower, lender):
    for error, fields in (
        (InvalidQuantity, {"requested_resources": bodies.Quantities("0", "1Gi")}),
        (InvalidQuantity, {"requested_resources": bodies.Quantities("four", "1Gi")}),
        (InvalidDuration, {"requested_resources": AMOUNTS, "duration": "-1h"}),
        (InvalidInput, {"requested_resources": AMOUNTS, "policy": "no-such"}),
        (InvalidInput, {"requested_resources": AMOUNTS, "priority": 2**40}),
    ):
        with pytest.raises(error):
            await borrower.request(bodies.ReservationRequest(**fields), "k")
    for key in ("é", "a\nb", "k" * 256):
        with pytest.raises(InvalidInput):
            await borrower.request(REQUEST, key)
    assert await lender.instructions() == []


async def test_a_key_is_not_for_two_requests(borrower, lender):
    await borrower.request(REQUEST, "k")
    with pytest.raises(KeyReused):
        await borrower.request(SMALL, "k")


async def test_what_is_over_cannot_be_used_any_more(borrower, lender):
    found = await borrower.request(REQUEST, "k")
    await borrower.release(found.id)
    for call in (borrower.activate, borrower.renew, lender.acknowledge):
        with pytest.raises(WrongPhase):
            await call(found.id)


async def test_strangers_cannot_tell_that_a_reservation_exists(talk, borrower, lender):
    stranger = await talk("stranger")
    found = await borrower.request(REQUEST, "k")
    messages = set()
    for name in (found.id, "rsv-none-1"):
        with pytest.raises(NotFound) as hidden:
            await stranger.find(name)
        assert type(hidden.value) is NotFound
        messages.add(str(hidden.value).replace(name, "it"))
    assert len(messages) == 1
    for call in (stranger.activate, stranger.release, stranger.acknowledge):
        with pytest.raises(NotFound):
            await call(found.id)
    assert await stranger.instructions() == []


async def test_a_provider_sees_what_it_lends_and_may_not_use_it(borrower, lender):
    found = await borrower.request(REQUEST, "k")
    assert await lender.find(found.id) == found
    for call in (lender.activate, lender.renew, lender.release):
        with pytest.raises(Forbidden):
            await call(found.id)


@pytest.mark.broker(retention=make.MINUTE)
async def test_archived_reservation_is_found_and_final(broker, talk, borrower, lender):
    found = await borrower.request(REQUEST, "k")
    over = await borrower.release(found.id)
    broker.clock.pass_time(2 * make.MINUTE)
    await broker.expire()
    assert found.id not in broker.service.current()[0].reservations
    for cluster in (borrower, lender):
        assert await cluster.instructions() == [], "removed here, before any call is answered"
    assert await borrower.find(found.id) == await lender.find(found.id) == over
    assert await borrower.release(found.id) == over
    final = f"{found.id} is Released; the reservation is finished"
    for call in (borrower.activate, borrower.renew, lender.acknowledge):
        with pytest.raises(WrongPhase, match=final):
            await call(found.id)
    with pytest.raises(Forbidden, match=f"{found.id} belongs to borrower"):
        await lender.release(found.id)
    with pytest.raises(NotFound):
        await (await talk("stranger")).find(found.id)


# -- instructions


async def test_instructions_are_what_is_unfinished_for_both_sides(borrower, lender):
    kept, used, over = [await borrower.request(SMALL, key) for key in "abc"]
    used = await borrower.activate(used.id)
    await borrower.release(over.id)
    waiting = await borrower.request(
        bodies.ReservationRequest(bodies.Quantities("99", "1Gi"), wait="1h"), "d"
    )
    assert await borrower.instructions() == [kept, used, waiting]
    assert await lender.instructions() == [kept, used]


async def test_all_instructions_come_however_many(borrower, lender):
    made = [(await borrower.request(SMALL, f"k{number}")).id for number in range(120)]
    assert [found.id for found in await lender.instructions()] == made


async def test_the_stream_tells_both_sides(borrower, lender):
    async with listening(borrower) as requester, listening(lender) as provider:
        first = asyncio.gather(requester(), provider())
        found = await borrower.request(REQUEST, "k")
        assert list(await first) == [
            ("requester", "Use", found.id),
            ("provider", "Hold", found.id),
        ]
        await borrower.release(found.id)
        assert await requester() == ("requester", "Stop", found.id)
        assert await provider() == ("provider", "Withdraw", found.id)


async def test_a_stream_begins_with_all_that_is_open_and_the_next_continues_after_it(
    borrower, lender
):
    await borrower.release((await borrower.request(SMALL, "over")).id)
    first, second = await borrower.request(SMALL, "1"), await borrower.request(SMALL, "2")
    resets: list[str] = []
    async with listening(lender, resets) as provider:
        assert await provider() == ("provider", "Hold", first.id)
    async with listening(lender, resets) as provider:
        assert (await provider())[2] == second.id
    await borrower.release(first.id)
    async with listening(lender, resets) as provider:
        assert await provider() == ("provider", "Withdraw", first.id)
    assert resets == ["reset"]


@pytest.mark.broker(retention=make.MINUTE)
async def test_a_stream_that_may_have_missed_something_is_reset(broker, borrower, lender):
    over = await borrower.request(SMALL, "1")
    resets: list[str] = []
    async with listening(lender, resets) as provider:
        await provider()
    await borrower.release(over.id)
    broker.clock.pass_time(2 * make.MINUTE)
    await broker.expire()
    kept = await borrower.request(SMALL, "2")
    async with listening(lender, resets) as provider:
        assert (await provider())[2] == kept.id
    assert resets == ["reset", "reset"]


async def test_a_stream_that_the_broker_ends_fails_and_can_be_asked_for_again(
    broker, borrower, lender
):
    found = await borrower.request(REQUEST, "k")
    async with listening(lender) as provider:
        await provider()
        broker.service.streams.close_all()
        with pytest.raises(BrokerUnreachable):
            await provider()
    await borrower.release(found.id)
    async with listening(lender) as provider:
        assert await provider() == ("provider", "Withdraw", found.id)


# -- the provider's hold


async def test_report_of_the_provider_reaches_the_requester(borrower, lender):
    found = await borrower.request(REQUEST, "k")
    partly = bodies.HoldReport(held=False, reason="PartiallyHeld", message="1 CPU of 2 CPU held")
    fully = bodies.HoldReport(held=True, reason="Held", message='2 CPU held; "all"')
    acknowledged = await lender.acknowledge(found.id)
    assert acknowledged.status.held is None
    for report in (partly, fully):
        told = await lender.acknowledge(found.id, report)
        assert told.status.held == report
        assert told.status.acknowledged_at == acknowledged.status.acknowledged_at
        assert await borrower.find(found.id) == told
        assert (await lender.acknowledge(found.id, report)) == told
    assert (await lender.acknowledge(found.id)).status.held == fully


async def test_report_is_an_instruction_for_the_requester(borrower, lender):
    async with listening(borrower) as requester:
        first = asyncio.ensure_future(requester())
        found = await borrower.request(REQUEST, "k")
        await first
        await lender.acknowledge(found.id, bodies.HoldReport(held=True, reason="Held"))
        assert await requester() == ("requester", "Use", found.id)
        assert (await borrower.find(found.id)).status.held.held


# -- the peering


async def test_handshake_reaches_the_other_side_which_is_notified_of_it(talk, borrower):
    notified: list[str] = []
    lender = await talk("lender", on_handshake=notified.append)
    await lender.publish(offer("lender"))
    found = await borrower.request(REQUEST, "k")
    start, nonce = bodies.Handshake("liqo-b"), bodies.Handshake("liqo-l", nonce="bm9uY2U=")
    async with listening(lender) as provider:
        await provider()
        waiting = asyncio.ensure_future(provider())
        for _ in range(2):  # until the other side has got it
            known = len(notified)
            assert (await borrower.exchange_handshake(found.id, start)).peer is None
            await until(partial(is_longer_than, notified, known))
        assert (await lender.exchange_handshake(found.id, nonce)).peer == start
        assert (await borrower.exchange_handshake(found.id, start)).peer == nonce
        assert set(notified) == {found.id}
        assert len(notified) == 2
        with pytest.raises(NotFound):
            await (await talk("stranger")).exchange_handshake(found.id, start)
        await borrower.release(found.id)
        assert await waiting == ("provider", "Withdraw", found.id)
    with pytest.raises(WrongPhase):
        await borrower.exchange_handshake(found.id, start)


async def test_grant_of_each_side_is_verified_by_the_keys_of_the_broker(borrower, lender):
    found = await borrower.request(REQUEST, "k")
    start = bodies.Handshake("liqo")
    for side in (borrower, lender):
        grant = (await side.exchange_handshake(found.id, start)).grant
        keys = [Jwk(one.kid, one.x) for one in (await side.grant_keys()).keys]
        claims = verify_grant(grant, keys)
        assert (claims.jti, claims.sub, claims.aud) == (found.id, "borrower", "lender")


# -- the provider's refusal


async def test_refused_reservation_moves_to_the_next_and_the_requester_is_notified(talk, borrower):
    providers = {}
    for name in ("one", "two"):
        providers[name] = await talk(name)
        await providers[name].publish(offer(name))
    async with listening(borrower) as requester:
        first = asyncio.ensure_future(requester())
        found = await borrower.request(REQUEST, "k")
        await first
        refused, other = found.target_cluster_id, {"one": "two", "two": "one"}
        moved = await providers[refused].refuse(found.id, "busy")
        assert moved.target_cluster_id == other[refused]
        assert await requester() == ("requester", "Use", found.id)
    assert await providers[refused].refuse(found.id, "busy") == moved
    assert [one.id for one in await providers[other[refused]].instructions()] == [found.id]
    assert await providers[refused].instructions() == []
    failed = await providers[other[refused]].refuse(found.id, "busy too")
    assert failed.status.phase == "Failed"
    assert await providers[other[refused]].refuse(found.id, "again") == failed
    assert "busy too" in failed.status.message


# -- the conversation itself


@pytest.mark.broker(fails=True)
async def test_a_broker_that_is_not_ready_says_so_to_every_call(broker, store, borrower, lender):
    await borrower.ping()
    async with outage(broker, store, "on fire"):
        with pytest.raises(NotReady, match=r"the broker is not ready: .*on fire"):
            await borrower.ping()
        with pytest.raises(NotReady):
            await lender.publish(offer("lender"))
        with pytest.raises(NotReady):
            await anext(borrower.stream(lambda: None))
    await borrower.ping()


async def test_close_ends_streams(broker, lender):
    async def listen():
        async with listening(lender) as provider:
            await provider()

    task = asyncio.create_task(listen())
    await until(lambda: broker.service.streams.count("lender") == 1)
    await lender.close()
    with pytest.raises(BrokerUnreachable):
        await task
    await until(lambda: broker.service.streams.count("lender") == 0)


async def test_calls_after_close_fail_clearly(talk, lender):
    for closed in (lender, await talk("unused")):
        await closed.close()
        await closed.close()
        for name, *arguments in (
            ("publish", offer("lender")),
            ("request", REQUEST, "k"),
            ("instructions",),
            ("ping",),
        ):
            with pytest.raises(BrokerUnreachable, match="was closed on this side"):
                await getattr(closed, name)(*arguments)
        with pytest.raises(BrokerUnreachable, match="was closed on this side"):
            await anext(closed.stream(lambda: None))
