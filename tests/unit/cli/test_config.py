"""The configuration file: found, read strictly, written safely, and weaker than flags and variables."""

import os
import stat

import pytest
import yaml

from kubelend.cli import config
from kubelend.cli.config import Context
from kubelend.core.errors import InvalidSettings

ALICE = """\
currentContext: alice
contexts:
- name: alice
  brokerURL: https://alice.example.org:8443
  certPath: /certs/alice
- name: bob
  certPath: bobs
  timeout: 3s
"""


@pytest.fixture(autouse=True)
def file(no_settings, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return tmp_path / "config.yaml"


# -- where it is


def test_without_it_the_file_is_below_the_directory_for_configuration(monkeypatch, tmp_path):
    monkeypatch.delenv("KUBELEND_CONFIG")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    assert config.path() == tmp_path / "xdg" / "kubelend" / "config.yaml"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert config.path() == tmp_path / "home" / ".config" / "kubelend" / "config.yaml"


def test_without_a_file_there_is_no_context(kubelend):
    assert config.find_context() is None
    code, out, err = kubelend("config", "get-contexts")
    assert (code, out) == (0, "")
    assert err.startswith("No contexts found in ")
    assert kubelend("config", "current-context")[0] == 3


def test_a_home_that_is_unknown_or_closed_has_no_configuration(monkeypatch, tmp_path):
    monkeypatch.delenv("KUBELEND_CONFIG")
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda text: text)
    assert config.find_context() is None
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "a file"))
    (tmp_path / "a file").touch()
    assert config.find_context() is None


def test_a_home_of_somebody_else_has_none_and_a_file_that_is_named_must_be_readable(
    monkeypatch, file
):
    def closed(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.stat", closed)
    monkeypatch.setattr("pathlib.Path.read_bytes", closed)
    with pytest.raises(InvalidSettings, match="cannot be read: Permission denied"):
        config.find_context()
    monkeypatch.delenv("KUBELEND_CONFIG")
    assert config.find_context() is None


# -- what is in it


def test_contexts_are_read_with_paths_relative_to_the_file(file):
    file.write_text(ALICE)
    alice = Context("alice", "https://alice.example.org:8443", "/certs/alice")
    bob = Context("bob", cert_path=str(file.parent / "bobs"), timeout="3s")
    assert [config.find_context(), config.find_context("bob")] == [alice, bob]


@pytest.mark.parametrize(
    "text, problem",
    [
        ("contexts: [", "not valid YAML: line "),
        ("? [contexts]\n: a\n", "not valid YAML: line 1, column 3: found unhashable key"),
        (
            "contexts:\n- name: a\n  name: b\n",
            "not valid YAML: line 3, column 3: name is given twice",
        ),
        ("contexts:\n- name: a\n  brokerUrl: https://x\n", "contexts[0].brokerUrl: unknown field"),
        ("contexts:\n- name: a\n- certPath: x\n", "contexts[1].name: is required"),
        ("contexts:\n- name: a\n- name: a\n", "contexts[1].name: 'a' is defined twice"),
        ("contexts: {a: b}\n", "contexts: "),
        ("contexts:\n- a\n", "contexts[0]: "),
        ("- a\n", ""),
        ("contexts:\n- name: a\n  certPath: [x]\n", "contexts[0].certPath: "),
        (
            "contexts:\n- name: a\n  brokerURL: http://x\n",
            "contexts[0].brokerURL: 'http://x' is not",
        ),
        ("contexts:\n- name: a\n  timeout: soon\n", "contexts[0].timeout: "),
        ("contexts: []\n\ncurrentContext: b\n", "currentContext: there is no context 'b'"),
        ("contexts: \ud800", "not valid YAML: "),
    ],
)
def test_a_bad_file_is_one_line_that_names_file_and_field(file, kubelend, text, problem):
    file.write_bytes(text.encode(errors="surrogatepass"))
    code, out, err = kubelend("get", "clusters")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"error: {file}: {problem}")


def test_a_file_that_cannot_be_read_is_named(file, kubelend):
    file.mkdir()
    assert f"{file} cannot be read: Is a directory" in kubelend("get", "clusters")[2]


def test_keys_without_a_value_are_the_same_as_none(file):
    file.write_text("contexts:\n- name: a\n  timeout:\ncurrentContext:\n")
    assert config.load() == config.Config("", [Context("a")])


# -- which value counts: flag, --context, variable, current context, default


def used(kubelend, *words, **keywords):
    """The directory of the certificate that a command would call with."""
    return kubelend("cordon", "x", *words, **keywords)[2].partition("/tls.crt")[0]


def test_a_flag_wins_over_a_named_context_a_variable_and_the_current_context(
    file, kubelend, monkeypatch
):
    file.write_text(ALICE)
    bobs = f"error: {file.parent}/bobs"
    assert used(kubelend) == "error: /certs/alice"
    monkeypatch.setenv("KUBELEND_CERT_PATH", "by/variable")
    assert used(kubelend) == "error: by/variable"
    assert used(kubelend, "--context", "bob") == bobs
    assert kubelend("--context=bob", "cordon", "x")[2].startswith(bobs)
    assert used(kubelend, "--cert-path", "by/flag") == "error: by/flag"
    assert used(kubelend, "--context", "bob", "--cert-path", "by/flag") == "error: by/flag"


def test_every_setting_of_a_context_is_used(file, kubelend, certificates):
    file.write_text(
        "contexts:\n- name: a\n  brokerURL: https://127.0.0.1:1\n"
        f"  certPath: {certificates.cluster('a')}\n  timeout: 1x\n"
    )
    assert "timeout: " in kubelend("get", "clusters", "--context", "a")[2]
    file.write_text(file.read_text().replace("1x", "2s"))
    assert "connection refused by https://127.0.0.1:1" in kubelend("version", "--context", "a")[2]


def test_the_address_by_its_old_flag_and_variable_still_counts(
    file, kubelend, monkeypatch, certificates
):
    monkeypatch.setenv("KUBELEND_CERT_PATH", str(certificates.cluster("a")))
    assert "https://127.0.0.1:2;" in kubelend("version", "--broker", "https://127.0.0.1:2")[2]
    monkeypatch.setenv("KUBELEND_BROKER", "https://127.0.0.1:3")
    assert "https://127.0.0.1:3;" in kubelend("version")[2]
    monkeypatch.setenv("KUBELEND_BROKER_URL", "https://127.0.0.1:4")
    assert "https://127.0.0.1:4;" in kubelend("version")[2]


def test_an_unknown_context_and_one_of_kubectl_name_no_broker(file, kubelend):
    code, _, err = kubelend("get", "clusters", "--context", "nowhere")
    assert code == 2
    assert f"no context 'nowhere' in {file}" in err
    assert "--kube-context" in err
    code, _, err = kubelend("renew", "x", "--context", "kind", program="kubectl lend")
    assert (code, "this command calls the broker" in err) == (2, True)


def test_the_version_of_the_broker_is_asked_for_only_if_one_is_named(file, kubelend):
    assert kubelend("version")[1].startswith("Client: ")
    file.write_text(ALICE)
    _, printed, problem = kubelend("version")
    assert "/certs/alice/tls.crt is missing" in problem
    assert printed.startswith("Client: "), "also without a broker"
    assert kubelend("version", "--client")[0] == 0


# -- the commands


def test_contexts_are_set_listed_used_and_deleted(file, kubelend):
    def run(line):
        return kubelend(f"config {line}")[1]

    url = "https://broker.example.org:8443"
    assert run(f"set-context alice --broker-url {url}") == "Context 'alice' created.\n"
    run("set-context bob --cert-path certs/bob --timeout 5s")
    assert run("current-context") == "alice\n"
    assert run("use-context bob") == "Switched to context 'bob'.\n"
    assert run(f"set-context --current --broker-url {url}") == "Context 'bob' modified.\n"
    rows = [line.split() for line in run("get-contexts").splitlines()]
    certs = str(file.parent / "certs" / "bob")
    assert rows == [
        ["CURRENT", "NAME", "BROKER", "CERTIFICATES"],
        ["alice", url, "-"],
        ["*", "bob", url, certs],
    ]
    assert run("get-contexts -o name") == "alice\nbob\n"
    assert yaml.safe_load(file.read_text()) == {
        "currentContext": "bob",
        "contexts": [
            {"name": "alice", "brokerURL": url},
            {"name": "bob", "brokerURL": url, "certPath": certs, "timeout": "5s"},
        ],
    }
    code, out, err = kubelend("config", "delete-context", "bob")
    assert (code, out) == (0, f"Deleted context 'bob' from {file}.\n")
    assert "no current context now" in err
    assert kubelend("config", "current-context")[0] == 3


def test_the_file_is_replaced_as_a_whole_and_private(monkeypatch, tmp_path, kubelend):
    file = tmp_path / "new" / "kubelend" / "config.yaml"
    monkeypatch.setenv("KUBELEND_CONFIG", str(file))
    os.umask(0o022)
    kubelend("config", "set-context", "a")
    before = file.stat().st_ino
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    kubelend("config", "set-context", "b")
    assert file.stat().st_ino != before
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_link_stays_a_link(file, kubelend, tmp_path):
    target = tmp_path / "elsewhere.yaml"
    target.write_text(ALICE)
    file.symlink_to(target)
    assert kubelend("config", "use-context", "bob")[0] == 0
    assert file.is_symlink()
    assert yaml.safe_load(target.read_text())["currentContext"] == "bob"


@pytest.mark.parametrize(
    "words, problem",
    [
        ("set-context", "exactly one of CONTEXT and --current is required"),
        ("set-context a --current", "exactly one of CONTEXT and --current is required"),
        ("set-context --current", "there is no current context"),
        ("set-context a --broker-url http://x", "--broker-url: 'http://x' is not a broker URL"),
        ("set-context a --timeout soon", "--timeout: "),
        ("use-context a", "no context 'a' in "),
        ("delete-context a", "no context 'a' in "),
    ],
)
def test_mistakes_change_nothing(file, kubelend, words, problem):
    code, out, err = kubelend(f"config {words}")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert problem in err
    assert not file.exists()
