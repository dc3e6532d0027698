"""Joining: tokens, who is let in, waits or is refused, and a listener that few addresses cannot block."""

import asyncio
import contextlib
import itertools
import json
import ssl
import time

import aiohttp
import hypothesis
import pytest
from cryptography import x509
from hypothesis import strategies as st

import brokers
import make
import newcomers
import raw_connections
import waiting
from kubelend.api import enrolment
from kubelend.core.lifecycle import Role
from kubelend.pki import identity, tokens
from kubelend.pki.keys import Algorithm
from kubelend.stores.sqlite import SqliteStore
from kubelend.transports.listener import ConnectionLimits
from newcomers import Newcomer
from troubled import TroubledStore, outage
from waiting import PATIENCE

pytestmark = pytest.mark.broker("enrolling", auto_accept="edge-*")


def certificate_in(directory):
    return x509.load_pem_x509_certificate((directory / "tls.crt").read_bytes())


async def members(broker):
    return {one["name"]: one for one in (await broker.admin().read("members"))["members"]}


async def test_bound_token_gives_a_certificate_with_which_the_cluster_lends_and_borrows(
    broker, tmp_path
):
    berlin = Newcomer("berlin")
    assert "PRIVATE" not in berlin.request
    answer = await berlin.ask(broker, await newcomers.token(broker, name="berlin"))
    assert answer.json["port"] == broker.port
    caller = broker.holder(berlin.save(answer, tmp_path / "berlin"), "berlin")
    await caller.advertise()
    held = await broker.cluster("other").reserve()
    assert held["targetClusterID"] == "berlin"
    member = (await members(broker))["berlin"]
    issued = certificate_in(tmp_path / "berlin")
    assert (member["standing"], member["role"], member["decidedBy"]) == (
        "Accepted",
        "cluster",
        "alice",
    )
    assert member["certificate"]["serial"] == f"{issued.serial_number:x}"
    assert identity.caller_from_certificate(issued) == identity.Caller("berlin")


@pytest.mark.parametrize("role", [Role.VIEWER, Role.ADMIN])
async def test_people_join_in_their_roles(broker, tmp_path, role):
    token = await newcomers.token(broker, role=role.value, name="bob")
    directory = await Newcomer("bob", role).join(broker, token, tmp_path / "bob")
    bob = broker.holder(directory, "bob")
    assert (await bob.get("clusters")).status == 200
    status = 200 if role is Role.ADMIN else 403
    assert (await bob.get("tokens")).status == status


async def test_unexpected_cluster_waits_until_it_is_accepted(broker, tmp_path):
    paris, token = Newcomer("paris"), await newcomers.token(broker)
    answers = [await paris.ask(broker, token) for _ in range(3)]
    assert [answer.status for answer in answers] == [202] * 3
    waiting = (await members(broker))["paris"]
    assert (waiting["standing"], waiting["asks"]) == ("Pending", answers[0].json["key"])
    accepted = await broker.admin().post(
        "members", "cluster", "paris", "accept", {"key": waiting["asks"]}
    )
    assert accepted.json["standing"] == "Accepted"
    directory = await paris.join(broker, token, tmp_path / "paris")
    await broker.holder(directory, "paris").advertise()


async def test_rejected_one_hears_that_its_token_is_used(broker):
    paris, token = Newcomer("paris"), await newcomers.token(broker)
    await paris.ask(broker, token)
    assert (await broker.admin().post("members", "cluster", "paris", "reject")).status == 204
    answer = await paris.ask(broker, token)
    assert answer.refusal == (403, "TokenRefused")
    assert answer.problem.detail == "the token has no uses left"


async def test_lost_answer_is_given_again_and_costs_no_second_use(broker, tmp_path):
    berlin, token = Newcomer("berlin"), await newcomers.token(broker, name="berlin")
    lost = await berlin.ask(broker, token)
    assert lost.status == 200
    directory = await berlin.join(broker, token, tmp_path / "berlin")
    await broker.holder(directory, "berlin").advertise()
    (listed,) = (await broker.admin().read("tokens"))["tokens"]
    assert (listed["state"], listed["usesLeft"]) == ("Used", 0)


async def test_name_that_has_joined_is_not_given_to_another_key(broker, tmp_path):
    await Newcomer("berlin").join(
        broker, await newcomers.token(broker, name="berlin"), tmp_path / "first"
    )
    second, token = Newcomer("berlin"), await newcomers.token(broker, name="berlin")
    assert (await second.ask(broker, token)).status == 202
    await broker.holder(tmp_path / "first", "berlin").advertise()  # the first is in as before
    await broker.admin().post("members", "cluster", "berlin", "accept")
    await second.join(broker, token, tmp_path / "second")


async def test_name_of_a_cluster_with_a_certificate_from_elsewhere_is_not_given_away(broker):
    await broker.cluster("edge-1").advertise()
    answer = await Newcomer("edge-1").ask(broker, await newcomers.token(broker))
    assert answer.status == 202


@pytest.mark.parametrize("uses", [1, 2])
async def test_token_lets_expected_clusters_in_as_often_as_it_may_be_used(broker, tmp_path, uses):
    token = await newcomers.token(broker, uses=uses)
    for number in range(uses):
        directory = await Newcomer(f"edge-{number}").join(broker, token, tmp_path / str(number))
        assert (await broker.holder(directory).get("version")).status == 200
    answer = await Newcomer("edge-9").ask(broker, token)
    assert (*answer.refusal, answer.problem.detail) == (
        403,
        "TokenRefused",
        "the token has no uses left",
    )


async def test_expired_token_is_refused_and_listed_for_a_day(broker):
    token = await newcomers.token(broker, ttl="10m")
    broker.clock.pass_time(newcomers.hours(1 / 6))
    answer = await Newcomer("edge-1").ask(broker, token)
    assert answer.refusal == (403, "TokenRefused")
    assert answer.problem.detail.startswith("the token expired at")
    (listed,) = (await broker.admin().read("tokens"))["tokens"]
    assert listed["state"] == "Expired"
    broker.clock.pass_time(newcomers.hours(24))
    await broker.expire()
    assert (await broker.admin().read("tokens"))["tokens"] == []


async def test_deleted_token_is_as_good_as_none(broker):
    token = await newcomers.token(broker)
    name = token.split(".")[1]
    assert (await broker.admin().delete("tokens", name)).status == 204
    assert (await broker.admin().delete("tokens", name)).refusal == (404, "NotFound")
    assert (await broker.admin().read("tokens"))["tokens"] == []
    answer = await Newcomer("edge-1").ask(broker, token)
    assert (*answer.refusal, answer.problem.detail) == (
        403,
        "TokenRefused",
        "unknown token or wrong secret",
    )


async def test_unknown_token_and_wrong_secret_are_answered_alike(broker):
    version, name, secret = (await newcomers.token(broker)).split(".")
    wrong = "a" * len(secret)
    unknown = await Newcomer("edge-1").ask(broker, f"{version}.{'b' * len(name)}.{secret}")
    mistaken = await Newcomer("edge-1").ask(broker, f"{version}.{name}.{wrong}")
    assert unknown.content == mistaken.content
    assert unknown.refusal == (403, "TokenRefused")
    assert unknown.problem.detail == "unknown token or wrong secret"


@pytest.mark.parametrize(
    "made, who, status, why",
    [
        ({"name": "paris"}, Newcomer("edge-1"), 403, "the token is bound to 'paris'"),
        (
            {"role": "viewer"},
            Newcomer("edge-1"),
            403,
            "the token is for role viewer, not for role cluster",
        ),
        ({}, Newcomer("bob", Role.ADMIN), 403, "the token is for role cluster, not for role admin"),
    ],
    ids=["bound", "other-role", "higher-role"],
)
async def test_token_for_another_is_refused(broker, made, who, status, why):
    answer = await who.ask(broker, await newcomers.token(broker, **made))
    assert (answer.status, answer.problem.detail) == (status, why)


async def test_body_and_request_must_name_the_same(broker):
    token = await newcomers.token(broker)
    answer = await Newcomer("edge-1").ask(broker, token, name="edge-2")
    assert answer.refusal == (400, "InvalidInput")
    answer = await Newcomer("edge-1").ask(broker, token, role="admin")
    assert answer.refusal == (400, "InvalidInput")
    assert (await members(broker)) == {}


@pytest.mark.broker("enrolling", allow_join="edge-*, lab-?")
async def test_only_allowed_clusters_may_join_whatever_they_show(broker):
    token = await newcomers.token(broker)
    answer = await Newcomer("berlin").ask(broker, token)
    assert answer.refusal == (403, "Forbidden")
    assert answer.problem.detail == "cluster 'berlin' is not allowed to join"
    assert (await broker.admin().post("tokens", {"name": "berlin"})).status == 403
    assert (await Newcomer("lab-1").ask(broker, token)).status == 202


async def test_anybody_may_ask_for_the_authorities(broker, certificates):
    answer = await newcomers.call(broker, "GET", "/enrol/v1/authorities")
    assert answer.status == 200
    (shown,) = x509.load_pem_x509_certificates(answer.content)
    assert shown == certificates.authority.certificate


@pytest.mark.parametrize(
    "method, path, status",
    [
        ("GET", "/api/v1/version", 404),
        ("GET", "/api/v1/clusters", 404),
        ("POST", "/api/v1/tokens", 404),
        ("GET", "/openapi.json", 404),
        ("GET", "/healthz", 404),
        ("GET", "/enrol/v1/../../api/v1/clusters", 404),
        ("GET", "/enrol/v1/join", 405),
        ("DELETE", "/enrol/v1/authorities", 405),
    ],
)
async def test_nothing_of_the_interface_is_reached_without_a_certificate(
    broker, method, path, status
):
    assert (await newcomers.call(broker, method, path, b"{}")).status == status
    assert (await broker.admin().get("/enrol/v1/authorities")).refusal == (404, "NotFound")


@pytest.mark.parametrize(
    "content, refusal",
    [
        (b"x" * 30_000, (413, "BodyTooLarge")),
        (b"nonsense", (400, "InvalidInput")),
        (b'{"token": "kl1"}', (400, "InvalidInput")),
    ],
    ids=["large", "no JSON", "incomplete"],
)
async def test_body_that_is_no_join_request_is_refused(broker, content, refusal):
    answer = await newcomers.call(broker, "POST", "/enrol/v1/join", content)
    assert answer.refusal == refusal


@pytest.mark.broker("enrolling", auto_accept="edge-*", fails=True)
async def test_join_is_refused_while_the_store_is_not_read(broker, store):
    token = await newcomers.token(broker)
    async with outage(broker, store):
        assert (await Newcomer("edge-1").ask(broker, token)).refusal == (503, "NotReady")
    assert (await Newcomer("edge-1").ask(broker, token)).status == 200


async def test_a_certificate_is_not_asked_for_and_gives_no_right_there(broker):
    admin = broker.admin()
    connector = aiohttp.TCPConnector(ssl=admin.context)
    url = f"https://localhost:{broker.process.ports['enrol']}/api/v1/clusters"
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.get(url) as response,
    ):
        assert response.status == 404


async def test_broker_without_an_authority_has_no_such_listener_and_says_so(start):
    broker = await start()
    assert "enrol" not in broker.process.ports
    answer = await broker.admin().post("tokens", {})
    assert answer.refusal == (409, "Conflict")
    assert answer.problem.detail == "this broker issues no certificates"
    body = {"request": Newcomer("a").request}
    answer = await broker.cluster("a").post("certificates", body)
    assert answer.refusal == (409, "Conflict")


async def test_members_are_listed_in_pages_by_role_and_name(broker, tmp_path):
    for name in ("rome", "berlin", "paris"):
        await Newcomer(name).join(broker, await newcomers.token(broker, name=name), tmp_path / name)
    first = await broker.admin().read("members", limit="2")
    assert [one["name"] for one in first["members"]] == ["berlin", "paris"]
    rest = await broker.admin().read("members", **{"limit": "2", "continue": first["next"]})
    assert [one["name"] for one in rest["members"]] == ["rome"]
    assert "next" not in rest


async def test_failure_inside_the_broker_is_logged_and_told_to_a_newcomer_without_details(
    broker, log
):
    """A clock that gives no time stands for whatever we did not foresee."""
    token = await newcomers.token(broker, name="berlin")
    broker.clock.now = "not a time"
    answer = await Newcomer("berlin").ask(broker, token)
    assert answer.refusal == (500, "Internal")
    assert answer.problem.error == "internal error; see the log of the broker"
    (line,) = log.lines("Request failed")
    assert line["route"] == "join"


async def test_new_token_comes_with_all_that_a_newcomer_needs(broker, certificates):
    answer = await broker.admin().post("tokens", {"ttl": "30m", "name": "berlin"})
    assert answer.status == 201
    body = answer.json
    version, name, secret = body["token"].split(".")
    assert (version, name, len(secret)) == ("kl1", body["id"], 32)
    assert body["enrolPort"] == broker.process.ports["enrol"]
    assert body["caHash"] == tokens.ca_pin(certificates.authority.certificate)
    assert body["certificateLifetime"] == "8760h"
    assert (body["role"], body["name"], body["uses"]) == ("cluster", "berlin", 1)


async def test_list_shows_tokens_without_their_secrets(broker):
    text = await newcomers.token(broker, role="viewer", uses=3)
    answer = await broker.admin().get("tokens")
    (listed,) = answer.json["tokens"]
    assert listed["id"] == text.split(".")[1]
    assert (listed["role"], listed["usesLeft"], listed["state"]) == ("viewer", 3, "Valid")
    assert listed["createdBy"] == "alice"
    assert text.split(".")[2] not in answer.content.decode()
    assert "digest" not in listed


@pytest.mark.parametrize(
    "fields",
    [
        {"ttl": "0s"},
        {"ttl": "1ns"},
        {"ttl": "999ms"},
        {"ttl": "721h"},
        {"ttl": "soon"},
        {"uses": 0},
        {"uses": 1001},
        {"role": "proxy"},
        {"role": "broker"},
        {"name": "x" * 65},
        {"name": "a\nb"},
        {"name": " a"},
        {"name": "liqo-resource-broker"},
    ],
    ids=str,
)
async def test_nonsense_makes_no_token(broker, fields):
    assert (await broker.admin().post("tokens", fields)).refusal[0] == 400
    assert (await broker.admin().read("tokens"))["tokens"] == []


async def test_secret_is_in_no_log_no_journal_no_store_and_no_error(certificates, tmp_path, log):
    path = tmp_path / "kubelend.db"
    open_store = brokers.reopening(SqliteStore.open(path))
    async with newcomers.enrolling(
        certificates, tmp_path, open_store=open_store, auto_accept="*"
    ) as broker:
        text = await newcomers.token(broker, uses=2)
        secret = text.split(".")[2]
        said = [
            await Newcomer("a").ask(broker, text),
            await Newcomer("a").ask(broker, text, name="b"),
            await Newcomer("b", algorithm=Algorithm.RSA).ask(broker, text),
            await Newcomer("c").ask(broker, text),
            await Newcomer("c").ask(broker, text + "x"),
            await Newcomer("c").ask(broker, text, request="nonsense"),
            await Newcomer("c").ask(broker, {"inner": text}),
            await broker.admin().get("audit"),
            await broker.admin().get("members"),
            await broker.admin().get("tokens"),
        ]
        assert {answer.status for answer in said} == {200, 400, 403}
        assert secret not in log.text
        assert not any(secret.encode() in answer.content for answer in said)
        assert [line for line in log.lines("Request rejected") if line["code"] == "TokenRefused"]
    for file in tmp_path.glob("kubelend.db*"):
        assert secret.encode() not in file.read_bytes()


def guess(number):
    """A token that could be, and is not."""
    digits = f"{number:032d}".translate(str.maketrans("0189", "bcde"))
    return f"kl1.{'a' * 10}.{digits}"


async def crowd(calls):
    """All at once, as far as one address may have connections."""
    room = asyncio.Semaphore(enrolment.ENROLMENT_CONNECTIONS.per_caller // 2)

    async def wait(call):
        async with room:
            return await call

    return await asyncio.gather(*map(wait, calls))


async def test_guessing_is_slowed_logged_and_counted(broker, log):
    token = await newcomers.token(broker, name="edge-1")
    answers = [await Newcomer("edge-1").ask(broker, guess(number)) for number in range(11)]
    assert [answer.status for answer in answers] == [403] * 10 + [429]
    late = answers[-1]
    assert (late.refusal, late.problem.detail) == ((429, "LimitExceeded"), "too many wrong tokens")
    assert 1 <= int(late.headers["Retry-After"]) <= 6
    # Who has used up its tries is not told whether the next one would be right.
    assert (await Newcomer("edge-1").ask(broker, token)).status == 429
    (line,) = [line for line in log.lines("Request rejected") if line["code"] == "TokenRefused"]
    assert (line["route"], line["remote"]) == ("join", "127.0.0.1")
    assert (
        broker.metric("kubelend_http_requests_rejected_total", route="join", code="TokenRefused")
        == 10
    )
    refused = (await broker.admin().read("audit", action="join"))["lines"]
    assert {line["code"] for line in refused} == {"TokenRefused", "LimitExceeded"}
    assert {line["actor"]["role"] for line in refused} == {"applicant"}


async def test_many_guesses_at_once_get_no_more_looks_and_right_tokens_cost_none(broker):
    edge, token = Newcomer("edge-1"), await newcomers.token(broker, name="edge-1")
    assert [(await edge.ask(broker, token)).status for _ in range(15)] == [200] * 15
    asked = (edge.ask(broker, guess(number)) for number in range(30))
    statuses = sorted([answer.status for answer in await crowd(asked)])
    assert statuses == [403] * 10 + [429] * 20


async def test_one_guesser_does_not_keep_another_address_out(broker):
    token = await newcomers.token(broker, name="edge-1")
    for number in range(12):
        await Newcomer("edge-1").ask(broker, guess(number))
    answer = await Newcomer("edge-1").ask(broker, token, source="127.0.0.2")
    assert answer.status == 200


async def test_guessers_of_many_addresses_fill_no_log_and_keep_nobody_out(
    certificates, tmp_path, log, monkeypatch
):
    monkeypatch.setattr(enrolment, "LOG_RATE", 0.001)
    monkeypatch.setattr(enrolment, "LOG_BURST", 5)
    async with newcomers.enrolling(certificates, tmp_path) as broker:
        token = await newcomers.token(broker, name="edge-1")
        wrong = [
            await Newcomer("edge-1").ask(broker, guess(number), source=f"127.2.{number}.1")
            for number in range(12)
        ]
        assert {answer.status for answer in wrong} == {403}
        assert len(log.lines("Request rejected")) == 5
        refused = broker.metric(
            "kubelend_http_requests_rejected_total", route="join", code="TokenRefused"
        )
        assert refused == 12
        assert (await Newcomer("edge-1").ask(broker, token)).status == 200


async def test_one_address_cannot_call_as_often_as_it_likes(broker):
    calls = (newcomers.call(broker, "GET", "/enrol/v1/authorities") for _ in range(80))
    statuses = [answer.status for answer in await crowd(calls)]
    assert 200 in statuses
    assert 429 in statuses


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=40),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)

RIGHT = st.just(...)

REQUEST = Newcomer("edge-9").request

ADDRESSES = itertools.cycle(range(256))

"""One for each example: the calls of one alone would be slowed down."""

PEM = st.builds(
    "-----BEGIN {0}-----\n{1}\n-----END {0}-----\n".format,
    st.sampled_from(["CERTIFICATE REQUEST", "CERTIFICATE", "EC PRIVATE KEY", "X"]),
    st.text("ABCDEFabcdef0123456789+/=\n", max_size=200),
)


@hypothesis.settings(
    max_examples=60, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
@hypothesis.given(data=st.data())
async def test_no_nonsense_is_let_in_or_breaks_the_broker(broker, data):
    """Beside a token that is right: what comes with it is all the more to be looked at."""
    right = await newcomers.token(broker, name="edge-9")
    body = {
        "token": data.draw(RIGHT | JSON | st.text(max_size=250)),
        "name": data.draw(st.just("edge-9") | JSON),
        "request": data.draw(PEM | JSON | mutated(REQUEST)),
        "role": data.draw(st.sampled_from(["", "cluster", "admin", "proxy"]) | JSON),
    }
    if body["token"] is ...:
        body["token"] = right
    garbage = data.draw(st.none() | st.binary(max_size=100))
    content = json.dumps(body).encode() if garbage is None else garbage
    answer = await newcomers.call(
        broker, "POST", "/enrol/v1/join", content, source=f"127.1.{next(ADDRESSES)}.1"
    )
    assert answer.status in {400, 403}, (answer, content)
    await broker.admin().delete("tokens", right.split(".")[1])


def mutated(text):
    """The request of somebody with one letter exchanged; not one of the last, where bits can be idle."""
    inside = range(text.index("\n") + 1, text.rindex("\n-----END") - 8)
    return (
        st.tuples(st.sampled_from([*inside]), st.sampled_from("ABCDab01+/"))
        .map(lambda change: text[: change[0]] + change[1] + text[change[0] + 1 :])
        .filter(lambda changed: changed != text)
    )


HEAD = b"POST /enrol/v1/join HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n"


@contextlib.asynccontextmanager
async def holding(broker, count, sent=HEAD, source="127.0.0.1"):
    """Connections from this address that have sent this much, and no more."""
    context = ssl.create_default_context(cafile=str(broker.certificates.server() / "ca.crt"))
    async with contextlib.AsyncExitStack() as stack:
        readers = []
        for _ in range(count):
            reader, writer = await asyncio.open_connection(
                "127.0.0.1",
                broker.process.ports["enrol"],
                ssl=context,
                server_hostname="localhost",
                local_addr=(source, 0),
            )
            stack.push_async_callback(_abort, writer)
            writer.write(sent)
            readers.append(reader)
        yield readers


async def _abort(writer):
    raw_connections.transport_of(writer).abort()
    writer.close()
    with contextlib.suppress(ssl.SSLError, ConnectionError):
        await writer.wait_closed()


def rejected(broker, reason):
    return broker.metric("kubelend_connections_rejected_total", reason=reason)


@pytest.fixture
def limit(monkeypatch):
    """Limits the connections to the enrolment listener of brokers that start afterwards."""
    return lambda *limits: monkeypatch.setattr(
        enrolment, "ENROLMENT_CONNECTIONS", ConnectionLimits(*limits)
    )


async def test_bodies_that_do_not_come_keep_no_newcomer_out(certificates, tmp_path, limit):
    limit(12, 4, 4)
    async with (
        newcomers.enrolling(certificates, tmp_path) as broker,
        holding(broker, 4, source="127.0.0.2"),
        holding(broker, 4, source="127.0.0.3"),
        holding(broker, 4, source="127.0.0.4"),
    ):
        token = await newcomers.token(broker, name="berlin")
        await Newcomer("berlin").join(broker, token, tmp_path / "berlin")
        assert rejected(broker, "TooManyConnections") >= 1


async def test_answered_call_whose_body_does_not_come_may_go_too(certificates, tmp_path, limit):
    limit(4, 4, 4)
    nowhere = HEAD.replace(b"/enrol/v1/join", b"/nowhere")
    async with (
        newcomers.enrolling(certificates, tmp_path) as broker,
        holding(broker, 4, nowhere, source="127.0.0.2") as readers,
    ):
        for reader in readers:
            assert b" 404 " in await reader.readline()
        assert (await newcomers.call(broker, "GET", "/enrol/v1/authorities")).status == 200


async def test_body_is_not_waited_for_long(certificates, tmp_path, monkeypatch):
    """Whatever the timeout of the broker is for callers with a certificate."""
    monkeypatch.setattr(enrolment, "READ_TIMEOUT", 0.3)
    began = time.monotonic()
    async with (
        newcomers.enrolling(certificates, tmp_path, read_timeout=make.HOUR) as broker,
        holding(broker, 1) as (reader,),
        asyncio.timeout(PATIENCE),
    ):
        assert b" 408 " in await reader.readline()
    assert time.monotonic() - began > 0.27


async def test_one_address_has_few_connections(broker):
    async with holding(broker, enrolment.ENROLMENT_CONNECTIONS.per_caller + 3) as readers:
        token = await newcomers.token(broker, name="berlin")
        answer = await Newcomer("berlin").ask(broker, token)  # from the same address
        assert answer.status == 200
        assert rejected(broker, "TooManyOfCaller") == 4
        for reader in readers[:4]:
            assert await raw_connections.end_of(reader) == b""


async def test_call_in_progress_is_not_ended_for_another(certificates, tmp_path, limit):
    """The whole body has come, and the answer waits for the store."""
    limit(2, 1, 2)
    store = TroubledStore()
    async with newcomers.enrolling(
        certificates, tmp_path, open_store=brokers.reopening(store)
    ) as broker:
        token = await newcomers.token(broker, name="berlin")
        before = store.commits
        store.hold()
        asking = asyncio.create_task(Newcomer("berlin").ask(broker, token))
        await waiting.until(lambda: store.commits > before)
        with pytest.raises(aiohttp.ClientError):
            await newcomers.call(broker, "GET", "/enrol/v1/authorities")
        store.let_go()
        assert (await asking).status == 200
