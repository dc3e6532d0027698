"""The broker's limit of open files, and the number of connections that it allows."""

import resource

import pytest

from kubelend.apps import broker
from kubelend.apps.broker import DEFAULT_MAX_CONNECTIONS, MAX_OPEN_FILES, RESERVED_FILES

NO_LIMIT = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    "soft, hard, target",
    [
        pytest.param(1024, 524288, 524288, id="the usual"),
        pytest.param(20000, 20000, 20000, id="raised already"),
        pytest.param(1024, NO_LIMIT, MAX_OPEN_FILES, id="no hard limit"),
        pytest.param(2 * MAX_OPEN_FILES, NO_LIMIT, 2 * MAX_OPEN_FILES, id="above the target"),
        pytest.param(NO_LIMIT, NO_LIMIT, NO_LIMIT, id="no limit at all"),
    ],
)
def test_soft_limit_is_raised_to_the_hard_one_and_never_lowered(soft, hard, target):
    assert broker.file_limit_target(soft, hard) == target


def test_limit_of_this_process_is_raised():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        broker.raise_file_limit()
        raised, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert raised == broker.file_limit_target(512, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    "wanted, files, connections",
    [
        pytest.param(0, 1 << 20, DEFAULT_MAX_CONNECTIONS, id="plenty"),
        pytest.param(0, 10000, 10000 - RESERVED_FILES, id="by files"),
        pytest.param(0, 1024, 512, id="few files"),
        pytest.param(0, 1, 1, id="next to none"),
        pytest.param(100, 10000, 100, id="as requested"),
        pytest.param(50000, 100000, 50000, id="more than by default"),
        pytest.param(50000, 10000, 10000 - RESERVED_FILES, id="more than there are files for"),
        pytest.param(0, NO_LIMIT, DEFAULT_MAX_CONNECTIONS, id="no limit"),
        pytest.param(50000, NO_LIMIT, 50000, id="as requested without a limit"),
    ],
)
def test_connections_leave_files_for_all_else(wanted, files, connections):
    assert broker.connection_limit(wanted, files) == connections
