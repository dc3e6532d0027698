"""The generated documents know every command, flag, route and exit code, and are up to date."""

import inspect
import json
import sys
from pathlib import Path

import pytest
import yaml

from kubelend.apps import flags
from kubelend.apps.settings import BrokerSettings, ClientSettings
from kubelend.cli import app, generate
from kubelend.cli.output import ExitCode
from kubelend.core import errors
from kubelend.wire import crds, problems, routes
from kubelend.wire.route import COMMON_ERRORS

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"


@pytest.fixture
def run(monkeypatch):
    """Runs it with these arguments; gives how it ended: nothing, or a text for standard error."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["generate", *map(str, arguments)])
        try:
            generate.main()
        except SystemExit as end:
            return end.code
        return None

    return run


def test_every_command_setting_and_exit_code_is_documented():
    text = generate.command_line()
    for flag in (*flags.flags_of(BrokerSettings), *flags.flags_of(ClientSettings)):
        parts = f"`{flag.name}`", f"`{flag.variable}`", flag.help.replace("|", "\\|")
        assert [part for part in parts if part not in text] == []
    for name in app.TREE.commands:
        if name in app.build_app().commands:
            assert f"\n## kubelend {name}\n" in text
    assert "\n## kubelend get reservations\n" in text
    for code in ExitCode:
        meaning = code.meaning.replace("|", "\\|")
        assert f"| {int(code)} | {meaning} |" in text


def test_every_route_and_error_is_documented_with_where_it_is_sent():
    for route in routes.ROUTES:
        assert f"| {route.method} | `{route.path}` | " in generate.rest_routes()
    for _, kind in inspect.getmembers(errors, inspect.isclass):
        if issubclass(kind, errors.KubelendError):
            status, again = int(problems.http_status(kind(""))), "yes" if kind.retryable else ""
            assert f"| `{kind.code}` | {status} | {again} | " in generate.error_codes()
    rows = [line.split(" | ") for line in generate.error_codes().splitlines() if "` | " in line]
    senders = {row[0].strip("| `"): row[-1].removesuffix(" |") for row in rows}
    assert senders["RateLimited"] == "any route, joining"
    assert senders["BodyTooLarge"] == "any route with a body, joining"
    assert senders["QueueFull"] == "`reserve`"
    assert senders["MethodNotAllowed"] == "any call that no route takes, joining"
    assert senders["InvalidSettings"].startswith("not sent")
    for kind in COMMON_ERRORS:
        assert f" {kind.code}" in generate.rest_routes()


def test_check_names_what_differs_and_write_repairs_it(run, tmp_path):
    directories = "--docs", tmp_path, "--crds", tmp_path
    first = run("--check", *directories)
    assert all(name in first for name in ("openapi.json", "cli.md", "routes.md", "errors.md"))
    assert list(tmp_path.iterdir()) == []

    assert run(*directories) is None
    assert run("--check", *directories) is None
    assert json.loads((tmp_path / "openapi.json").read_text())["openapi"] == "3.1.0"

    (tmp_path / "cli.md").write_text("edited")
    again = run("--check", *directories)
    assert "cli.md" in again
    assert "routes.md" not in again


def test_documents_in_the_repository_are_what_the_code_makes():
    made = generate.documents(DOCS)
    names = {"openapi.json", "cli.md", "routes.md", "errors.md", "object-fields.md"}
    assert {path.name for path in made} == names
    stale = [path.name for path, text in made.items() if path.read_text("utf-8") != text]
    assert stale == [], "run `make generate`"


def test_definitions_in_the_repository_are_what_the_code_makes():
    made = generate.crd_files(ROOT / "deploy" / "crds")
    assert {path.name: path.read_text("utf-8") for path in made} == {
        path.name: text for path, text in made.items()
    }, "run `make manifests`"
    assert set(made) == set((ROOT / "deploy" / "crds").iterdir()), "one is not made any more"


def test_definitions_are_written_so_that_they_are_read_again():
    for text, document in zip(
        generate.crd_files(ROOT).values(), crds.crd_documents().values(), strict=True
    ):
        assert text.startswith("# Made by `make manifests`")
        assert "&id001" not in text
        assert yaml.safe_load(text) == document
        assert not {"\u2028", "\u2029"} & set(text)
