"""The output of the demo: clusters as bars, finished steps above, and lines that fit 80 columns."""

import io

import msgspec
import pytest
from rich.console import Console

from kubelend.demo import screen, story
from kubelend.kits import tables
from kubelend.wire import bodies


def cluster(name="turin", *, active=True, allocated="6", reserved="4", gpu="2", reservations=1):
    amounts = bodies.Metrics(
        bodies.Quantities("24", "96Gi"),
        bodies.Quantities("24", "96Gi"),
        bodies.Quantities(allocated, "1Gi"),
        bodies.Quantities(reserved, "1Gi"),
        bodies.Quantities("14", "94Gi", gpu=gpu),
    )
    now = "2026-01-01T00:00:00Z"
    status = {"phase": "Active", "active": active, "score": "1", "rating": "Good"}
    times = {"lastUpdateTime": now, "validUntil": now, "reservations": reservations}
    return bodies.Cluster(
        bodies.Advertisement(name, amounts), msgspec.convert(status | times, bodies.ClusterStatus)
    )


def rendered(*clusters, width=80):
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=False).print(screen.cluster_table(clusters))
    return out.getvalue().splitlines()


def shown(*, terminal):
    """What is printed for one step and one command that is longer than a line."""
    out = io.StringIO()
    console = Console(
        file=out, width=80, force_terminal=terminal, color_system=None, highlight=False
    )
    with screen.open_display(console) as display:
        display.begin(3, "Something happens")
        display.show_clusters([cluster()])
        display.step(3, "Something happens", 0.0124, ["and this is seen"])
        display.show_commands("To try:", [LONG])
    return out.getvalue()


LONG = "kubelend get clusters --cert-path " + "x" * 100


def test_cluster_is_one_line_with_used_lent_and_free_resources():
    _, line = rendered(cluster())
    name, bar, cpu, gpu, lent, state = line.split()
    assert (name, cpu, gpu, lent, state) == ("turin", "14", "2", "1", "active")
    assert bar == "█" * 7 + "░" * 9
    assert rendered(cluster(active=False))[1].split()[-1] == "stale"


@pytest.mark.parametrize(
    "allocated, reserved, blocks",
    [("0", "0", 0), ("24", "0", 16), ("24", "24", 16), ("0", "1m", 1), ("12", "12", 16)],
)
def test_bar_is_never_longer_than_its_column(allocated, reserved, blocks):
    bar = rendered(cluster(allocated=allocated, reserved=reserved))[1].split()[1]
    assert len(bar) == 16
    assert bar.count("█") == blocks


def test_plain_output_has_a_title_of_80_columns_and_unwrapped_commands():
    assert shown(terminal=False).splitlines() == [
        *("", f"{' 3  Something happens':<75}12 ms", "    and this is seen"),
        *("", "To try:", "", LONG, ""),
    ]


def test_live_output_keeps_finished_steps_and_commands():
    text = shown(terminal=True)
    for part in ("12 ms", "    and this is seen", LONG, "turin"):
        assert part in text


def test_texts_fit_80_columns():
    assert max(map(len, rendered(cluster("a-cluster-with-a-longer-name")))) <= 80
    lines = screen.wrap_text("word " * 60)
    assert len(lines) > 1
    assert max(map(len, lines)) <= 76
    titles = [step.title for step in (*story.LIFECYCLE_STEPS, *story.FINAL_STEPS)]
    assert max(map(len, titles)) <= 66


@pytest.mark.parametrize(
    "seconds, text",
    [(0.00084, "0.8 ms"), (0.0124, "12 ms"), (0.812, "812 ms"), (1.24, "1.2 s")],
)
def test_durations_have_at_most_three_digits(seconds, text):
    assert tables.format_seconds(seconds) == text
