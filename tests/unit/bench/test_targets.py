"""The table of `kubelend dev bench all`: measured figures beside their targets."""

import math
from typing import Any

import pytest

from kubelend.bench import cli

OTHER_FIGURES = {
    "path": "by proxy",
    "events_per_s": 50.2,
    "reservations": 1_032,
    "history": 10_000,
    "worst": "explain",
}


def at_limits(bench):
    """Figures of a full-size run in which each target is just met."""
    figures: dict[str, Any] = {**OTHER_FIGURES, **cli.FULL_SIZE[bench]}
    for target in cli.TARGETS:
        if target.bench == bench:
            limits = (target.at_most, target.at_least, 99.9)
            figures[target.key] = next(limit for limit in limits if limit is not None)
    return figures


GOOD = {bench: at_limits(bench) for bench in cli.FULL_SIZE}


def with_figure(bench, **figures):
    return {**GOOD, bench: {**GOOD[bench], **figures}}


def verdicts(bench, **figures):
    changed = with_figure(bench, **figures)[bench]
    return {target.key: target.verdict(changed) for target in cli.TARGETS if target.bench == bench}


@pytest.mark.parametrize(
    "bench, key, limit, beyond",
    [
        ("decide", "us_per_decision", 100, 100.1),
        ("decide", "us_per_decision", 100, math.nan),
        ("reserve", "ratio", 0.5, 0.499),
        ("reserve", "violations", 0, 1),
        ("advertise", "cpu_percent", 15, 15.1),
        ("advertise", "rss_mb", 200, 200.1),
        ("overload", "p99_ms", 50, 50.1),
        ("restart", "seconds", 3, 3.01),
        ("agent", "rss_mb", 50, 50.1),
        ("agent", "peering_rss_mb", 50, 50.1),
        ("deliver", "p50_ms", 50, 50.1),
        ("deliver", "p99_ms", 250, 250.1),
        ("agents", "missed", 0, 1),
        ("kube", "writes_per_reservation", 3, 3.001),
        ("kube", "idle_writes_per_minute", 0, 3.0),
        ("kube", "violations", 0, 1),
        ("peering", "first_ratio", 1.2, 1.21),
        ("peering", "next_ratio", 1.2, 1.21),
    ],
)
def test_limit_itself_is_met_and_anything_beyond_is_missed(bench, key, limit, beyond):
    assert cli.missed_targets(with_figure(bench, **{key: limit})) == []
    missed = cli.missed_targets(with_figure(bench, **{key: beyond}))
    assert [(target.bench, target.key) for target in missed] == [(bench, key)]


@pytest.mark.parametrize(
    "bench, size",
    [
        ("decide", {"clusters": 100_000, "us_per_decision": 900.0}),
        ("reserve", {"connections": 2, "ratio": 0.1}),
        ("advertise", {"interval": 1.0, "cpu_percent": 80.0}),
        ("restart", {"reservations": 1_000_000, "seconds": 20.0}),
        ("agent", {"pods": 30_000, "rss_mb": 90.0}),
        ("deliver", {"count": 20, "p50_ms": 80.0, "p99_ms": 900.0}),
        ("agents", {"count": 10_000, "missed": 3}),
        ("kube", {"connections": 1, "writes_per_reservation": 5.0}),
        ("peering", {"reservations": 2, "first_ratio": 2.0, "next_ratio": 2.0}),
    ],
)
def test_run_of_another_size_has_no_verdict_nor_has_a_figure_without_limit(bench, size):
    assert set(verdicts(bench, **size).values()) == {""}
    without = [target.key for target in cli.TARGETS if target.bench == bench and not target.limit]
    assert {verdicts(bench)[key] for key in without} <= {""}


def test_table_has_a_row_for_each_target_with_figure_limit_and_verdict():
    first, *lines = cli.targets_table(with_figure("reserve", ratio=0.25)).splitlines()
    assert first.split() == ["BENCH", "WHAT", "MEASURED", "TARGET"]
    assert lines[0].split() == [
        *("decide", "us", "per", "decision,", "10,000", "clusters"),
        *("100", "<=", "100", "ok"),
    ]
    (ratio,) = (line for line in lines if line.startswith("reserve") and "ratio" in line)
    assert ratio.split()[-4:] == ["0.25", ">=", "0.50", "missed"]
    assert len(lines) == len(cli.TARGETS)
    assert max(map(len, cli.targets_table(GOOD).splitlines())) <= 80


def test_what_did_not_run_has_no_row_and_no_verdict():
    figures = {name: one for name, one in GOOD["agent"].items() if "peering" not in name}
    assert "peering" not in cli.targets_table({"agent": figures})
    assert cli.missed_targets({"agent": figures}) == []
    _, row = cli.targets_table({"restart": GOOD["restart"]}).splitlines()
    assert row.startswith("restart ")


@pytest.mark.parametrize(
    "value, text",
    [
        (12345.6, "12,346"),
        (123.4, "123"),
        (12.34, "12.3"),
        (0.514, "0.51"),
        (3.0, "3"),
        (0, "0"),
        (100_000, "100,000"),
        (math.nan, "nan"),
    ],
)
def test_numbers_have_three_significant_digits(value, text):
    assert cli.format_number(value) == text
