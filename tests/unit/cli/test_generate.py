"""The generated documents know every command, flag, route and exit code, and are up to date."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kubelend.apps import flags
from kubelend.apps.settings import BrokerSettings, ClientSettings
from kubelend.cli import generate, tree
from kubelend.cli.exits import Code
from kubelend.wire import routes

DOCS = Path(__file__).parents[3] / "docs"


def run(*arguments):
    command = [sys.executable, "-m", "kubelend.cli.generate", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("record", [BrokerSettings, ClientSettings])
def test_every_setting_is_documented_with_its_variable(record):
    text = generate.command_line()
    for flag in flags.of(record):
        assert f"`{flag.name}`" in text
        assert f"`{flag.variable}`" in text
        assert flag.help.replace("|", "\\|") in text


def test_every_command_and_exit_code_is_documented():
    text = generate.command_line()
    for name in tree.TREE.commands:
        if name in tree.build().commands:
            assert f"\n## kubelend {name}\n" in text
    assert "\n## kubelend get reservations\n" in text
    for code in Code:
        assert f"| {int(code)} | {code.meaning} |" in text


def test_every_route_is_documented():
    text = generate.rest_routes()
    for route in routes.ROUTES:
        assert f"| {route.method} | `{route.path}` | " in text


def test_check_names_what_differs_and_write_mends_it(tmp_path):
    first = run("--check", "--docs", tmp_path)
    assert first.returncode == 1
    assert all(name in first.stderr for name in ("openapi.json", "cli.md", "routes.md"))
    assert list(tmp_path.iterdir()) == []

    assert run("--docs", tmp_path).returncode == 0
    assert run("--check", "--docs", tmp_path).returncode == 0
    assert json.loads((tmp_path / "openapi.json").read_text())["openapi"] == "3.1.0"

    (tmp_path / "cli.md").write_text("edited")
    again = run("--check", "--docs", tmp_path)
    assert again.returncode == 1
    assert "cli.md" in again.stderr
    assert "routes.md" not in again.stderr


def test_equal_code_writes_equal_documents(tmp_path):
    assert generate.documents(tmp_path) == generate.documents(tmp_path)


def test_documents_in_the_repository_are_what_the_code_makes():
    made = generate.documents(DOCS)
    assert {path.name for path in made} == {"openapi.json", "cli.md", "routes.md"}
    stale = [path.name for path, text in made.items() if path.read_text("utf-8") != text]
    assert stale == [], "run `make generate`"
