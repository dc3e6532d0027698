"""Text in columns."""

from kubelend.kits import tables


def test_columns_are_as_wide_as_their_widest_cell():
    assert tables.align_columns(("A", "LONG"), [("first", "x"), ("b", "y")]) == [
        "A      LONG",
        "first  x",
        "b      y",
    ]


def test_numbers_are_aligned_to_the_right_where_asked():
    assert tables.align_columns(("N", "WHAT"), [("7", "a"), ("1,234", "b")], right=[0]) == [
        "    N  WHAT",
        "    7  a",
        "1,234  b",
    ]


def test_headers_alone_make_one_line():
    assert tables.align_columns(("A", "B"), []) == ["A  B"]
