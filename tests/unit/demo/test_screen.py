"""The demo's screen: the clusters as bars, finished steps above, and nothing wider than the terminal."""

import io

import msgspec
import pytest
from rich.console import Console

from kubelend.demo import screen
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


def test_a_cluster_is_one_line_with_what_is_used_lent_and_free():
    _, line = rendered(cluster())
    name, bar, cpu, gpu, lent, state = line.split()
    assert (name, cpu, gpu, lent, state) == ("turin", "14", "2", "1", "active")
    assert bar == "█" * 7 + "░" * 9


def test_a_silent_cluster_shows():
    assert rendered(cluster(active=False))[1].split()[-1] == "stale"


@pytest.mark.parametrize(
    "allocated, reserved, blocks",
    [("0", "0", 0), ("24", "0", 16), ("24", "24", 16), ("0", "1m", 1), ("12", "12", 16)],
)
def test_the_bar_is_never_longer_than_its_place(allocated, reserved, blocks):
    bar = rendered(cluster(allocated=allocated, reserved=reserved))[1].split()[1]
    assert len(bar) == 16
    assert bar.count("█") == blocks


def test_the_table_fits_80_columns():
    assert max(map(len, rendered(cluster("a-cluster-with-a-longer-name")))) <= 80


def test_without_clusters_there_is_no_table():
    assert screen.cluster_table(()) is None


def test_finished_steps_and_advice_are_printed_to_stay():
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=True, color_system=None)
    long = "kubelend get clusters --cert-path " + "x" * 100
    with screen.open_live_display(console) as display:
        display.begin(2, "Something happens")
        display.show_clusters([cluster()])
        display.step(2, "Something happened", 0.0124, ["and this is seen"])
        display.show_commands("To try:", [long])
    shown = out.getvalue()
    assert "✓  2  Something happened" in shown
    assert "12 ms" in shown
    assert "and this is seen" in shown
    assert long in shown
