"""Our charts and what is rendered of them, as an operator has them.

manifests = charts.render(helm, "broker", {"replicas": 3, ...})
[deployment] = charts.of_kind(manifests, "Deployment")
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
CHARTS = DEPLOY / "charts"
KUSTOMIZE = DEPLOY / "kustomize"
NAMES = ("broker", "agent")

Json = dict[str, Any]


class Refused(Exception):
    """What helm said."""


def find_helm() -> Path | None:
    """The one that `make helm` made, or any other; None if there is none."""
    done = subprocess.run(
        [ROOT / "hack" / "get-helm", "--find"], check=False, capture_output=True, text=True
    )
    return Path(done.stdout.strip()) if done.returncode == 0 else None


def template(helm: Path, name: str, values: Json, *flags: str, release: str = "") -> str:
    """The chart's manifests as text; `Refused` if the values are."""
    chart = f"kubelend-{name}"
    place: list[str | Path] = [release or chart, CHARTS / chart, "--values=-"]
    return run(helm, "template", *place, *flags, given=yaml.safe_dump(values))


def run(helm: Path, *arguments: str | Path, given: str = "") -> str:
    """One command; without the plugins and repositories of whoever runs the tests."""
    settings = ("HELM_PLUGINS", "HELM_REPOSITORY_CONFIG", "HELM_REGISTRY_CONFIG")
    nowhere = dict.fromkeys(settings, os.devnull)
    done = subprocess.run(
        [helm, *arguments],
        check=False,
        capture_output=True,
        text=True,
        input=given,
        env={**os.environ, **nowhere},
    )
    if done.returncode:
        raise Refused(done.stderr)
    return done.stdout


def render(helm: Path, name: str, values: Json, *flags: str) -> list[Json]:
    return load(template(helm, name, values, *flags))


def load(text: str) -> list[Json]:
    """Every object of a file, by libyaml, which is ten times as fast."""
    return [found for found in yaml.load_all(text, yaml.CSafeLoader) if found]


def rendered(name: str, directory: str = "base") -> list[Json]:
    """What is in the tree, for kustomize."""
    return load((KUSTOMIZE / name / directory / "manifests.yaml").read_text())


def of_kind(manifests: Iterable[Json], *kinds: str) -> list[Json]:
    return [found for found in manifests if found["kind"] in kinds]


def container(manifests: Iterable[Json]) -> Json:
    """The one of the one Deployment."""
    [deployment] = of_kind(manifests, "Deployment")
    [found] = deployment["spec"]["template"]["spec"]["containers"]
    chosen: Json = found
    return chosen
