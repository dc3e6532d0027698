"""The spec of a ResourceRequest on a real API server: amounts as integers, and what cannot be changed."""

import json

import msgspec
import pytest
import yaml

import object_samples
from kubelend.core.errors import UnexpectedResponse
from kubelend.kube import resources
from kubelend.wire.objects import ResourceRequestSpec

KIND = "resourcerequest/sample"


@pytest.fixture
def apply(kube, namespace, tmp_path):
    def apply(**spec):
        path = tmp_path / "request.yaml"
        document = {
            "apiVersion": "rear.fluidos.eu/v1alpha1",
            "kind": "ResourceRequest",
            "metadata": {"name": "sample", "namespace": namespace},
            "spec": {"requestedCPU": "1", "requestedMemory": "1Gi"} | spec,
        }
        path.write_text(yaml.safe_dump(document))
        return kube.kubectl("apply", f"--filename={path}")

    return apply


@pytest.fixture
def spec(kube, namespace):
    def spec():
        return json.loads(kube.kubectl("get", KIND, f"--namespace={namespace}", "-ojson"))["spec"]

    return spec


def test_amounts_are_strings_or_integers_in_all_kinds(kube, namespace, apply, spec):
    amounts = {
        "requestedCPU": 2,
        "requestedMemory": 2**30,
        "requestedGPU": 1,
        "requestedStorage": 10**9,
        "extendedResources": {"example.com/fpga": 3},
    }
    apply(**amounts)
    assert spec() == amounts
    table = kube.kubectl("get", KIND, f"--namespace={namespace}")
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
    with pytest.raises(UnexpectedResponse, match="requestedCPU"):
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
def test_field_that_was_sent_to_the_broker_cannot_be_changed(rules, apply, spec, field, value):
    apply()
    before = spec()
    with pytest.raises(UnexpectedResponse) as refused:
        apply(**{field: value})
    assert f"{field} cannot be changed: delete the object and create it again" in str(refused.value)
    assert spec() == before


def test_field_cannot_be_removed(rules, apply):
    apply(wait="5m")
    with pytest.raises(UnexpectedResponse, match="wait cannot be changed"):
        apply()


def test_renew_can_be_changed(apply, spec):
    apply(**CHANGES)
    for renew in (True, False):
        apply(**CHANGES, renew=renew)
        assert spec()["renew"] is renew
