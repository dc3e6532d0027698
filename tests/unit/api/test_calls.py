"""What the handlers share: here, the pages of long lists."""

import pytest

from kubelend.api.request import paginate


@pytest.mark.parametrize(
    "found, page",
    [
        pytest.param([], ([], ""), id="nothing"),
        pytest.param([1, 2], ([1, 2], ""), id="fewer than a page"),
        pytest.param([1, 2, 3], ([1, 2, 3], ""), id="a page and no more"),
        pytest.param([1, 2, 3, 4], ([1, 2, 3], "3"), id="more: after the last that is shown"),
    ],
)
def test_page_says_where_the_next_begins_if_there_is_one(found, page):
    assert paginate(found, 3, str) == page
