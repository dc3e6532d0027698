"""A corrupt head record is reported as such; it neither is a store nor ends the broker."""

import msgspec
import pytest
from msgspec.structs import replace

import broker_samples as samples
import scripted_api
from kubelend.controllers.reconciler import RecordVerifier
from kubelend.core.errors import StoreFailed
from kubelend.kube.client import Client
from kubelend.stores.kubernetes import head as kubernetes_head
from kubelend.stores.kubernetes.head import HeadState


async def test_object_cannot_be_judged_by_a_damaged_head(certificates):
    whole = kubernetes_head.head_object(HeadState(epoch=1, key="k"), "hub", "7")
    head = replace(whole, record=replace(whole.record, checksum="corrupt"))
    async with scripted_api.running(certificates.server()) as server:
        server.answers.append(scripted_api.found(msgspec.to_builtins(head)))
        async with Client.open(server.access()) as client:
            found = samples.written(samples.record())
            with pytest.raises(StoreFailed, match=r"namespace hub of https.* is damaged"):
                await RecordVerifier(client, "hub").verified(found)
