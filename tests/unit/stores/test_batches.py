"""How long the archive keeps what it has."""

from datetime import UTC, datetime, timedelta

import pytest

import make
from kubelend.stores import batch

EARLY = datetime(1, 1, 2, tzinfo=UTC)


@pytest.mark.parametrize(
    "finishes, archive_for, kept_from",
    [
        pytest.param([make.T0], make.HOUR, make.T0 - make.HOUR, id="one"),
        pytest.param([make.T0 + make.HOUR, make.T0], make.HOUR, make.T0, id="the newest counts"),
        pytest.param([make.T0], timedelta(), make.T0, id="no longer than needed"),
        pytest.param([make.T0], timedelta.max, batch.MIN_TIME, id="for ever"),
        pytest.param([EARLY], timedelta(days=2), batch.MIN_TIME, id="before all time"),
    ],
)
def test_archive_is_kept_from_the_newest_finish_back(finishes, archive_for, kept_from):
    assert batch.compute_retention_limit(finishes, archive_for) == kept_from
