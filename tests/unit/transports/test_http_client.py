"""The client of the broker, over real mutual TLS: bodies in and out, errors by class, retries."""

import subprocess
import sys
from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from kubelend.core import errors
from kubelend.kits.backoff import Backoff
from kubelend.transports.client import BrokerClient
from kubelend.wire import admin_bodies, bodies, route
from scripted_broker import body, events, hang_up, problem, raw

QUICK = Backoff(retries=2, first=timedelta(milliseconds=1))
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
AMOUNTS = bodies.Quantities("500m", "256Mi")
REQUEST = bodies.ReservationRequest(AMOUNTS, duration="1h")
RESERVATION = bodies.Reservation(
    "rsv-a-1", "a", "b", AMOUNTS, bodies.ReservationStatus("Reserved", "Locked"), NOW
)
ADVERTISEMENT = bodies.Advertisement("a", bodies.Metrics(AMOUNTS))
CLUSTER = bodies.Cluster(
    ADVERTISEMENT, bodies.ClusterStatus("Active", True, "1.00", "Limited", NOW, NOW)
)
EXPLANATION = bodies.Explanation("1/1 cluster fits", 1, 1, {})

pytestmark = pytest.mark.broker("scripted")


async def test_a_broker_that_is_not_ready_says_why(broker, client):
    broker.responses.append(raw(b"not ready: replaying", 503))
    with pytest.raises(errors.NotReady, match="the broker is not ready: replaying"):
        await client.readyz()


async def test_bodies_are_sent_as_the_contract_has_them(broker, client):
    broker.responses.append(body(RESERVATION, 201))
    await client.reserve(REQUEST, key="k-1")
    assert msgspec.json.decode(broker.seen[0].body) == {
        "requestedResources": {"cpu": "500m", "memory": "256Mi"},
        "duration": "1h",
    }
    assert broker.seen[0].headers["Idempotency-Key"] == "k-1"
    assert broker.seen[0].headers["Content-Type"] == "application/json"


async def test_an_agent_names_itself_in_every_call(broker, certificates):
    broker.responses += [
        body(CLUSTER),
        body(RESERVATION, 201),
        events(b"event: reset\ndata: {}\n\n"),
    ]
    once = Backoff(retries=0)
    directory = certificates.cluster("a")
    async with BrokerClient(broker.url, directory, backoff=once, instance="one") as client:
        await client.get_cluster("a")
        await client.reserve(REQUEST, key="k-1")
        with pytest.raises(errors.BrokerUnreachable):
            await anext(client.stream())
    assert [seen.headers["Kubelend-Agent"] for seen in broker.seen] == ["one"] * 3
    assert broker.seen[1].headers["Idempotency-Key"] == "k-1"


async def test_who_is_no_agent_has_no_name(broker, client):
    broker.responses.append(body(CLUSTER))
    await client.get_cluster("a")
    assert "Kubelend-Agent" not in broker.seen[0].headers


async def test_a_dry_run_is_a_reservation_that_changes_nothing(broker, client):
    broker.responses.append(body(EXPLANATION))
    assert await client.reserve_dry_run(REQUEST) == EXPLANATION
    assert broker.seen[0].query == {"dryRun": "true"}


async def test_pages_are_followed_to_the_end(broker, client):
    broker.responses += [
        body(bodies.ReservationList([RESERVATION], "1")),
        body(bodies.ReservationList([RESERVATION])),
    ]
    assert await client.all_reservations(phase="Reserved") == [RESERVATION, RESERVATION]
    assert [seen.query for seen in broker.seen] == [
        {"phase": "Reserved", "limit": "1000"},
        {"phase": "Reserved", "limit": "1000", "continue": "1"},
    ]


async def test_pages_of_clusters_are_followed_too(broker, client):
    broker.responses += [body(bodies.ClusterList([CLUSTER], "a")), body(bodies.ClusterList([]))]
    assert await client.all_clusters() == [CLUSTER]
    assert [seen.query for seen in broker.seen] == [{}, {"continue": "a"}]


async def test_pages_of_quotas_are_followed_too(broker, client):
    quota = admin_bodies.QuotaStatus("a", admin_bodies.Quota(), admin_bodies.QuotaUse())
    broker.responses += [
        body(admin_bodies.QuotaList([quota], "a")),
        body(admin_bodies.QuotaList([quota])),
    ]
    assert await client.quotas.all() == [quota, quota]
    assert [seen.query for seen in broker.seen] == [{}, {"continue": "a"}]


async def test_null_instructions_are_none(broker, client):
    broker.responses.append(raw(b"null\n"))
    assert await client.instructions() == []


@pytest.mark.parametrize("name", ["a/b", "a b?c=d#e", "100%", "zürich", "..", ".", "a;b"])
async def test_a_name_stays_one_segment_whatever_is_in_it(broker, client, name):
    broker.responses.append(body(CLUSTER))
    await client.cordon(name)
    assert broker.seen[0].path.count("/") == f"{route.API}/clusters/x/cordon".count("/")
    assert broker.seen[0].query == {}


async def test_an_empty_name_is_no_call(broker, client):
    with pytest.raises(errors.InvalidInput, match="empty name"):
        await client.remove_cluster("")
    assert broker.seen == []


@pytest.mark.parametrize(
    "key", ["a\r\nX-Evil: 1", "ü", "x" * 256], ids=["lines", "letters", "long"]
)
async def test_a_key_that_no_header_can_carry_is_no_call(broker, client, key):
    with pytest.raises(errors.InvalidInput, match="not a valid idempotency key"):
        await client.reserve(REQUEST, key=key)
    assert broker.seen == []


def all_errors(kind=errors.KubelendError):
    return [kind, *(found for child in kind.__subclasses__() for found in all_errors(child))]


@pytest.mark.parametrize("kind", all_errors(), ids=lambda kind: kind.__name__)
async def test_the_error_of_the_broker_is_raised_by_its_own_class(broker, client, kind):
    broker.responses.append(problem(kind("what", hint="do")))
    with pytest.raises(errors.KubelendError) as raised:
        await client.drain("a")
    assert type(raised.value) is (errors.NotFound if kind is errors.Hidden else kind)
    assert str(raised.value) == "what; do"


@pytest.mark.parametrize(
    "answer",
    [raw(b"<html>nginx</html>", 404), raw(b"", 302, {"Location": "/x"}), raw(b"{", 200)],
    ids=["another server", "a redirect", "half a body"],
)
async def test_an_answer_that_is_none_of_ours_is_unexpected(broker, client, answer):
    broker.responses.append(answer)
    with pytest.raises(errors.UnexpectedAnswer):
        await client.version()


# -- again, or not


async def test_a_question_is_asked_again_while_that_may_help(broker, client):
    broker.responses += [problem(errors.NotReady("starting")), hang_up, body(bodies.Version("1"))]
    assert (await client.version()).version == "1"
    assert len(broker.seen) >= 3


async def test_a_proxy_whose_broker_is_away_for_a_moment_is_asked_again(broker, client):
    broker.responses += [raw(b"<html>gateway</html>", 502), body(bodies.Version("1"))]
    assert (await client.version()).version == "1"


async def test_the_retries_of_a_reservation_carry_the_same_key(broker, client):
    broker.responses += [hang_up, problem(errors.StoreFailed("full")), body(RESERVATION, 201)]
    await client.reserve(REQUEST)
    keys = {seen.headers["Idempotency-Key"] for seen in broker.seen}
    assert len(broker.seen) == 3
    assert len(keys) == 1


async def test_two_reservations_have_two_keys(broker, client):
    broker.responses.append(body(RESERVATION, 201))
    await client.reserve(REQUEST)
    await client.reserve(REQUEST)
    assert len({seen.headers["Idempotency-Key"] for seen in broker.seen}) == 2


async def test_retries_have_an_end(broker, client):
    broker.responses.append(problem(errors.NotReady("starting")))
    with pytest.raises(errors.NotReady):
        await client.get_reservation("r")
    assert len(broker.seen) == 1 + QUICK.retries


async def test_what_could_come_out_differently_is_not_repeated(broker, client):
    broker.responses.append(problem(errors.NotReady("starting")))
    with pytest.raises(errors.NotReady):
        await client.drain("x")
    assert len(broker.seen) == 1


async def test_a_refusal_whose_answer_was_lost_is_said_again(broker, client):
    broker.responses += [hang_up, body(RESERVATION)]
    assert await client.refuse("x") == RESERVATION
    assert len(broker.seen) == 2


async def test_what_will_not_help_is_not_repeated(broker, client):
    broker.responses.append(problem(errors.NotFound("no reservation")))
    with pytest.raises(errors.NotFound):
        await client.get_reservation("r")
    assert len(broker.seen) == 1


async def test_a_broker_that_wants_a_long_rest_is_not_waited_for(broker, client):
    broker.responses.append(problem(errors.RateLimited("slow"), {"Retry-After": "3600"}))
    with pytest.raises(errors.RateLimited) as raised:
        await client.version()
    assert raised.value.retry_after == 3600
    assert len(broker.seen) == 1


async def test_calls_share_a_connection(broker, client):
    broker.responses.append(body(bodies.Version("1")))
    for _ in range(5):
        await client.version()
    assert len(broker.connections) == 1


async def test_a_client_that_is_not_open_says_so(certificates):
    with pytest.raises(RuntimeError, match="async with"):
        await BrokerClient("https://localhost:1", certificates.cluster("a")).version()


async def test_a_client_that_was_closed_says_so(broker, certificates):
    async with BrokerClient(broker.url, certificates.cluster("a"), backoff=QUICK) as client:
        pass
    with pytest.raises(errors.BrokerUnreachable, match="was closed on this side"):
        await client.version()


def test_importing_the_client_is_light():
    heavy = "{'numpy', 'rich', 'typer', 'cryptography', 'structlog', 'uvloop'}"
    code = f"import sys, kubelend.transports.client; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
