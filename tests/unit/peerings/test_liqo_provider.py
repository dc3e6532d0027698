"""Which grants a provider believes, and what it does with slices whose reservation has ended."""

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
from msgspec.structs import replace

from kubelend.agent.reservation_cache import ReservationCache
from kubelend.apps import agent_peering
from kubelend.core import resources
from kubelend.core.grants import GRANT_ISSUER, Grant
from kubelend.core.inventory import Hold
from kubelend.peerings import liqo_provider, slice_decision
from kubelend.peerings.liqo_objects import LiqoResource, OwnedMetadata, is_pod_of_slice
from kubelend.peerings.liqo_provider import GrantVerifier
from kubelend.peerings.slice_decision import Denial, LentReservation
from kubelend.pki.grants import GrantKeys
from kubelend.wire import bodies
from virtual_time import in_virtual_time

NOW = datetime(2026, 1, 1, tzinfo=UTC)
AMOUNTS = {"cpu": "2", "memory": "4Gi"}
HOUR = timedelta(hours=1)
LENT = LentReservation("paris", resources.parse_requested(AMOUNTS), NOW + HOUR)
GRANT = Grant(
    GRANT_ISSUER,
    "rsv-1",
    "paris",
    "berlin",
    int(NOW.timestamp()),
    int((NOW + HOUR).timestamp()),
    AMOUNTS,
)


def denial(grant=GRANT, lent=LENT, now=NOW):
    found = slice_decision.grant_denial(grant, "rsv-1", lent, "berlin", now)
    return None if found is None else found.reason


@pytest.mark.parametrize(
    "change, reason",
    [
        ({}, None),
        ({"resources": AMOUNTS | {"cpu": "3"}}, None),
        ({"jti": "rsv-2"}, "OtherReservation"),
        ({"sub": "rome"}, "OtherRequester"),
        ({"aud": "madrid"}, "OtherProvider"),
        ({"iss": "another"}, "OtherProvider"),
        ({"resources": {"cpu": "1999m", "memory": "4Gi"}}, "MoreThanGranted"),
        ({"resources": {"cpu": "2"}}, "MoreThanGranted"),
        ({"resources": {"cpu": "much"}}, "InvalidGrant"),
        ({"nbf": GRANT.nbf + 61}, "NotYetValid"),
        ({"nbf": GRANT.nbf + 60}, None),
    ],
)
def test_grant_covers_this_reservation_requester_provider_and_amount(change, reason):
    assert denial(replace(GRANT, **change)) == reason


def test_time_is_that_of_the_broker_which_a_renewal_extends():
    renewed = LENT._replace(expires_at=NOW + 2 * HOUR)
    assert denial(now=NOW + HOUR - timedelta(seconds=1)) is None
    assert denial(now=NOW + HOUR) == "Expired"
    assert denial(lent=renewed, now=NOW + HOUR) is None
    assert denial(lent=renewed, now=NOW + 2 * HOUR) == "Expired"
    # Known only from its hold, after a restart without the broker.
    assert denial(lent=LENT._replace(expires_at=None), now=NOW + HOUR) == "Expired"


AUTHENTICATED = {"type": "Authentication", "status": "Accepted"}
GRANTED = {"cpu": "2", "memory": "4Gi", "ephemeral-storage": "0", "pods": "110"}


def resource_slice(amounts=GRANTED, **status):
    return LiqoResource(
        OwnedMetadata("rsv-1", "liqo-tenant-paris", resource_version="7"),
        {"class": "kubelend", "resources": amounts},
        {"conditions": [AUTHENTICATED], **status},
    )


def decided(found, unproven=None):
    decision = slice_decision.decide_slice(found, "paris", LENT, unproven)
    assert decision is not None
    return decision


REASONS = [
    *("NoGrant", "InvalidGrant", "UnknownKey", "OtherReservation", "OtherRequester"),
    *("OtherProvider", "MoreThanGranted", "NotYetValid", "Expired"),
]


@pytest.mark.parametrize("reason", REASONS)
def test_without_a_valid_grant_a_slice_is_denied_unless_it_was_accepted_and_cannot_be_verified(
    reason,
):
    """After a rotation of keys, or when the broker is unreachable at the end of the last known time."""
    unproven = Denial(reason, "because")
    denied = decided(resource_slice(), unproven)
    assert denied == ("Denied", reason, "because", {})
    accepted = decided(resource_slice(resources=GRANTED), unproven)
    if reason in ("UnknownKey", "Expired"):
        assert (accepted.status, accepted.amounts) == ("Accepted", GRANTED)
    else:
        assert accepted == denied


def test_accepted_slice_that_asks_for_more_keeps_the_reserved_amounts():
    """Denied, Liqo would neither reduce nor cordon its Quota any more."""
    found = resource_slice(GRANTED | {"cpu": "64"}, resources=GRANTED | {"cpu": "64"})
    decision = decided(found)
    assert (decision.status, decision.amounts) == ("Accepted", GRANTED)
    assert decision.message == "reservation rsv-1; only 2 CPU / 4Gi Memory is reserved"


def test_ended_slice_is_left_with_nothing_when_it_is_overdue():
    found = resource_slice(resources=GRANTED | {"nvidia.com/gpu": "1"})
    early = slice_decision.ended_decision(found, is_overdue=False)
    late = slice_decision.ended_decision(found, is_overdue=True)
    assert early.status == late.status == "Accepted"
    assert early.amounts == GRANTED | {"nvidia.com/gpu": "1"}
    assert set(late.amounts) == set(early.amounts)
    assert set(late.amounts.values()) == {"0"}


@pytest.mark.parametrize(
    "creator, is_own",
    [("rsv-1-0123456789ab", True), ("rsv-1-2-0123456789ab", False), ("rsv-1", False), ("", False)],
)
def test_pods_of_a_slice_are_those_of_its_identity(creator, is_own):
    shadow = LiqoResource(OwnedMetadata("p", labels={"liqo.io/creator-user": creator}))
    assert is_pod_of_slice(shadow, "rsv-1") is is_own


# -- signatures


class Keys:
    """The broker's keys, and how often they were fetched and a signature was verified."""

    def __init__(self, *keys):
        self.known = list(keys)
        self.fetched = 0
        self.verified = []

    async def fetch(self):
        self.fetched += 1
        found = [key for each in self.known for key in each.public.keys]
        return bodies.KeySet(
            [bodies.PublicKey(one.kid, one.x, one.kty, one.crv, one.alg, one.use) for one in found]
        )

    async def verify(self, text, keys):
        self.verified.append(text)
        return ""


def reason_of(found):
    return found.reason if isinstance(found, Denial) else found


def forged(text):
    header, _, signature = text.split(".")
    other = GrantKeys.create().sign(replace(GRANT, sub="mallory")).split(".")
    return f"{header}.{other[1]}.{signature}"


async def test_signature_is_verified_by_a_child_process():
    keys = GrantKeys.create()
    broker = Keys(keys)
    verifier = GrantVerifier(broker.fetch, agent_peering.verify_grant)
    text = keys.sign(GRANT)
    assert await verifier.verify(text) == GRANT
    found = await verifier.verify(forged(text))
    assert found == Denial("InvalidGrant", "grant has an invalid signature")
    assert broker.fetched == 1


@in_virtual_time
async def test_what_is_no_grant_is_denied_without_a_process():
    broker = Keys(GrantKeys.create())
    verifier = GrantVerifier(broker.fetch, broker.verify)
    texts = {"": "NoGrant", "garbage": "InvalidGrant", "a.b.c": "InvalidGrant"}
    texts["x" * 20_000] = "InvalidGrant"
    assert {text: reason_of(await verifier.verify(text)) for text in texts} == texts
    assert (broker.fetched, broker.verified) == (0, [])


@in_virtual_time
async def test_own_grant_of_the_broker_needs_no_verification():
    keys = GrantKeys.create()
    broker, text = Keys(keys), keys.sign(GRANT)
    verifier = GrantVerifier(broker.fetch, broker.verify)
    assert await verifier.verify(text, trusted=text) == GRANT
    assert (broker.fetched, broker.verified) == (0, [])


@in_virtual_time
async def test_each_grant_is_verified_once_and_the_cache_is_bounded():
    keys = GrantKeys.create()
    broker = Keys(keys)
    verifier = GrantVerifier(broker.fetch, broker.verify)
    texts = [keys.sign(replace(GRANT, jti=f"rsv-{n}")) for n in range(300)]
    for text in texts:
        await verifier.verify(text)
        await verifier.verify(text)
    assert broker.verified == texts
    await verifier.verify(texts[0])
    assert broker.verified == [*texts, texts[0]], "the oldest was dropped"


@in_virtual_time
async def test_unknown_key_is_fetched_and_not_too_often():
    old, new = GrantKeys.create(), GrantKeys.create()
    broker = Keys(old)
    verifier = GrantVerifier(broker.fetch, broker.verify)
    await verifier.verify(old.sign(GRANT))
    for _ in range(5):
        assert reason_of(await verifier.verify(new.sign(GRANT))) == "UnknownKey"
    assert broker.fetched == 1
    broker.known = [new, old]
    await asyncio.sleep(liqo_provider.KEYS_INTERVAL.total_seconds() + 1)
    assert await verifier.verify(new.sign(GRANT)) == GRANT
    assert broker.fetched == 2
    broker.known = [new]
    await asyncio.sleep(liqo_provider.KEYS_MAX_AGE.total_seconds() + 1)
    assert reason_of(await verifier.verify(old.sign(GRANT))) == "UnknownKey", "it was withdrawn"


# -- what this cluster holds


def body(phase="Reserved", target="berlin"):
    status = bodies.ReservationStatus(phase, "", reserved_at=NOW, expires_at=NOW + HOUR)
    amounts = bodies.Quantities("2", "4Gi")
    return bodies.Reservation("rsv-1", "paris", target, amounts, status, NOW)


@pytest.mark.parametrize(
    "known, wanted",
    [
        (None, LentReservation("paris", LENT.resources)),
        (body(), LENT),
        (body("Active"), LENT),
        (body("Released"), None),
        (body(target="madrid"), None),
    ],
    ids=["not reported yet", "reserved", "active", "released", "moved"],
)
def test_hold_is_lent_until_the_broker_reports_its_end(known, wanted):
    """After a restart, what is not reported yet has not ended."""
    cache = ReservationCache()
    if known is not None:
        cache.put(known)
    held = {"rsv-1": Hold("paris", LENT.resources)}
    assert agent_peering.lent_reservations("berlin", held, cache).get("rsv-1") == wanted
