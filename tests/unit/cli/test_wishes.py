"""Flags become the request that the broker reads."""

import inspect

import pytest

from kubelend.cli import wishes
from kubelend.core.errors import InvalidInput
from kubelend.wire import bodies


def read(**flags):
    return wishes.read(**flags)


def test_all_flags_together():
    request = read(
        cpu="4",
        memory="8Gi",
        gpu="1",
        storage="100Gi",
        resource=["example.com/fpga=2"],
        duration="2h",
        priority=7,
        wait="5m",
        policy="cost",
        weight=["price=2", "headroom=0.5"],
        label=["tier=gold", "empty="],
        region="eu",
        cluster="b",
        exclude=["c", "d"],
        max_price="0.5",
        currency="EUR",
    )
    assert request == bodies.ReservationRequest(
        bodies.Quantities("4", "8Gi", "1", "100Gi", {"example.com/fpga": "2"}),
        priority=7,
        duration="2h",
        wait="5m",
        policy="cost",
        weights={"price": 2.0, "headroom": 0.5},
        target_cluster_id="b",
        constraints=bodies.ConstraintsBody(
            {"tier": "gold", "empty": ""}, "eu", ["c", "d"], "0.5", "EUR"
        ),
    )


def test_what_is_not_said_is_not_sent():
    assert read(cpu="1", memory="1Gi") == bodies.ReservationRequest(bodies.Quantities("1", "1Gi"))


def test_no_amount_is_no_request():
    assert read(priority=3) is None


@pytest.mark.parametrize(
    "flags,problem",
    [
        ({"cpu": "1"}, "--cpu and --memory are needed both"),
        ({"gpu": "1"}, "--cpu and --memory are needed both"),
        ({"label": ["gold"]}, "--label: 'gold' has no name and value; write NAME=VALUE"),
        ({"resource": ["=2"]}, "--resource: '=2' has no name and value"),
        ({"weight": ["price=much"]}, "--weight: could not convert string to float: 'much'"),
    ],
)
def test_what_makes_no_request_is_told_by_flag(flags, problem):
    amounts = {} if "cpu" in flags or "gpu" in flags else {"cpu": "1", "memory": "1Gi"}
    with pytest.raises(InvalidInput) as raised:
        read(**amounts, **flags)
    assert problem in str(raised.value)


def test_every_field_of_a_request_has_a_flag():
    flags = set(inspect.signature(wishes.read).parameters)
    fields = {*bodies.Quantities.__struct_fields__, *bodies.ReservationRequest.__struct_fields__}
    renamed = {"extended", "requested_resources", "weights", "target_cluster_id", "constraints"}
    assert fields - renamed <= flags
    assert {"resource", "weight", "cluster", "label", "region", "exclude", "max_price"} <= flags
