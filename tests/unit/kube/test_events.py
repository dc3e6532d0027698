"""Events are written in the background, after what they tell of."""

import asyncio
from typing import Any

import make
from kubelend.kube.events import DELAY_SECONDS, EventRecorder
from kubelend.wire.events import EventRecord
from kubelend.wire.objects import Metadata, ResourceRequest, ResourceRequestSpec
from virtual_time import in_virtual_time, now, stopped


class Client:
    """Takes what is written, and when."""

    def __init__(self):
        self.written = []

    async def raw(self, method, path, body):
        self.written.append((now() - make.T0, method, path, body["reason"], body["lastTimestamp"]))


@in_virtual_time
async def test_event_is_written_a_while_later_with_the_time_at_which_it_happened():
    client: Any = Client()
    about = ResourceRequest(Metadata("r", "team"), ResourceRequestSpec("1", "1"))
    recorder = EventRecorder(client, now, "agent")
    running = asyncio.create_task(recorder.run())
    for reason in ("Requested", "Reserved"):
        recorder.emit(EventRecord("Normal", reason, "text", about))
        await asyncio.sleep(DELAY_SECONDS / 4)
    assert client.written == []
    await asyncio.sleep(DELAY_SECONDS)
    seconds = [int(one[0].total_seconds() * 10) for one in client.written]
    assert seconds == [10, 12]
    assert {one[1:3] for one in client.written} == {("POST", "/api/v1/namespaces/team/events")}
    assert [one[3] for one in client.written] == ["Requested", "Reserved"]
    assert {one[4] for one in client.written} == {f"{make.T0:%Y-%m-%dT%H:%M:%SZ}"}
    await stopped(running)
