"""What a broker says of itself and of others: warnings at the start, and no secret anywhere."""

import pytest

import brokers
from bare import CLOSE, GET, connected, end_of
from callers import offer
from certificates import DAY, Certificates

TOKEN = "kl1.abcdefghij.abcdefghijklmnopqrstuvwxyz234567"
SECRET = TOKEN.rpartition(".")[2]
# In two pieces, so that no scanner takes this file for a leak.
PEM = "-----BEGIN " + "PRIVATE KEY-----\nMIGHAgEAMBMGByqGSM49\n-----END PRIVATE KEY-----"


NOWHERE = GET.replace(b"version", b"nowhere").replace(b"\r\n\r\n", CLOSE)


# -- file modes


@pytest.fixture
def own(tmp_path):
    """Certificates whose modes a test may change."""
    return Certificates(tmp_path / "certificates")


@pytest.fixture
def store(tmp_path):
    """The path of a store that is there, in a directory of its own."""
    directory = tmp_path / "store"
    directory.mkdir(mode=0o700)
    path = directory / "kubelend.db"
    path.touch(mode=0o600)
    return path


async def told_at_start(certificates, store, log):
    async with brokers.running(certificates, store=str(store)):
        return [line["event"] for line in log.all if line["level"] == "warning"]


async def test_modes_that_keep_others_out_are_not_worth_a_word(own, store, log):
    assert await told_at_start(own, store, log) == []


async def test_key_that_others_can_read_is_told_at_the_start(own, store, log):
    key = own.server() / "tls.key"
    key.chmod(0o644)
    (line,) = await told_at_start(own, store, log)
    assert line.startswith(
        f"{key} holds a private key and has mode 0644, so other users can access it;"
    )


async def test_store_that_others_can_read_is_told_at_the_start(own, store, log):
    store.chmod(0o640)
    (line,) = await told_at_start(own, store, log)
    assert line == (
        f"{store} holds the ledger and has mode 0640, so other users can access it; chmod 600 {store}*"
    )


@pytest.mark.parametrize("which", ["store", "certificates"])
async def test_directory_that_others_can_write_is_told_at_the_start(own, store, log, which):
    directory = store.parent if which == "store" else own.server()
    directory.chmod(0o777)
    (line,) = await told_at_start(own, store, log)
    assert line.startswith(f"{directory} has mode 0777, so other users can replace files in it;")


# -- logs


async def test_secrets_that_somebody_sends_are_in_no_line(broker, log):
    a = broker.cluster("a")
    for secret in (TOKEN, PEM):
        assert (await a.post("advertisements", offer(secret))).status in (400, 403)
        await a.call("GET", "/nowhere", headers={"Authorization": f"Bearer {SECRET}"})
        await a.get("clusters", secret)
    async with connected(a) as (reader, writer):
        writer.write(b"GET /%s HTTP/x\r\n\r\n" % TOKEN.encode())
        assert (await end_of(reader)).startswith(b"HTTP/1.0 400 ")
    assert log.lines("Request rejected") != []
    assert "kl1.abcdefghij.[redacted]" in log.text
    for secret in (SECRET, "MIGHAgEA"):
        assert secret not in log.text


async def test_calls_over_the_limit_make_one_line_and_all_are_counted(start, log):
    broker = await start(rate_limit=1, rate_burst=1)
    for caller in (broker.cluster("x"), broker.admin("x")):
        for _ in range(20):
            await caller.get("version")
    assert [line["code"] for line in log.lines("Request rejected")] == ["RateLimited"] * 2
    name = "kubelend_http_requests_rejected_total"
    assert broker.metric(name, route="version", code="RateLimited") >= 37


async def test_calls_of_a_certificate_that_has_ended_make_one_line(broker, log):
    caller = broker.cluster("a")
    await caller.get("version")
    broker.clock.pass_time(1000 * DAY)
    for _ in range(20):
        assert (await caller.get("version")).refusal == (403, "InvalidIdentity")
    assert [line["code"] for line in log.lines("Request rejected")] == ["InvalidIdentity"]


# -- headers


@pytest.mark.parametrize(
    "sent, status",
    [
        pytest.param(GET.replace(b"\r\n\r\n", CLOSE), b"200", id="answer"),
        pytest.param(NOWHERE, b"404", id="nowhere"),
        pytest.param(b"no HTTP at all\r\n\r\n", b"400", id="no HTTP"),
    ],
)
async def test_no_answer_says_which_software_gave_it(broker, sent, status):
    async with connected(broker.cluster("a")) as (reader, writer):
        writer.write(sent)
        answer = await end_of(reader)
    assert answer.split(b" ")[1] == status
    head = answer.partition(b"\r\n\r\n")[0].lower()
    assert b"server:" not in head
    assert b"python" not in head
    assert b"aiohttp" not in head


async def test_stream_does_not_say_it_either(broker):
    async with broker.cluster("a").stream() as stream:
        assert "Server" not in stream.response.headers


async def test_broker_that_cannot_answer_says_when_to_come_back(certificates):
    def refuse():
        raise brokers.failure("no disk")

    async with brokers.listening(certificates, open_store=refuse) as broker:
        answer = await broker.cluster("a").get("reservations")
    assert answer.refusal == (503, "NotReady")
    assert int(answer.headers["Retry-After"]) >= 1
