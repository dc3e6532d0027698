"""Commands in this process, against a broker that the module has started."""

import shlex

import pytest

from kubelend.cli import main


@pytest.fixture
def run_command(monkeypatch, capsys, tmp_path):
    """Runs a command line at a broker with a certificate; gives exit code, output and errors."""

    def run(line, url, directory, **variables):
        own = {"KUBELEND_CONFIG": str(tmp_path / "config.yaml"), "KUBELEND_BROKER_URL": url}
        with monkeypatch.context() as patch:
            for name, value in (own | {"KUBELEND_CERT_PATH": str(directory)} | variables).items():
                patch.setenv(name, value)
            capsys.readouterr()
            code = main.run(shlex.split(line))
        out, err = capsys.readouterr()
        return code, out.strip(), err.strip()

    return run
