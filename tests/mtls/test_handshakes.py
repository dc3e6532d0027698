"""Handshakes over REST: pushed to the other side, hidden from others, and in no log."""

import pytest

pytestmark = [pytest.mark.broker(offers={"a": ("4", "8Gi")})]

START = {"clusterID": "liqo-r"}
NONCE = {"clusterID": "liqo-a", "nonce": "c2VjcmV0LW5vbmNl"}


async def test_handshake_reaches_the_other_side_with_the_grant(broker, r, log):
    a = broker.cluster("a")
    made = await r.reserve()
    async with a.stream() as provider:
        await provider.events(2)
        sent = await r.put("reservations", made["id"], "handshake", START)
        assert set(sent.json) == {"grant"}
        pushed = await provider.event()
        assert (pushed.name, pushed.id, pushed.data) == (
            "handshake",
            "",
            {"reservation": made["id"]},
        )
        answer = await a.put("reservations", made["id"], "handshake", NONCE)
        assert answer.json["peer"] == START
    answer = await r.put("reservations", made["id"], "handshake", START)
    assert answer.json["peer"] == NONCE
    assert answer.json["grant"].count(".") == 2
    assert NONCE["nonce"] not in log.text


async def test_handshake_is_refused_to_others_and_after_the_end(broker, r):
    made = await r.reserve()
    other = await broker.cluster("other").put("reservations", made["id"], "handshake", START)
    assert other.refusal == (404, "NotFound")
    await r.delete("reservations", made["id"])
    late = await r.put("reservations", made["id"], "handshake", START)
    assert late.refusal == (409, "WrongPhase")
