"""A part of the agent that dies of what nobody expected: the whole agent ends, and says by what."""

import pytest
import structlog

import agents
from kubelend.communicators.middleware import Middleware
from kubelend.wire.objects import ProviderInstruction, ResourceRequest


class Unexpected(Exception):
    """No error of ours, so nobody waits for it to pass."""


class BrokenObjects:
    """Of one kind nothing can be seen."""

    def __init__(self, inner, kind):
        self._inner = inner
        self._kind = kind

    def __getattr__(self, name):
        return getattr(self._inner, name)

    async def watch(self, kind):
        if kind is self._kind:
            raise Unexpected(f"no {kind.plural}")
        async for event in self._inner.watch(kind):
            yield event


class BrokenCalls(Middleware):
    """One call is broken."""

    def __init__(self, inner, name):
        super().__init__(inner)
        self._name = name

    async def wrap_call(self, name, call):
        if name == self._name:
            raise Unexpected(f"no {name}")
        return await call()

    async def stream(self, on_reset):
        if self._name == "stream":
            raise Unexpected("no stream")
        async for instruction in self._inner.stream(on_reset):
            yield instruction


@pytest.mark.parametrize(
    "part, call, kind",
    [
        ("publisher", "publish", None),
        ("stream", "stream", None),
        ("requester", "", ResourceRequest),
        ("provider", "", ProviderInstruction),
        ("peering", "activate", None),
    ],
)
async def test_a_dead_part_ends_the_agent_with_its_reason(certificates, tmp_path, part, call, kind):
    async with agents.scene(certificates, tmp_path) as (broker, start, _):
        await start("lender", broker.port)
        agent = await start("a", broker.port, cluster=agents.NOTHING)
        await agent.kill()
        agent.wrap = lambda inner: BrokenCalls(inner, call)
        agent.spoil = lambda inner: BrokenObjects(inner, kind)
        await agent.create_request("w")
        with structlog.testing.capture_logs() as log:
            await agent.start()
            with pytest.raises(Unexpected) as reason:
                await agent.ends()
        assert str(reason.value) == f"no {kind.plural if kind else call}"
        told = [line for line in log if line["event"] == "Root task failed"]
        assert told[-1]["task"] == part
        await agent.kill()
