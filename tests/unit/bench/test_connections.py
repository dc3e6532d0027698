"""The reader of the load generators understands our broker's answers, however they are cut."""

import pytest

from kubelend.bench import load
from kubelend.bench.load import LoadConnection, RawResponse
from kubelend.core.errors import BrokerUnreachable, UnexpectedAnswer

WHOLE = b"HTTP/1.1 201 Created\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


def test_a_whole_answer_is_read():
    assert load.parse_response(WHOLE) == RawResponse(201, b"{}")


def test_the_name_of_a_header_may_be_in_any_case():
    assert load.parse_response(WHOLE.lower().replace(b"http", b"HTTP")) == RawResponse(201, b"{}")


def test_an_answer_without_a_body_is_read():
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
    assert load.parse_response(answer) == RawResponse(200, b"")


@pytest.mark.parametrize("length", range(len(WHOLE)))
def test_a_part_of_an_answer_is_waited_for(length):
    assert load.parse_response(WHOLE[:length]) is None


@pytest.mark.parametrize(
    "received",
    [
        pytest.param(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", id="chunked"),
        pytest.param(b"SSH-2.0-x\r\nContent-Length: 0\r\n\r\n", id="no HTTP"),
    ],
)
def test_what_cannot_be_read_is_an_error_and_no_guess(received):
    with pytest.raises(UnexpectedAnswer):
        load.parse_response(received)


@pytest.mark.parametrize("cut", [1, 20, len(WHOLE) - 1])
def test_an_answer_in_two_parts_arrives_once(cut):
    connection = LoadConnection()
    answers: list[RawResponse] = []
    connection.on_response = answers.append
    connection.data_received(WHOLE[:cut])
    assert answers == []
    connection.data_received(WHOLE[cut:])
    assert answers == [RawResponse(201, b"{}")]


def test_sending_on_a_lost_connection_is_told():
    connection = LoadConnection()
    lost: list[Exception] = []
    connection.connection_lost(None)
    connection.on_lost = lost.append
    connection.send(b"GET / HTTP/1.1\r\n\r\n")
    assert [type(problem) for problem in lost] == [BrokerUnreachable]
    assert connection.is_closed


async def test_a_call_on_a_lost_connection_fails():
    connection = LoadConnection()
    connection.connection_lost(ConnectionResetError())
    with pytest.raises(BrokerUnreachable):
        await connection.call(b"GET / HTTP/1.1\r\n\r\n")
