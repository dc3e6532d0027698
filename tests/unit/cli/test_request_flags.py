"""Flags become the request that the broker reads."""

import inspect

import pytest

from kubelend.cli import request_flags
from kubelend.core.errors import InvalidInput
from kubelend.wire import bodies


def read(**flags):
    return request_flags.request_from_flags(**flags)


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
        weights={"price": 2.0, "headroom": 0.5},
        target_cluster_id="b",
        constraints=bodies.Constraints(
            {"tier": "gold", "empty": ""}, "eu", ["c", "d"], "0.5", "EUR"
        ),
    )


def test_what_is_not_said_is_not_sent():
    assert read(cpu="1", memory="1Gi") == bodies.ReservationRequest(bodies.Quantities("1", "1Gi"))


def test_a_policy_goes_in_place_of_weights():
    request = read(cpu="1", memory="1Gi", policy="cost")
    assert request == bodies.ReservationRequest(bodies.Quantities("1", "1Gi"), policy="cost")


def test_nothing_said_is_no_request():
    assert read() is None
    with pytest.raises(
        InvalidInput, match="no resources are requested; give at least --cpu and --memory"
    ):
        request_flags.require_resources(None)


@pytest.mark.parametrize(
    "flags,problem",
    [
        ({"cpu": "1"}, "--cpu and --memory are both required"),
        ({"gpu": "1"}, "--cpu and --memory are both required"),
        ({"label": ["gold"]}, "--label: 'gold' has no name and value; write NAME=VALUE"),
        ({"resource": ["=2"]}, "--resource: '=2' has no name and value"),
        ({"priority": 3}, "--cpu and --memory are both required"),
        ({"weight": ["price=much"]}, "--weight price: 'much' is no number; write for example"),
        ({"weight": ["headroom=nan"]}, "--weight headroom: 'nan' is no number"),
        ({"weight": ["headroom=-inf"]}, "--weight headroom: '-inf' is no number"),
        ({"weight": ["price="]}, "--weight price: '' is no number"),
        (
            {"policy": "cost", "weight": ["price=1"]},
            "--policy and --weight exclude each other; give one of them",
        ),
    ],
)
def test_what_makes_no_request_is_told_by_flag(flags, problem):
    amounts = {} if set(flags) & {"cpu", "gpu", "priority"} else {"cpu": "1", "memory": "1Gi"}
    with pytest.raises(InvalidInput) as raised:
        request_flags.require_resources(read(**amounts, **flags))
    assert problem in str(raised.value)


def test_every_field_of_a_request_has_a_flag():
    flags = set(inspect.signature(request_flags.request_from_flags).parameters)
    fields = {*bodies.Quantities.__struct_fields__, *bodies.ReservationRequest.__struct_fields__}
    renamed = {"extended", "requested_resources", "weights", "target_cluster_id", "constraints"}
    assert fields - renamed <= flags
    assert {"resource", "weight", "cluster", "label", "region", "exclude", "max_price"} <= flags
