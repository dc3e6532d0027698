"""Merge patches: applied to the one object they give the other, and nothing is in them that need not be."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubelend.kube import resources


@pytest.mark.parametrize(
    "before, after, change",
    [
        pytest.param({"a": 1}, {"a": 1}, {}, id="equal"),
        pytest.param({}, {"a": 1}, {"a": 1}, id="new"),
        pytest.param({"a": 1, "b": 2}, {"b": 2}, {"a": None}, id="gone"),
        pytest.param({"a": {"b": 1, "c": 2}}, {"a": {"b": 1}}, {"a": {"c": None}}, id="inside"),
        pytest.param({"a": [1, 2]}, {"a": [2]}, {"a": [2]}, id="list"),
        pytest.param({"a": {"b": 1}}, {"a": "text"}, {"a": "text"}, id="other type"),
        pytest.param({"a": 1}, {"a": {}}, {"a": {}}, id="empty object"),
    ],
)
def test_change_is_what_differs(before, after, change):
    assert resources.merge_patch(before, after) == change


values = st.recursive(
    st.integers() | st.text() | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner),
    max_leaves=8,
)
objects = st.dictionaries(st.sampled_from("abcd"), values)


@given(objects, objects)
def test_patched_object_is_the_other(before, after):
    assert applied(before, resources.merge_patch(before, after)) == after


def applied(target, change):
    """RFC 7386, section 2."""
    if not isinstance(change, dict):
        return change
    found = dict(target) if isinstance(target, dict) else {}
    for name, value in change.items():
        if value is None:
            found.pop(name, None)
        else:
            found[name] = applied(found.get(name), value)
    return found
