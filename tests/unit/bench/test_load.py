"""The load generators: responses however they are cut, and closed loops that count what was answered."""

import asyncio
import itertools

import pytest

from kubelend.bench import load
from kubelend.bench.load import LoadConnection, LoadResult, RawResponse
from kubelend.core.errors import BrokerUnreachable, UnexpectedResponse

WHOLE = b"HTTP/1.1 201 Created\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
EMPTY = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


@pytest.mark.parametrize(
    "received, expected",
    [
        pytest.param(WHOLE, RawResponse(201, b"{}"), id="with a body"),
        pytest.param(EMPTY, RawResponse(200, b""), id="without a body"),
        pytest.param(
            WHOLE.lower().replace(b"http", b"HTTP"), RawResponse(201, b"{}"), id="any case"
        ),
        *(
            pytest.param(WHOLE[:length], None, id=f"{length} bytes")
            for length in (0, 20, len(WHOLE) - 1)
        ),
    ],
)
def test_response_is_parsed_when_it_is_complete(received, expected):
    assert load.parse_response(received) == expected


def test_unsupported_response_is_an_error():
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    for received in (chunked, b"SSH-2.0-x\r\nContent-Length: 0\r\n\r\n"):
        with pytest.raises(UnexpectedResponse):
            load.parse_response(received)


@pytest.mark.parametrize("cut", [1, 20, len(WHOLE) - 1])
def test_response_in_two_parts_arrives_once(cut):
    connection, answers = LoadConnection(), list[RawResponse]()
    connection.on_response = answers.append
    connection.data_received(WHOLE[:cut])
    assert answers == []
    connection.data_received(WHOLE[cut:])
    assert answers == [RawResponse(201, b"{}")]


async def test_lost_connection_fails_sends_and_calls():
    connection, lost = LoadConnection(), list[Exception]()
    connection.connection_lost(ConnectionResetError())
    connection.on_lost = lost.append
    connection.send(b"GET / HTTP/1.1\r\n\r\n")
    assert [type(problem) for problem in lost] == [BrokerUnreachable]
    assert connection.is_closed
    with pytest.raises(BrokerUnreachable):
        await connection.call(b"GET / HTTP/1.1\r\n\r\n")


class Transport:
    """Answers each request soon, with the statuses given in turn."""

    def __init__(self, connection, statuses):
        self.sent = []
        self._connection = connection
        self._statuses = statuses
        connection.connection_made(self)

    def write(self, request):
        self.sent.append(request)
        answer = b"HTTP/1.1 %d X\r\nContent-Length: 1\r\n\r\nx" % next(self._statuses)
        asyncio.get_running_loop().call_soon(self._connection.data_received, answer)

    def is_closing(self):
        return False


def connections(count, *statuses):
    opened = [LoadConnection() for _ in range(count)]
    return opened, [Transport(one, itertools.cycle(statuses)) for one in opened]


async def test_messages_are_each_sent_once_over_all_connections():
    opened, transports = connections(3, 201)
    result = LoadResult(201)
    messages = [b"%d" % number for number in range(20)]
    await load.send_all(opened, messages, result)
    assert sorted(itertools.chain(*(one.sent for one in transports))) == sorted(messages)
    assert len(result.responses) == len(result.latencies) == 20
    assert len(result.rates) == 1


async def test_responses_after_the_end_of_a_slice_do_not_count_for_the_rate():
    opened, transports = connections(2, 201)
    result = LoadResult(201)
    await load.send_for(opened, lambda number: b"%d" % number, -1.0, result)
    assert [one.sent for one in transports] == [[b"0"], [b"1"]]
    assert (len(result.responses), result.latencies) == (2, [])
    assert result.rates == [0]
    await load.send_for(opened, lambda number: b"%d" % number, 0.02, result)
    assert result.rates[1] == pytest.approx(len(result.latencies) / 0.02)
    assert len(result.responses) == len(result.latencies) + 4


async def test_unexpected_status_fails_the_loop():
    opened, _ = connections(1, 201, 500)
    with pytest.raises(UnexpectedResponse, match="500: x"):
        await load.send_all(opened, [b"a", b"b"], LoadResult(201))


async def test_loop_fails_with_a_lost_connection():
    opened, _ = connections(1, 201)
    lost = LoadConnection()
    lost.connection_lost(None)
    with pytest.raises(BrokerUnreachable):
        await load.send_all([*opened, lost], [b"a", b"b"], LoadResult(201))
