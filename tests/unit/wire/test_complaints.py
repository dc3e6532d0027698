"""What msgspec finds wrong is said in the words of whoever wrote it."""

from typing import Annotated

import msgspec
import pytest

from kubelend.wire import validation


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    cpu: str
    most: Annotated[int, msgspec.Meta(le=9)] = 0
    least: Annotated[float, msgspec.Meta(ge=0.5)] = 1
    name: Annotated[str, msgspec.Meta(min_length=2, max_length=3)] = "ab"
    some: Annotated[list[str], msgspec.Meta(max_length=1)] = []
    pairs: Annotated[dict[str, int], msgspec.Meta(max_length=1)] = {}


class Outer(msgspec.Struct):
    spec: Inner


@pytest.mark.parametrize(
    "value, said",
    [
        ({"spec": {}}, "spec.cpu: is required"),
        ({}, "spec: is required"),
        ([], "expected object, got array"),
        ({"spec": {"cpu": "1", "gpu": 1}}, "spec.gpu: unknown field"),
        ({"spec": {"cpu": 1}}, "spec.cpu: must be a string: put it in quotes"),
        ({"spec": {"cpu": "1", "most": 10}}, "spec.most: must be at most 9"),
        ({"spec": {"cpu": "1", "least": 0.1}}, "spec.least: must be at least 0.5"),
        ({"spec": {"cpu": "1", "name": "a"}}, "spec.name: must have at least 2 characters"),
        ({"spec": {"cpu": "1", "name": "abcd"}}, "spec.name: must have at most 3 characters"),
        ({"spec": {"cpu": "1", "some": ["a", "b"]}}, "spec.some: must have at most 1 entries"),
        (
            {"spec": {"cpu": "1", "pairs": {"a": 1, "b": 2}}},
            "spec.pairs: must have at most 1 entries",
        ),
        ({"spec": {"cpu": "1", "pairs": {"a": "x"}}}, "spec.pairs[...]: expected int, got str"),
    ],
)
def test_the_field_is_named_and_what_is_wrong_with_it(value, said):
    with pytest.raises(msgspec.ValidationError) as refused:
        msgspec.convert(value, Outer)
    assert validation.readable_validation_error(refused.value) == said
