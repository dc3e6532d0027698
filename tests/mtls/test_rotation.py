"""Certificates that live for seconds rotate under load, and no request fails.

`make rotation` proves the same for minutes.
"""

from datetime import timedelta

import pytest

from proofs import rotation


@pytest.mark.timeout(120)
async def test_certificates_of_ten_seconds_rotate_without_a_failed_request(tmp_path):
    plan = rotation.Plan(
        lifetime=timedelta(seconds=10), duration=timedelta(seconds=18), clusters=3, workers=3
    )
    report = await rotation.prove(plan, tmp_path)
    assert report.failures == []
    assert len(report.renewals) == 4
    assert min(report.renewals.values()) >= 2
    assert report.calls > 500
    assert report.events > 100
