"""The spec of a ResourceRequest on a real API server: amounts as integers, and what cannot be changed."""

from typing import Any

import msgspec
import pytest

import kube_objects
import object_samples
from kubelend.core.errors import InvalidInput
from kubelend.kube import resources
from kubelend.wire.objects import ResourceRequest, ResourceRequestSpec

HEAD = {"apiVersion": "rear.fluidos.eu/v1alpha1", "kind": "ResourceRequest"}


@pytest.fixture
def apply(kube, namespace):
    """Creates or replaces the request; returns its spec."""
    resource = resources.resource_for(ResourceRequest)
    made: list[dict[str, Any]] = []

    def apply(**spec):
        document = made[-1] if made else {"metadata": {"name": "sample"}, **HEAD}
        document |= {"spec": {"requestedCPU": "1", "requestedMemory": "1Gi"} | spec}
        method, name = ("PUT", "sample") if made else ("POST", "")
        made.append(kube_objects.send(kube, method, resource.path(namespace, name), document))
        return made[-1]["spec"]

    return apply


def test_amounts_are_strings_or_integers_in_all_kinds(kube, namespace, apply):
    amounts = {
        "requestedCPU": 2,
        "requestedMemory": 2**30,
        "requestedGPU": 1,
        "requestedStorage": 10**9,
        "extendedResources": {"example.com/fpga": 3},
    }
    assert apply(**amounts) == amounts
    table = kube.kubectl("get", "resourcerequest/sample", f"--namespace={namespace}")
    assert table.splitlines()[1].split()[:3] == ["sample", "2", str(2**30)]
    for sample in (object_samples.RESERVATION_INSTRUCTION, object_samples.PROVIDER_INSTRUCTION):
        resource = resources.resource_for(type(sample))
        document = {
            "apiVersion": resource.api_version,
            "kind": resource.kind,
            "metadata": {"name": "sample"},
            "spec": msgspec.to_builtins(sample.spec) | amounts,
        }
        kube.call("POST", resource.path(namespace), msgspec.json.encode(document))


@pytest.mark.parametrize("value", [0, -1, 0.5, True, "many"])
def test_amount_that_is_none_is_rejected(apply, value):
    with pytest.raises(InvalidInput, match="requestedCPU"):
        apply(requestedCPU=value)


CHANGES = {
    "requestedCPU": "2",
    "requestedMemory": "2Gi",
    "requestedGPU": "1",
    "requestedStorage": 5,
    "extendedResources": {"example.com/fpga": 3},
    "priority": 7,
    "duration": "2h",
    "wait": "5m",
    "policy": "cost",
    "weights": {"price": 1},
    "targetClusterID": "bonn",
    "constraints": {"region": "eu", "labels": {"a": "b"}, "exclude": ["rome"]},
    "failover": False,
    "namespaces": ["batch"],
}


def test_every_field_but_renew_is_in_the_table():
    fields = {one.encode_name for one in msgspec.structs.fields(ResourceRequestSpec)}
    assert fields - set(CHANGES) == {"renew"}


@pytest.mark.parametrize("field, value", CHANGES.items(), ids=CHANGES)
def test_field_that_was_sent_to_the_broker_cannot_be_changed(rules, apply, field, value):
    apply()
    with pytest.raises(InvalidInput) as refused:
        apply(**{field: value})
    assert f"{field} cannot be changed: delete the object and create it again" in str(refused.value)


def test_field_cannot_be_removed(rules, apply):
    apply(wait="5m")
    with pytest.raises(InvalidInput, match="wait cannot be changed"):
        apply()


def test_renew_can_be_changed(apply):
    apply(**CHANGES)
    for renew in (True, False):
        assert apply(**CHANGES, renew=renew)["renew"] is renew
