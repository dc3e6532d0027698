"""The benchmark on Kubernetes where there is none: one line says so, and how to get it."""

import pytest

from kubelend.bench import kube
from kubelend.core.errors import InvalidSettings
from kubelend.envtest import assets


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv(assets.ASSETS_VARIABLE, str(tmp_path))
    return tmp_path


def test_what_is_lacking_is_told_in_one_line_with_the_remedy(directory):
    (line,) = kube.missing_programs().splitlines()
    assert "kube-apiserver" in line
    assert "make kube-assets" in line


def test_it_is_an_error_to_ask_for_it_all_the_same(directory):
    with pytest.raises(InvalidSettings, match="make kube-assets"):
        kube.measure_kube(kube.KubeSize())


def test_nothing_is_lacking_where_the_programs_are(directory):
    for program in assets.PROGRAMS:
        (directory / program).touch(mode=0o755)
    assert kube.missing_programs() == ""
