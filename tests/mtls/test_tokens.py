"""Tokens: made, listed and deleted; their secrets are nowhere, and guessing gets nobody in."""

import asyncio
import itertools
import json

import hypothesis
import pytest
from hypothesis import strategies as st

import brokers
import newcomers
from kubelend.api import enrolment
from kubelend.core.errors import LimitExceeded
from kubelend.pki import tokens
from kubelend.pki.keys import Algorithm
from kubelend.stores.sqlite import SqliteStore
from newcomers import Newcomer

pytestmark = pytest.mark.broker("enrolling", auto_accept="edge-*")


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


async def test_deleted_token_is_gone(broker):
    name = (await newcomers.token(broker)).split(".")[1]
    assert (await broker.admin().delete("tokens", name)).status == 204
    assert (await broker.admin().delete("tokens", name)).refusal == (404, "NotFound")
    assert (await broker.admin().read("tokens"))["tokens"] == []


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
    ],
    ids=str,
)
async def test_nonsense_makes_no_token(broker, fields):
    assert (await broker.admin().post("tokens", fields)).refusal[0] == 400
    assert (await broker.admin().read("tokens"))["tokens"] == []


# -- secrets


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


def test_request_holds_no_private_key():
    berlin = Newcomer("berlin")
    assert "PRIVATE" not in berlin.request
    assert berlin.request.count("-----BEGIN") == 1


# -- guessing


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


async def test_many_guesses_at_once_get_no_more_looks_than_one_after_the_other(broker):
    asked = (Newcomer("edge-1").ask(broker, guess(number)) for number in range(30))
    statuses = sorted([answer.status for answer in await crowd(asked)])
    assert statuses == [403] * 10 + [429] * 20


async def test_right_tokens_cost_no_tries(broker):
    token = await newcomers.token(broker, name="edge-1")
    edge = Newcomer("edge-1")
    assert [(await edge.ask(broker, token)).status for _ in range(15)] == [200] * 15


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


def test_tries_of_one_address_are_its_own():
    tries = enrolment.FailedTokenLimiter(clock=lambda: 0.0)
    for number in range(200):
        tries.take(f"10.0.{number}.1")
    for _ in range(enrolment.WRONG_TOKEN_BURST):
        tries.take("10.1.0.1")
    with pytest.raises(LimitExceeded, match="too many wrong tokens"):
        tries.take("10.1.0.1")
    tries.give_back("10.1.0.1")
    tries.take("10.1.0.1")


async def test_one_address_cannot_call_as_often_as_it_likes(broker):
    calls = (newcomers.call(broker, "GET", "/enrol/v1/authorities") for _ in range(80))
    statuses = [answer.status for answer in await crowd(calls)]
    assert 200 in statuses
    assert 429 in statuses


# -- nonsense

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
