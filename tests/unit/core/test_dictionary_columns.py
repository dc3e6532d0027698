"""Values that many rows share: each row has its own, and numbers do not run out."""

from hypothesis import given
from hypothesis import strategies as st

from kubelend.core.columns import DictionaryColumn


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from([None, "a", "b", "c", "d"]))))
def test_each_row_has_the_value_it_was_given_last(steps):
    coded: DictionaryColumn[str] = DictionaryColumn(5)
    plain: list[str | None] = [None] * 5
    for row, value in steps:
        assert coded.set(row, value) == (plain[row] != value)
        plain[row] = value
    assert [coded.value(row) for row in range(5)] == plain
    assert set(coded.values()) == set(plain) - {None}
    assert len(coded) == len(set(plain) - {None})
    mask = coded.mask_where(lambda value: value in "ab", 5)
    assert mask.tolist() == [value in {None, "a", "b"} for value in plain]


def test_numbers_of_values_that_are_gone_are_used_again():
    coded: DictionaryColumn[int] = DictionaryColumn(2)
    for value in range(1000):
        coded.set(value % 2, value)
    assert coded.codes.max() <= 3
    assert coded.values() == [998, 999]
