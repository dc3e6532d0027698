"""Text in columns."""

from kubelend.kits import columns


def test_columns_are_as_wide_as_their_widest_cell():
    assert columns.align_columns(("A", "LONG"), [("first", "x"), ("b", "y")]) == [
        "A      LONG",
        "first  x",
        "b      y",
    ]


def test_numbers_are_aligned_to_the_right_where_asked():
    assert columns.align_columns(("N", "WHAT"), [("7", "a"), ("1,234", "b")], right=[0]) == [
        "    N  WHAT",
        "    7  a",
        "1,234  b",
    ]


def test_headers_alone_make_one_line():
    assert columns.align_columns(("A", "B"), []) == ["A  B"]
