"""Alerts and dashboards ask for metrics that exist, with labels that they have."""

import json
import re

import pytest
import yaml

from charts import CHARTS, ROOT

METRIC = re.compile(r"\bkubelend_[a-z_]+")
SELECTED = re.compile(r"\b(kubelend_[a-z_]+)\{([^}]*)\}")
GROUPED = re.compile(r"by \(([^)]*)\) \([^k]*(kubelend_[a-z_]+)")
OF_HISTOGRAMS = re.compile(r"_(bucket|sum|count)$")
FROM_PROMETHEUS = {"namespace", "job", "instance", "pod", "le"}
"""Labels that series get while they are scraped, and those of buckets."""


@pytest.fixture(scope="module")
def documented():
    """The labels of each metric, from the page whose table is tested against the code."""
    found: dict[str, set[str]] = {}
    for line in (ROOT / "docs" / "metrics.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) < 5 or not cells[1].startswith("`kubelend_"):
            continue
        first, *others = re.findall(r"`(\w+)`", cells[1])
        stem = first.rpartition("_")[0]
        names = [first, *(stem + name if name.startswith("_") else name for name in others)]
        found |= {name: set(re.findall(r"`(\w+)`", cells[3])) for name in names}
    return found


def dashboard(name):
    return json.loads((CHARTS / f"kubelend-{name}" / "files" / "dashboard.json").read_text())


def panels(name):
    return [
        (panel["title"], target["expr"])
        for panel in dashboard(name)["panels"]
        for target in panel["targets"]
    ]


def alerts(name):
    document = yaml.safe_load((CHARTS / f"kubelend-{name}" / "files" / "alerts.yaml").read_text())
    return [rule for group in document["groups"] for rule in group["rules"]]


EXPRESSIONS = [
    pytest.param(expression, id=f"{name}-{title}")
    for name in ("broker", "agent")
    for title, expression in (
        *panels(name),
        *((rule["alert"], rule["expr"]) for rule in alerts(name)),
    )
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_metric_exists_and_has_every_label(documented, expression):
    names = {OF_HISTOGRAMS.sub("", name) for name in METRIC.findall(expression)}
    assert names
    assert names <= documented.keys()
    used = [
        *(
            (name, re.findall(r"(\w+)[=!]", chosen))
            for name, chosen in SELECTED.findall(expression)
        ),
        *((name, grouped.split(", ")) for grouped, name in GROUPED.findall(expression)),
    ]
    for name, labels in used:
        known = documented[OF_HISTOGRAMS.sub("", name)] | FROM_PROMETHEUS
        assert set(labels) <= known, name


@pytest.mark.parametrize("name", ["broker", "agent"])
def test_every_alert_says_what_to_do(name):
    runbook = (ROOT / "docs" / "runbook.md").read_text()
    for rule in alerts(name):
        assert rule.keys() == {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in {"critical", "warning"}
        assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}
        assert rule["annotations"]["runbook_url"] == f"docs/runbook.md#{rule['alert'].lower()}"
        assert f"\n### {rule['alert']}\n" in runbook


@pytest.mark.parametrize("name", ["broker", "agent"])
def test_panels_have_their_own_place(name):
    places = [panel["gridPos"] for panel in dashboard(name)["panels"]]
    cells = [
        (x, y)
        for place in places
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


def test_names_in_the_metrics_page_are_those_of_the_agent():
    """The broker's are tested where its table is made."""
    text = (ROOT / "src" / "kubelend" / "agent" / "metrics.py").read_text()
    for name in set(METRIC.findall("".join(expression for _, expression in panels("agent")))):
        stem = OF_HISTOGRAMS.sub("", name)
        assert f'"{stem}"' in text or f'("{stem.removeprefix("kubelend_agent_")}"' in text
