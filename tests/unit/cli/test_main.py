"""The command line as a whole: every help works, every error is one line with the right exit code."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.core import TyperGroup

import kubelend
from certificates import Certificates
from kubelend.cli import app, exit_codes, main, options
from kubelend.cli.app import LazyCommand
from kubelend.cli.exit_codes import ExitCode
from kubelend.core import errors


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in list(os.environ):
        if name.startswith("KUBELEND_"):
            monkeypatch.delenv(name)


def paths(group, prefix=()):
    """Every command of the tree, groups too, by its words."""
    yield prefix
    for name, command in group.commands.items():
        if isinstance(command, TyperGroup):
            yield from paths(command, (*prefix, name))
        elif not isinstance(command, LazyCommand):
            yield (*prefix, name)


def run(capsys, *arguments):
    code = main.run(list(arguments))
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize(
    "path", list(paths(app.build_app())), ids=lambda path: " ".join(path) or "kubelend"
)
def test_every_command_has_a_help(path, capsys):
    code, out, err = run(capsys, *path, "--help")
    assert (code, err) == (ExitCode.OK, "")
    assert out.startswith("Usage: " + " ".join(["kubelend", *path]))
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("group", [(), ("get",), ("describe",), ("ca",), ("audit",)], ids=str)
def test_a_group_alone_shows_its_help(group, capsys):
    code, out, _ = run(capsys, *group)
    assert code == ExitCode.OK
    assert "ommands:" in out


VERBS = (
    "borrow explain get describe renew release create delete set cordon uncordon drain join approve deny"
    " revoke certificate grant broker agent ca audit config completion version dev"
)
NOUNS = {
    "get": "clusters reservations borrowed lent members tokens quotas policies",
    "describe": "cluster reservation member token quota policy",
    "create": "token clusternamespace",
    "delete": "cluster reservation member token quota policy",
    "set": "quota policy",
    "audit": "check log verify",
    "config": "get-contexts current-context use-context set-context delete-context",
    "dev": "demo lab bench advertise activate",
}
OLD = "accept reject remove token policy quota mailbox activate advertise demo lab bench"


def visible(group):
    return {name for name, command in group.commands.items() if not command.hidden}


def test_all_promised_commands_are_there_and_old_ones_are_hidden():
    built = app.build_app()
    assert visible(built) == set(VERBS.split())
    assert set(built.commands) == {*VERBS.split(), *OLD.split()}
    for verb, nouns in NOUNS.items():
        group = built.commands[verb]
        assert isinstance(group, TyperGroup)
        assert visible(group) == set(nouns.split())


@pytest.mark.parametrize("verb", ["get", "describe", "delete", "set"])
def test_nouns_are_known_in_singular_and_plural(verb):
    group = app.build_app().commands[verb]
    assert isinstance(group, TyperGroup)
    for noun in NOUNS[verb].split():
        words = next((words for words in options.KINDS.values() if noun in words), ())
        assert set(words) <= set(group.commands)


def test_the_help_has_every_command_under_a_heading(capsys):
    out = run(capsys, "--help")[1]
    shown = [name for names in app.TREE.sections.values() for name in names]
    assert sorted(shown) == sorted(VERBS.split())
    headings = [line for line in out.splitlines() if line.endswith(" commands:")]
    assert headings == [f"{heading}:" for heading in app.TREE.sections]
    assert all(f"\n  {name} " in out for name in shown)
    assert not any(f"\n  {name} " in out for name in OLD.split())


@pytest.mark.parametrize(
    "arguments,problem",
    [
        (["bogus"], "no such command 'bogus'"),
        (["brrow"], "Did you mean 'borrow'?"),
        (
            ["get", "clusters", "--bogus"],
            "no such option: --bogus; see `kubelend get clusters --help`",
        ),
        (["renew"], "missing argument 'RESERVATION'; see `kubelend renew --help`"),
        (["get", "clusters", "-o", "xml"], "invalid value for '--output'"),
        (["get", "clusters"], "--cert-path: required; set the flag or KUBELEND_CERT_PATH"),
        (["get", "clusters", "--cert-path", "no/where"], "no/where/tls.crt is missing; create one"),
        (
            ["borrow", "--cert-path", "x"],
            "no resources are requested; give at least --cpu and --memory",
        ),
        (["explain", "--cert-path", "x"], "give a reservation or resources"),
        (
            ["explain", "r", "--cpu", "1", "--cert-path", "x"],
            "give either a reservation or resources, not both; leave out the name",
        ),
        (
            ["explain", "r", "--region", "eu", "--cert-path", "x"],
            "give either a reservation or resources",
        ),
        (["explain", "--cpu", "1", "--cert-path", "x"], "--cpu and --memory are both required"),
        (["explain", "r", "--limit", "0"], "0 is not in the range 1<=x<=100"),
        (["explain", "r", "--limit", "101"], "101 is not in the range 1<=x<=100"),
        (["broker"], "--http-cert-path: required"),
        (["broker", "--http-cert-path", "x", "--http-port", "http"], "--http-port: 'http' is no"),
        (["audit", "--store", "no/such.db"], "no/such.db"),
        (["ca", "issue", "x", "--ca", "no/where"], "no/where/ca.key is missing"),
        (["ca", "issue", "x", "--lifetime", "1y"], "unknown unit 'y'"),
        (["completion", "tcsh"], "invalid value for"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_use_is_one_line_and_exit_code_2(arguments, problem, capsys):
    code, out, err = run(capsys, *arguments)
    assert code == ExitCode.USAGE
    assert problem in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert out == ""


def test_an_unreachable_broker_is_one_line_and_exit_code_7(tmp_path, capsys):
    directory = Certificates(tmp_path).cluster("a")
    code, out, err = run(
        capsys,
        "get",
        "reservations",
        "--cert-path",
        str(directory),
        "--broker-url",
        "https://127.0.0.1:1",
    )
    assert (code, out) == (ExitCode.UNAVAILABLE, "")
    assert err == (
        "error: connection refused by https://127.0.0.1:1;"
        " start the broker, or give its address with --broker-url\n"
    )


def test_a_variable_stands_in_for_a_flag_and_the_flag_wins(monkeypatch, capsys):
    monkeypatch.setenv("KUBELEND_CERT_PATH", "from/variable")
    assert "from/variable/tls.crt" in run(capsys, "get", "clusters")[2]
    assert "by/flag/tls.crt" in run(capsys, "get", "clusters", "--cert-path", "by/flag")[2]


def test_every_flag_of_the_broker_can_be_a_variable(monkeypatch, capsys):
    monkeypatch.setenv("KUBELEND_HTTP_PORT", "nine")
    monkeypatch.setenv("KUBELEND_STALE_AFTER", "0")
    _, _, err = run(capsys, "broker", "--http-cert-path", "x")
    assert "--http-port: 'nine' is not an integer" in err
    assert "--stale-after: must be at least 1ms" in err


def all_errors(kind=errors.KubelendError):
    return [kind, *(found for child in kind.__subclasses__() for found in all_errors(child))]


EXPECTED = {
    errors.KubelendError: 1,
    errors.InvalidInput: 2,
    errors.InvalidQuantity: 2,
    errors.InvalidDuration: 2,
    errors.KeyReused: 2,
    errors.InvalidSettings: 2,
    errors.NotFound: 3,
    errors.Hidden: 3,
    errors.Forbidden: 4,
    errors.InvalidGrant: 2,
    errors.QuotaExceeded: 6,
    errors.Revoked: 4,
    errors.Unauthenticated: 4,
    errors.TokenRefused: 4,
    errors.InvalidIdentity: 4,
    errors.Conflict: 5,
    errors.NoCapacity: 5,
    errors.WrongPhase: 5,
    errors.IdentityInUse: 5,
    errors.AlreadyExists: 5,
    errors.Gone: 5,
    errors.LimitExceeded: 6,
    errors.RateLimited: 6,
    errors.QueueFull: 6,
    errors.BodyTooLarge: 6,
    errors.Unavailable: 7,
    errors.StoreFailed: 7,
    errors.NotReady: 7,
    errors.NotLeader: 7,
    errors.BrokerUnreachable: 7,
    errors.CertificateRefused: 4,
    errors.TooSlow: 7,
    errors.UnexpectedAnswer: 1,
    errors.MethodNotAllowed: 1,
}


@pytest.mark.parametrize("kind", all_errors(), ids=lambda kind: kind.__name__)
def test_the_exit_code_of_an_error_is_fixed(kind):
    assert exit_codes.exit_code_for(kind("")) == EXPECTED[kind]


def test_every_exit_code_has_a_meaning():
    assert all(code.meaning for code in ExitCode)


def test_a_switch_may_be_written_as_in_go():
    given = ["broker", "--leader-elect=true", "--leader-elect=False", "--store=true"]
    assert options.normalize_arguments(given) == [
        "broker",
        "--leader-elect",
        "--no-leader-elect",
        "--store=true",
    ]


@pytest.mark.parametrize(
    "path,name",
    [
        ("/usr/bin/kubelend", "kubelend"),
        ("/usr/bin/kubectl-lend", "kubectl lend"),
        ("/x/kubelend/__main__.py", "kubelend"),
    ],
)
def test_the_command_calls_itself_what_its_user_called_it(path, name):
    assert main.program(path) == name


def test_a_plugin_of_kubectl_says_so_in_its_errors(capsys):
    main.run(["get", "bogus"], "kubectl lend")
    assert "see `kubectl lend get --help`" in capsys.readouterr().err


def test_help_names_the_flag_that_shows_where(capsys):
    assert "--debug" in run(capsys, "--help")[1]


def test_debug_shows_where_and_nothing_else_does(capsys):
    plain = run(capsys, "get", "clusters", "--cert-path", "no")[2]
    traced = run(capsys, "--debug", "get", "clusters", "--cert-path", "no")[2]
    assert "Traceback" not in plain
    assert "Traceback" in traced
    assert traced.endswith(plain)


def test_the_version_is_that_of_the_package(capsys):
    assert run(capsys, "version") == (0, f"Client: {kubelend.__version__}\n", "")
    assert run(capsys, "--version") == (0, f"{kubelend.__version__}\n", "")
    assert (
        run(capsys, "version", "-o", "json")[1] == f'{{\n  "client": "{kubelend.__version__}"\n}}\n'
    )


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_completion_script_names_the_command(shell, capsys):
    code, out, _ = run(capsys, "completion", shell)
    assert code == ExitCode.OK
    assert "_KUBELEND_COMPLETE" in out


def kubelend_process(*arguments, **variables):
    command = [Path(sys.executable).with_name("kubelend"), *arguments]
    environment = {"PATH": os.environ["PATH"], **variables}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_a_broker_without_certificates_does_not_start():
    done = kubelend_process("broker", "--http-cert-path", "no/where", "--store", "memory:")
    assert done.returncode == ExitCode.USAGE
    assert done.stderr.splitlines()[-1].startswith("error: no/where/tls.crt is missing; create one")


@pytest.mark.parametrize(
    "host,remedy",
    [
        ("no such host", "cannot resolve the host: use an address of this machine"),
        ("x" * 64, "cannot resolve the host"),
        ("192.0.2.1", "use an address of this machine"),
    ],
    ids=["unknown", "impossible", "elsewhere"],
)
def test_a_broker_that_cannot_listen_there_says_what_to_change(host, remedy, tmp_path):
    done = kubelend_process(
        *("broker", "--http-cert-path", Certificates(tmp_path).server(), "--store", "memory:"),
        *("--http-host", host, "--health-probe-bind-address=0", "--metrics-bind-address=0"),
    )
    assert done.returncode == ExitCode.USAGE
    told = done.stderr.splitlines()[-1]
    assert told.startswith(f"error: cannot listen on {host}:8443: ")
    assert f"; {remedy}" in told


@pytest.mark.parametrize("url", ["postgres://db/kubelend", "memory:foo", "sqlite://host/x"])
def test_a_broker_whose_store_cannot_be_does_not_start(url):
    done = kubelend_process("broker", "--http-cert-path", "no/where", "--store", url)
    assert done.returncode == ExitCode.USAGE
    assert done.stderr.splitlines()[-1].startswith(
        ("error: unknown kind of store", f"error: {url}")
    )


def test_the_shell_gets_completions():
    done = kubelend_process(
        COMP_WORDS="kubelend get cl", COMP_CWORD="2", _KUBELEND_COMPLETE="complete_bash"
    )
    assert done.stdout.split() == ["clusters"]


def test_help_imports_nothing_that_is_slow():
    heavy = "{'aiohttp', 'numpy', 'rich', 'cryptography', 'yaml', 'asyncio', 'sqlite3', 'uvloop'}"
    code = (
        "import sys; from kubelend.cli import main; main.run(['--help']);"
        f"print({heavy} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"
