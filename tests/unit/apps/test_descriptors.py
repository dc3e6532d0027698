"""How many files a broker asks for, and how many connections it keeps with them."""

import resource

import pytest

from kubelend.apps import descriptors
from kubelend.apps.descriptors import MOST, RESERVE, UNLIMITED, Files

NO_LIMIT = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    "soft, hard, wanted",
    [
        pytest.param(1024, 524288, 524288, id="the usual"),
        pytest.param(20000, 20000, 20000, id="raised already"),
        pytest.param(1024, NO_LIMIT, UNLIMITED, id="no hard limit"),
        pytest.param(2 * UNLIMITED, NO_LIMIT, 2 * UNLIMITED, id="above what we would ask for"),
        pytest.param(NO_LIMIT, NO_LIMIT, NO_LIMIT, id="no limit at all"),
    ],
)
def test_soft_limit_goes_up_to_the_hard_one_and_never_down(soft, hard, wanted):
    assert Files(soft, hard).wanted == wanted


@pytest.mark.parametrize(
    "wanted, files, kept",
    [
        pytest.param(0, 1 << 20, MOST, id="plenty"),
        pytest.param(0, 10000, 10000 - RESERVE, id="by files"),
        pytest.param(0, 1024, 512, id="few files"),
        pytest.param(0, 1, 1, id="next to none"),
        pytest.param(100, 10000, 100, id="as asked"),
        pytest.param(50000, 100000, 50000, id="more than by default"),
        pytest.param(50000, 10000, 10000 - RESERVE, id="more than there are files for"),
        pytest.param(0, NO_LIMIT, MOST, id="no limit"),
        pytest.param(50000, NO_LIMIT, 50000, id="as asked without a limit"),
    ],
)
def test_connections_leave_files_for_all_else(wanted, files, kept):
    assert descriptors.connections(wanted, files) == kept


def test_limit_of_this_process_is_raised():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        assert descriptors.raise_limit() == descriptors.limits()
        assert descriptors.limits().soft == Files(512, hard).wanted
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
