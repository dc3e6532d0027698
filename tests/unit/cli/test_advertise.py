"""The flags of `kubelend dev advertise`, and the file, make the body that an agent would send."""

import msgspec
import pytest

from kubelend.cli import advertise
from kubelend.core.errors import InvalidInput


def body(**flags):
    return msgspec.to_builtins(advertise.advertisement_from_flags(**flags))


def test_flags_make_a_body():
    assert body(
        cpu="16",
        memory="64Gi",
        resource=["example.com/fpga=2"],
        allocated_cpu="5",
        label=["tier=gold"],
        region="eu",
        cpu_cost="0.05",
        currency="EUR",
        valid_for="1m",
    ) == {
        "clusterID": "",
        "resources": {
            "capacity": {"cpu": "16", "memory": "64Gi", "extended": {"example.com/fpga": "2"}},
            "allocated": {"cpu": "5", "memory": "0"},
        },
        "cost": {"cpuCost": "0.05", "currency": "EUR"},
        "labels": {"tier": "gold"},
        "region": "eu",
        "validFor": "1m",
    }


def test_no_price_is_none():
    assert "cost" not in body(cpu="1", memory="1Gi")


@pytest.mark.parametrize(
    "text",
    [
        "resources: {capacity: {cpu: 16, memory: 64Gi}}\nregion: eu\n",
        '{"resources": {"capacity": {"cpu": 16, "memory": "64Gi"}}, "region": "eu"}',
    ],
    ids=["yaml", "json"],
)
def test_file_holds_the_whole_body(tmp_path, text):
    path = tmp_path / "offer"
    path.write_text(text)
    assert body(file=str(path)) == {
        "clusterID": "",
        "resources": {"capacity": {"cpu": 16, "memory": "64Gi"}},
        "region": "eu",
    }


@pytest.mark.parametrize(
    "text, why",
    [
        (None, "cannot be read: No such file"),
        ("[1, 2]", "is no advertisement: Expected `object`"),
        ("region: eu", "missing required field `resources`"),
        ("a: [", "is no advertisement"),
    ],
    ids=["missing", "list", "incomplete", "broken"],
)
def test_what_is_no_body_is_told(tmp_path, text, why):
    path = tmp_path / "offer"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InvalidInput, match=why):
        advertise.advertisement_from_flags(file=str(path))


def test_cpu_and_memory_are_needed():
    with pytest.raises(InvalidInput, match="--cpu and --memory are required"):
        advertise.advertisement_from_flags(cpu="1")
