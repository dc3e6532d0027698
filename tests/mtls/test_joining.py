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
from hypothesis import strategies as st

import applicants
import brokers
import make
import raw_connections
import waiting
from applicants import Applicant
from failing_store import outage
from kubelend.api import enrolment
from kubelend.pki import identity, tokens
from kubelend.pki.keys import Algorithm
from kubelend.stores.sqlite import SqliteStore
from kubelend.transports.listener import ConnectionLimits
from waiting import PATIENCE

pytestmark = pytest.mark.broker("enrolling", auto_approve="edge-*")


async def members(broker):
    return {one["name"]: one for one in (await broker.admin().read("members"))["members"]}


async def test_bound_token_gives_a_certificate_with_which_the_cluster_lends_and_borrows(
    broker, tmp_path
):
    berlin = Applicant("berlin")
    assert "PRIVATE" not in berlin.request
    answer = await berlin.ask(broker, await applicants.token(broker, name="berlin"))
    assert answer.json["port"] == broker.port
    caller = broker.holder(berlin.save(answer, tmp_path / "berlin"), "berlin")
    await caller.advertise()
    held = await broker.cluster("other").reserve()
    assert held["targetClusterID"] == "berlin"
    member = (await members(broker))["berlin"]
    issued = applicants.certificate_in(tmp_path / "berlin")
    seen = (member["status"], member["role"], member["decidedBy"])
    assert seen == ("Approved", "cluster", "alice")
    assert member["certificate"]["serial"] == f"{issued.serial_number:x}"
    assert identity.caller_from_certificate(issued) == identity.Caller("berlin")


async def test_unexpected_cluster_waits_until_it_is_accepted(broker, tmp_path):
    paris, token = Applicant("paris"), await applicants.token(broker)
    answers = [await paris.ask(broker, token) for _ in range(3)]
    assert [answer.status for answer in answers] == [202] * 3
    pending = (await members(broker))["paris"]
    assert (pending["status"], pending["pendingKey"]) == ("Pending", answers[0].json["key"])
    key = {"key": pending["pendingKey"]}
    accepted = await broker.admin().post("members", "cluster", "paris", "approve", key)
    assert accepted.json["status"] == "Approved"
    directory = await paris.join(broker, token, tmp_path / "paris")
    await broker.holder(directory, "paris").advertise()


async def test_token_lets_expected_clusters_in_as_often_as_it_may_be_used(broker, tmp_path):
    token = await applicants.token(broker, uses=2)
    for name in ("edge-1", "edge-2"):
        directory = await Applicant(name).join(broker, token, tmp_path / name)
        assert (await broker.holder(directory).get("version")).status == 200
    answer = await Applicant("edge-9").ask(broker, token)
    assert answer.refusal == (403, "TokenRefused")
    assert answer.problem.detail == "the token has no uses left"


async def test_token_comes_with_all_that_an_applicant_needs_and_is_listed_until_it_is_over(
    broker, certificates
):
    answer = await broker.admin().post("tokens", {"ttl": "10m", "name": "edge-1"})
    assert answer.status == 201
    body = answer.json
    version, name, secret = body["token"].split(".")
    assert (version, name, len(secret)) == ("kl1", body["id"], 32)
    assert body["enrolPort"] == broker.process.ports["enrol"]
    assert body["caHash"] == tokens.ca_pin(certificates.authority.certificate)
    assert body["certificateLifetime"] == "8760h"
    assert (body["role"], body["name"], body["uses"]) == ("cluster", "edge-1", 1)

    answer = await broker.admin().get("tokens")
    (listed,) = answer.json["tokens"]
    assert (listed["id"], listed["role"], listed["createdBy"]) == (name, "cluster", "alice")
    assert (listed["state"], listed["usesLeft"]) == ("Valid", 1)
    assert secret not in answer.content.decode()
    assert "digest" not in listed

    broker.clock.pass_time(10 * make.MINUTE)
    refused = await Applicant("edge-1").ask(broker, body["token"])
    assert refused.refusal == (403, "TokenRefused")
    assert refused.problem.detail.startswith("the token expired at")
    (listed,) = (await broker.admin().read("tokens"))["tokens"]
    assert listed["state"] == "Expired"
    broker.clock.pass_time(24 * make.HOUR)
    await broker.expire()
    assert (await broker.admin().read("tokens"))["tokens"] == []


async def test_unknown_deleted_and_wrong_tokens_are_answered_alike(broker):
    texts = [await applicants.token(broker) for _ in range(2)]
    (version, name, secret), (_, deleted, _) = (text.split(".") for text in texts)
    assert (await broker.admin().delete("tokens", deleted)).status == 204
    assert (await broker.admin().delete("tokens", deleted)).refusal == (404, "NotFound")
    wrong = f"{version}.{name}.{'a' * len(secret)}"
    unknown = f"{version}.{'b' * len(name)}.{secret}"
    answers = [await Applicant("edge-1").ask(broker, text) for text in (wrong, unknown, texts[1])]
    assert len({answer.content for answer in answers}) == 1
    assert answers[0].refusal == (403, "TokenRefused")
    assert answers[0].problem.detail == "unknown token or wrong secret"


async def test_body_and_request_must_name_the_same(broker):
    token = await applicants.token(broker)
    for other in ({"name": "edge-2"}, {"role": "admin"}):
        answer = await Applicant("edge-1").ask(broker, token, **other)
        assert answer.refusal == (400, "InvalidInput")
    assert (await members(broker)) == {}


@pytest.mark.broker("enrolling", allow_join="edge-*, lab-?")
async def test_only_allowed_clusters_may_join_whatever_they_show(broker):
    token = await applicants.token(broker)
    answer = await Applicant("berlin").ask(broker, token)
    assert answer.refusal == (403, "Forbidden")
    assert answer.problem.detail == "cluster 'berlin' is not allowed to join"
    assert (await broker.admin().post("tokens", {"name": "berlin"})).status == 403
    assert (await Applicant("lab-1").ask(broker, token)).status == 202


async def test_nothing_of_the_interface_is_reached_there_with_or_without_a_certificate(broker):
    for method, path, status in (
        ("GET", "/api/v1/version", 404),
        ("GET", "/api/v1/clusters", 404),
        ("POST", "/api/v1/tokens", 404),
        ("GET", "/openapi.json", 404),
        ("GET", "/healthz", 404),
        ("GET", "/enrol/v1/../../api/v1/clusters", 404),
        ("GET", "/enrol/v1/join", 405),
        ("DELETE", "/enrol/v1/authorities", 405),
    ):
        assert (await applicants.call(broker, method, path, b"{}")).status == status, path
    assert (await broker.admin().get("/enrol/v1/authorities")).refusal == (404, "NotFound")
    connector = aiohttp.TCPConnector(ssl=broker.admin().context)
    url = f"https://localhost:{broker.process.ports['enrol']}/api/v1/clusters"
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.get(url) as response,
    ):
        assert response.status == 404


async def test_body_that_is_no_join_request_is_refused(broker):
    for content, refusal in (
        (b"x" * 30_000, (413, "BodyTooLarge")),
        (b"nonsense", (400, "InvalidInput")),
        (b'{"token": "kl1"}', (400, "InvalidInput")),
    ):
        answer = await applicants.call(broker, "POST", "/enrol/v1/join", content)
        assert answer.refusal == refusal


@pytest.mark.broker("enrolling", auto_approve="edge-*", fails=True)
async def test_join_is_refused_while_the_store_is_not_read(broker, store):
    token = await applicants.token(broker)
    async with outage(broker, store):
        assert (await Applicant("edge-1").ask(broker, token)).refusal == (503, "NotReady")
    assert (await Applicant("edge-1").ask(broker, token)).status == 200


async def test_broker_without_an_authority_has_no_such_listener_and_says_so(start):
    broker = await start()
    assert "enrol" not in broker.process.ports
    answer = await broker.admin().post("tokens", {})
    assert answer.refusal == (409, "Conflict")
    assert answer.problem.detail == "this broker issues no certificates"
    body = {"request": Applicant("a").request}
    answer = await broker.cluster("a").post("certificates", body)
    assert answer.refusal == (409, "Conflict")


async def test_failure_inside_the_broker_is_logged_and_answered_without_details(broker, log):
    """A clock that gives no time stands for whatever we did not foresee."""
    token = await applicants.token(broker, name="berlin")
    broker.clock.now = "not a time"
    answer = await Applicant("berlin").ask(broker, token)
    assert answer.refusal == (500, "Internal")
    assert answer.problem.error == "internal error; see the log of the broker"
    (line,) = log.lines("Request failed")
    assert line["route"] == "join"


async def test_nonsense_makes_no_token(broker):
    for fields in (
        *({"ttl": ttl} for ttl in ("0s", "1ns", "999ms", "721h", "soon")),
        *({"uses": uses} for uses in (0, 1001)),
        *({"role": role} for role in ("proxy", "broker")),
        *({"name": name} for name in ("x" * 65, "a\nb", " a", "liqo-resource-broker")),
    ):
        assert (await broker.admin().post("tokens", fields)).refusal[0] == 400, fields
    assert (await broker.admin().read("tokens"))["tokens"] == []


async def test_secret_is_in_no_log_no_journal_no_store_and_no_error(certificates, tmp_path, log):
    path = tmp_path / "kubelend.db"
    open_store = brokers.reopening(SqliteStore.open(path))
    async with applicants.enrolling(
        certificates, tmp_path, open_store=open_store, auto_approve="*"
    ) as broker:
        text = await applicants.token(broker, uses=2)
        secret = text.split(".")[2]
        said = [
            await Applicant("a").ask(broker, text),
            await Applicant("a").ask(broker, text, name="b"),
            await Applicant("b", algorithm=Algorithm.RSA).ask(broker, text),
            await Applicant("c").ask(broker, text),
            await Applicant("c").ask(broker, text + "x"),
            await Applicant("c").ask(broker, text, request="nonsense"),
            await Applicant("c").ask(broker, {"inner": text}),
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


def refused_joins(broker):
    labels = {"route": "join", "code": "TokenRefused"}
    return broker.metric("kubelend_http_requests_rejected_total", **labels)


async def crowd(calls):
    """All at once, as far as one address may have connections."""
    room = asyncio.Semaphore(enrolment.ENROLMENT_CONNECTIONS.per_caller // 2)

    async def wait(call):
        async with room:
            return await call

    return await asyncio.gather(*map(wait, calls))


async def test_guessing_is_slowed_by_address_logged_and_counted(broker, log):
    token = await applicants.token(broker, name="edge-1")
    answers = [await Applicant("edge-1").ask(broker, guess(number)) for number in range(11)]
    assert [answer.status for answer in answers] == [403] * 10 + [429]
    late = answers[-1]
    assert (late.refusal, late.problem.detail) == ((429, "LimitExceeded"), "too many wrong tokens")
    assert 1 <= int(late.headers["Retry-After"]) <= 6
    # Who has used up its tries is not told whether the next one would be right.
    assert (await Applicant("edge-1").ask(broker, token)).status == 429
    other_address = await Applicant("edge-1").ask(broker, token, source="127.0.0.2")
    assert other_address.status == 200
    (line,) = [line for line in log.lines("Request rejected") if line["code"] == "TokenRefused"]
    assert (line["route"], line["remote"]) == ("join", "127.0.0.1")
    assert refused_joins(broker) == 10
    refused = (await broker.admin().read("audit", action="join"))["lines"]
    assert {line["code"] for line in refused} == {"TokenRefused", "LimitExceeded"}
    assert {line["actor"]["role"] for line in refused} == {"applicant"}


async def test_many_guesses_at_once_get_no_more_looks_and_right_tokens_cost_none(broker):
    edge, token = Applicant("edge-1"), await applicants.token(broker, name="edge-1")
    assert [(await edge.ask(broker, token)).status for _ in range(15)] == [200] * 15
    asked = (edge.ask(broker, guess(number)) for number in range(30))
    statuses = sorted([answer.status for answer in await crowd(asked)])
    assert statuses == [403] * 10 + [429] * 20


async def test_guessers_of_many_addresses_fill_no_log_and_keep_nobody_out(
    certificates, tmp_path, log, monkeypatch
):
    monkeypatch.setattr(enrolment, "LOG_RATE", 0.001)
    monkeypatch.setattr(enrolment, "LOG_BURST", 5)
    async with applicants.enrolling(certificates, tmp_path) as broker:
        token = await applicants.token(broker, name="edge-1")
        wrong = [
            await Applicant("edge-1").ask(broker, guess(number), source=f"127.2.{number}.1")
            for number in range(12)
        ]
        assert {answer.status for answer in wrong} == {403}
        assert len(log.lines("Request rejected")) == 5
        assert refused_joins(broker) == 12
        assert (await Applicant("edge-1").ask(broker, token)).status == 200


async def test_one_address_cannot_call_as_often_as_it_likes(broker):
    calls = (applicants.call(broker, "GET", "/enrol/v1/authorities") for _ in range(80))
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

# One for each example: the calls of one alone would be slowed down.
ADDRESSES = itertools.cycle(range(256))


@hypothesis.settings(
    max_examples=60, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
@hypothesis.given(data=st.data())
async def test_no_nonsense_is_let_in_or_breaks_the_broker(broker, data):
    """Beside a token that is right; requests close to a right one are a unit test's."""
    right = await applicants.token(broker, name="edge-9")
    body = {
        "token": data.draw(RIGHT | JSON | st.text(max_size=250)),
        "name": data.draw(st.just("edge-9") | JSON),
        "request": data.draw(JSON),
        "role": data.draw(st.sampled_from(["", "cluster", "admin", "proxy"]) | JSON),
    }
    if body["token"] is ...:
        body["token"] = right
    garbage = data.draw(st.none() | st.binary(max_size=100))
    content = json.dumps(body).encode() if garbage is None else garbage
    source = f"127.1.{next(ADDRESSES)}.1"
    answer = await applicants.call(broker, "POST", "/enrol/v1/join", content, source=source)
    assert answer.status in {400, 403}, (answer, content)
    await broker.admin().delete("tokens", right.split(".")[1])


HEAD = b"POST /enrol/v1/join HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n"


@contextlib.asynccontextmanager
async def holding(broker, count, sent=HEAD, source="127.0.0.1"):
    """Connections from this address that have sent this much, and no more."""
    context = ssl.create_default_context(cafile=str(broker.certificates.server() / "ca.crt"))
    port, own = broker.process.ports["enrol"], (source, 0)
    async with contextlib.AsyncExitStack() as stack:
        readers = []
        for _ in range(count):
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", port, ssl=context, server_hostname="localhost", local_addr=own
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

    def limit(*limits):
        monkeypatch.setattr(enrolment, "ENROLMENT_CONNECTIONS", ConnectionLimits(*limits))

    return limit


async def test_bodies_that_do_not_come_keep_no_applicant_out(certificates, tmp_path, limit):
    limit(12, 4, 4)
    async with (
        applicants.enrolling(certificates, tmp_path) as broker,
        holding(broker, 4, source="127.0.0.2"),
        holding(broker, 4, source="127.0.0.3"),
        holding(broker, 4, source="127.0.0.4"),
    ):
        token = await applicants.token(broker, name="berlin")
        await Applicant("berlin").join(broker, token, tmp_path / "berlin")
        assert rejected(broker, "TooManyConnections") >= 1


async def test_answered_call_whose_body_does_not_come_may_go_too(certificates, tmp_path, limit):
    limit(4, 4, 4)
    nowhere = HEAD.replace(b"/enrol/v1/join", b"/nowhere")
    async with (
        applicants.enrolling(certificates, tmp_path) as broker,
        holding(broker, 4, nowhere, source="127.0.0.2") as readers,
    ):
        for reader in readers:
            assert b" 404 " in await reader.readline()
        assert (await applicants.call(broker, "GET", "/enrol/v1/authorities")).status == 200


async def test_body_is_not_waited_for_long(certificates, tmp_path, monkeypatch):
    """Whatever the timeout of the broker is for callers with a certificate."""
    monkeypatch.setattr(enrolment, "READ_TIMEOUT", 0.3)
    began = time.monotonic()
    async with (
        applicants.enrolling(certificates, tmp_path, read_timeout=make.HOUR) as broker,
        holding(broker, 1) as (reader,),
        asyncio.timeout(PATIENCE),
    ):
        assert b" 408 " in await reader.readline()
    assert time.monotonic() - began > 0.27


async def test_one_address_has_few_connections(broker):
    async with holding(broker, enrolment.ENROLMENT_CONNECTIONS.per_caller + 3) as readers:
        token = await applicants.token(broker, name="berlin")
        answer = await Applicant("berlin").ask(broker, token)  # from the same address
        assert answer.status == 200
        assert rejected(broker, "TooManyOfCaller") == 4
        for reader in readers[:4]:
            assert await raw_connections.end_of(reader) == b""


@pytest.fixture
def few(limit):
    limit(2, 1, 2)


@pytest.mark.broker("enrolling", fails=True)
async def test_call_in_progress_is_not_ended_for_another(few, broker, store):
    """The whole body has come, and the answer waits for the store."""
    token = await applicants.token(broker, name="berlin")
    before = store.commits
    store.hold()
    asking = asyncio.create_task(Applicant("berlin").ask(broker, token))
    await waiting.until(lambda: store.commits > before)
    with pytest.raises(aiohttp.ClientError):
        await applicants.call(broker, "GET", "/enrol/v1/authorities")
    store.let_go()
    assert (await asking).status == 200
