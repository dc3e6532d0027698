"""Commands of a caller without settings of their own."""

import os
import shlex

import pytest

from kubelend.cli import main


@pytest.fixture(autouse=True)
def no_settings(monkeypatch, tmp_path):
    """No variable, configuration file or kubeconfig of the machine is used."""
    for name in list(os.environ):
        if name.startswith("KUBELEND_") and name != "KUBELEND_PATIENCE":
            monkeypatch.delenv(name)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("KUBELEND_CONFIG", str(tmp_path / "config.yaml"))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "no-kubeconfig"))


@pytest.fixture
def kubelend(capsys):
    """Runs a command line, as one text or as words; returns exit code, output and errors."""

    def run(*words, program="kubelend"):
        capsys.readouterr()
        code = main.run(shlex.split(words[0]) if len(words) == 1 else list(words), program)
        out, err = capsys.readouterr()
        return code, out, err

    return run
