"""The command line as a whole: the tree and its help, errors and exit codes, names, targets, completion."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.core import TyperGroup

import kubelend as package
import logging_state
from kubelend.apps import flags
from kubelend.apps.settings import ClientSettings
from kubelend.cli import app, calls, clusters, main, members, options, output, request_flags
from kubelend.cli.app import LazyCommand
from kubelend.cli.options import DEFAULT, FLAG, PLUGIN, VARIABLE, KubeTarget
from kubelend.cli.output import ExitCode
from kubelend.core import errors
from kubelend.core.errors import InvalidInput, InvalidQuantity, InvalidSettings, NoCapacity
from kubelend.core.lifecycle import Role

# -- the tree


def paths(group, prefix=()):
    """Every command of the tree, groups too, by its words."""
    yield prefix
    for name, command in group.commands.items():
        if isinstance(command, TyperGroup):
            yield from paths(command, (*prefix, name))
        elif not isinstance(command, LazyCommand):
            yield (*prefix, name)


@pytest.mark.parametrize("path", list(paths(app.build_app())), ids=" ".join)
def test_every_command_has_a_help_of_80_columns(path, kubelend):
    code, out, err = kubelend(*path, "--help")
    assert (code, err) == (ExitCode.OK, "")
    assert out.startswith("Usage: " + " ".join(["kubelend", *path]))
    assert max(map(len, out.splitlines())) <= 80
    if path in {(), ("get",), ("audit",)}:  # a group alone shows its help, too
        assert kubelend(" ".join(path))[1] == out


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
SECTIONS = {
    "Basic commands": "borrow explain get describe renew release",
    "Administration commands": "create delete set cordon uncordon drain",
    "Membership commands": "join approve deny revoke certificate grant",
    "Server commands": "broker agent ca audit backup restore migrate-back migrate-store",
    "Other commands": "config completion version dev",
}
VERBS = " ".join(SECTIONS.values()).split()
OLD_WORDS = "accept reject remove token policy quota mailbox activate advertise demo lab bench"
OLD = OLD_WORDS.split()


def visible(group):
    return {name for name, command in group.commands.items() if not command.hidden}


def test_all_documented_commands_exist_and_old_ones_are_hidden():
    built = app.build_app()
    assert visible(built) == set(VERBS)
    assert set(built.commands) == {*VERBS, *OLD}
    for verb, nouns in NOUNS.items():
        group = built.commands[verb]
        assert isinstance(group, TyperGroup)
        assert visible(group) == set(nouns.split())
        for noun in nouns.split() if verb in {"get", "describe", "delete", "set"} else ():
            spellings = next((known for known in options.KINDS.values() if noun in known), ())
            assert set(spellings) <= set(group.commands)


def test_the_help_has_every_command_under_its_heading_and_the_exit_codes(kubelend):
    out = kubelend("--help")[1]
    assert [line for line in out.splitlines() if line.endswith(" commands:")] == [
        f"{heading}:" for heading in SECTIONS
    ]
    shown = [
        line.split()[0] for line in out.splitlines() if line.startswith("  ") and "  -" not in line
    ]
    assert [name for name in shown if name in VERBS] == VERBS
    assert not any(f"\n  {name} " in out for name in OLD)
    assert "--debug" in out
    assert "Exit codes: 0 ok, 1 unexpected, 2 usage, 3 not found," in out


def test_help_imports_nothing_that_is_slow():
    heavy = "{'aiohttp', 'numpy', 'rich', 'cryptography', 'yaml', 'asyncio', 'sqlite3', 'uvloop'}"
    code = (
        "import sys; from kubelend.cli import main; main.run(['--help']);"
        f"print({heavy} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_the_version_is_that_of_the_package(kubelend):
    version = package.__version__
    assert kubelend("version") == (0, f"Client: {version}\n", "")
    assert kubelend("--version") == (0, f"{version}\n", "")
    assert kubelend("version -o json")[1] == f'{{\n  "client": "{version}"\n}}\n'


# -- errors and exit codes

RESOURCES = "borrow --cpu 1 --memory 1"


@pytest.mark.parametrize(
    "line, problem",
    [
        ("bogus", "no such command 'bogus'"),
        ("brrow", "Did you mean 'borrow'?"),
        ("get clusters --bogus", "no such option: --bogus; see `kubelend get clusters --help`"),
        ("-foo", "no such option: -foo; see `kubelend --help`"),
        ("borrow -cpu 1", "no such option: -cpu (did you mean --cpu?); see `kubelend borrow"),
        ("--context a get clusters -xo json", "option: -xo; see `kubelend get clusters --help`"),
        ("borrow --cpu", "requires an argument; see `kubelend borrow --help`"),
        ("get foo", "no such command 'foo'; there are clusters, reservations, "),
        ("grant verify --keys no/where --provider p g", "--keys: no/where is missing"),
        ("renew", "missing argument 'RESERVATION'; see `kubelend renew --help`"),
        ("get clusters -o xml", "invalid value for '--output'"),
        ("get clusters", "--cert-path: required; set the flag or KUBELEND_CERT_PATH"),
        ("get clusters --cert-path no/where", "no/where/tls.crt is missing; create one"),
        ("explain --cert-path x", "give a reservation or resources"),
        ("explain r --cpu 1 --cert-path x", "give either a reservation or resources, not both;"),
        ("explain r --region eu --cert-path x", "give either a reservation or resources"),
        ("explain r --limit 101", "101 is not in the range 1<=x<=100"),
        ("broker", "--http-cert-path: required"),
        ("broker --http-cert-path x --http-port http", "--http-port: 'http' is no"),
        ("agent --colour red", "no such option: --colour"),
        ("agent --broker-url http://localhost", "--broker-url: 'http://localhost'"),
        ("ca issue x --lifetime 1y", "unknown unit 'y'"),
        ("completion tcsh", "invalid value for"),
        ("get clusters --kube-context x", "no-kubeconfig is missing"),
        ("get reservations -A --cert-path x", "give --kube-context too"),
        ("lend: get reservations", "no-kubeconfig is missing; use --kubeconfig"),
        ("lend: get clusters --cert-path no/where", "no/where/tls.crt is missing"),
        ("lend: get clusters --timeout soon", "--timeout: "),
        ("lend: get reservations x -A", "one reservation is in one namespace"),
        ("lend: get reservations -w --role provider", "cannot be watched by this command"),
        ("lend: renew x", "--cert-path: required"),
        ("lend: -n x renew x", "no such option: -n"),
        ("lend: get bogus", "see `kubectl lend get --help`"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(line, problem, kubelend):
    program = PLUGIN if line.startswith("lend: ") else "kubelend"
    code, out, err = kubelend(line.removeprefix("lend: "), program=program)
    assert (code, out) == (ExitCode.USAGE, "")
    assert problem in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_an_unreachable_broker_is_one_line_and_exit_code_7(certificates, kubelend):
    directory = certificates.cluster("a")
    assert kubelend(f"get rsv --cert-path {directory} --broker-url https://127.0.0.1:1") == (
        ExitCode.UNAVAILABLE,
        "",
        "error: connection refused by https://127.0.0.1:1;"
        " start the broker, or give its address with --broker-url\n",
    )


def test_debug_prints_the_traceback_and_nothing_else_does(kubelend):
    plain = kubelend("get clusters --cert-path no")[2]
    traced = kubelend("--debug get clusters --cert-path no")[2]
    assert "Traceback" not in plain
    assert "Traceback" in traced
    assert traced.endswith(plain)


def all_errors(kind=errors.KubelendError):
    return [kind, *(found for child in kind.__subclasses__() for found in all_errors(child))]


EXIT_CODES = {
    1: "KubelendError UnexpectedResponse MissingRoute MethodNotAllowed",
    2: "InvalidInput InvalidQuantity InvalidDuration KeyReused InvalidSettings InvalidGrant",
    3: "NotFound Hidden",
    4: "Forbidden Revoked Unauthenticated TokenRefused InvalidIdentity CertificateRefused",
    5: "Conflict NoCapacity WrongPhase IdentityInUse AlreadyExists Gone",
    6: "QuotaExceeded LimitExceeded RateLimited QueueFull BodyTooLarge",
    7: "Unavailable StoreFailed NotReady NotLeader BrokerUnreachable TooSlow",
}


def test_the_exit_code_of_every_error_is_fixed_and_documented():
    expected = {name: code for code, names in EXIT_CODES.items() for name in names.split()}
    assert expected == {kind.__name__: int(output.exit_code_for(kind(""))) for kind in all_errors()}
    assert all(code.meaning for code in ExitCode)


# -- names, and flags named in errors

BORROW, ADVERTISE = request_flags.FIELDS, clusters.FIELDS


@pytest.mark.parametrize(
    "text, kinds, name",
    [
        ("berlin", ["cluster"], "berlin"),
        ("cluster/berlin", ["cluster"], "berlin"),
        ("clusters/berlin", ["cluster"], "berlin"),
        ("rsv/rsv-1", ["reservation"], "rsv-1"),
        ("reservation/team/lend-1", ["reservation"], "team/lend-1"),
        ("team/lend-1", ["reservation"], "team/lend-1"),
        ("quota/team-a", ["cluster", "quota"], "team-a"),
        ("cluster/team-a", ["cluster", "quota"], "team-a"),
        ("", ["cluster"], ""),
    ],
)
def test_a_name_may_have_its_kind_before_it(text, kinds, name):
    assert options.parse_name(text, *kinds) == name


@pytest.mark.parametrize(
    "text, role, member",
    [
        ("berlin", None, "cluster/berlin"),
        ("bob", Role.VIEWER, "viewer/bob"),
        ("admin/alice", None, "admin/alice"),
        ("admin/alice", Role.ADMIN, "admin/alice"),
        ("member/berlin", None, "cluster/berlin"),
        ("member/admin/alice", None, "admin/alice"),
        ("Bob; rm -rf /", Role.VIEWER, "viewer/Bob; rm -rf /"),
    ],
)
def test_a_member_is_named_by_role_and_name(text, role, member):
    assert str(members.member(text, role)) == member


@pytest.mark.parametrize(
    "parse, problem",
    [
        (lambda: options.parse_name("cluster/berlin", "reservation"), "is a cluster, not a res"),
        (lambda: options.parse_name("rsv/", "reservation"), "has no name"),
        (lambda: members.member("admin/alice", Role.VIEWER), "'admin/alice' is no viewer"),
    ],
    ids=["another kind", "empty", "another role"],
)
def test_a_name_of_another_kind_or_role_is_rejected(parse, problem):
    with pytest.raises(InvalidInput, match=problem):
        parse()


@pytest.mark.parametrize(
    "fields, message, shown",
    [
        (BORROW, "requestedResources.cpu: 'x' is no", "--cpu: 'x' is no"),
        (BORROW, "requestedResources.extended.a.org/fpga: 'x'", "--resource a.org/fpga: 'x'"),
        (BORROW, "extended.fpga: is none", "--resource fpga: is none"),
        (BORROW, "spec.requestedCPU: is wrong", "--cpu: is wrong"),
        (BORROW, "duration: 900h is more", "--for: 900h is more"),
        (BORROW, "weights.price: 2000 is not", "--weight price: 2000 is not"),
        (BORROW, "constraints.maxPricePerHour: 'x'", "--max-price: 'x'"),
        (BORROW, "body: Expected `int` <= 9 - at `$.priority`", "--priority: must be at most 9"),
        (BORROW, "durations: unknown", "durations: unknown"),
        (BORROW, "no colon here", "no colon here"),
        (ADVERTISE, "resources.capacity.cpu: x", "--cpu: x"),
        (ADVERTISE, "resources.capacity.extended.fpga: x", "--resource fpga: x"),
        (ADVERTISE, "resources.allocated.memory: x", "--allocated-memory: x"),
        (ADVERTISE, "cost.gpuCost: x", "--gpu-cost: x"),
        (ADVERTISE, "labels.tier: x", "--label tier: x"),
        (ADVERTISE, "validFor: x", "--valid-for: x"),
        (
            calls.fields_of("a.", "maxPerRequester"),
            "a.maxPerRequester: x",
            "--max-per-requester: x",
        ),
    ],
)
def test_an_error_of_the_broker_names_the_flag(fields, message, shown):
    with pytest.raises(InvalidQuantity) as caught, calls.naming_flags(fields):
        raise InvalidQuantity(message, hint="do this")
    assert (caught.value.message, caught.value.hint) == (shown, "do this")


@pytest.mark.parametrize(
    "suggestion, shown",
    [
        ("remove the pin to another cluster", "leave out --cluster"),
        ("remove its exclusion", "leave out its --exclude"),
        ("drop the label topology.kubernetes.io/region=x", "leave out --region=x"),
        (
            "drop the label a=b and drop the label c=d",
            "leave out --label a=b and leave out --label c=d",
        ),
        ("allow 0.4 USD per hour", "set --max-price 0.4 --currency USD"),
        ("request 1 cpu less", "request 1 cpu less"),
    ],
)
def test_a_suggestion_of_the_broker_names_the_flag(suggestion, shown):
    with pytest.raises(NoCapacity) as caught, calls.naming_flags(BORROW):
        raise NoCapacity("no suitable cluster", hint=f"berlin fits if you {suggestion}")
    assert caught.value.hint == f"berlin fits if you {shown}"


# -- which target: the broker that is named, or the cluster that kubectl uses

BY_CONTEXT, NOT_NAMED = KubeTarget(context="x"), KubeTarget()


@pytest.mark.parametrize(
    "program, target, broker_named, is_cluster",
    [
        pytest.param(PLUGIN, NOT_NAMED, DEFAULT, True, id="plugin"),
        pytest.param("kubelend", NOT_NAMED, DEFAULT, False, id="kubelend"),
        pytest.param(PLUGIN, NOT_NAMED, VARIABLE, False, id="variable-wins-over-plugin"),
        pytest.param(PLUGIN, NOT_NAMED, FLAG, False, id="flag-wins-over-plugin"),
        pytest.param("kubelend", BY_CONTEXT, DEFAULT, True, id="context"),
        pytest.param("kubelend", KubeTarget(kubeconfig="x"), DEFAULT, True, id="kubeconfig"),
        pytest.param("kubelend", KubeTarget(namespace="x"), DEFAULT, True, id="namespace"),
        pytest.param("kubelend", BY_CONTEXT, VARIABLE, True, id="flag-wins-over-variable"),
    ],
)
def test_flags_win_over_variables_and_both_over_the_program(
    program, target, broker_named, is_cluster
):
    assert options.uses_kube_target(target, broker_named, program) is is_cluster


def test_broker_and_cluster_at_once_are_rejected():
    with pytest.raises(InvalidSettings, match="both a broker and a cluster; give --broker-url"):
        options.uses_kube_target(BY_CONTEXT, FLAG, PLUGIN)


def test_variables_of_a_broker_hold_for_the_plugin_until_a_context_is_named(monkeypatch, kubelend):
    monkeypatch.setenv("KUBELEND_CERT_PATH", "by/variable")
    assert "by/variable/tls.crt" in kubelend("get clusters", program=PLUGIN)[2]
    by_context = kubelend("get clusters --context x", program=PLUGIN)
    assert "no-kubeconfig is missing" in by_context[2]


def test_all_namespaces_are_those_of_a_cluster():
    assert options.all_namespaces(BY_CONTEXT) == KubeTarget(context="x", is_everywhere=True)
    with pytest.raises(InvalidInput, match="give --kube-context"):
        options.all_namespaces(flags.parse_settings(ClientSettings, {"cert_path": "x"}))
    with pytest.raises(InvalidInput, match="exclude each other"):
        options.all_namespaces(KubeTarget(namespace="x"))


@pytest.mark.parametrize(
    "given, parsed",
    [
        ("--context x get clusters", "get clusters --context x"),
        ("--context=x get clusters", "get clusters --context=x"),
        ("get -n team rsv --phase A", "get rsv --phase A -n team"),
        ("-A get rsv", "get rsv -A"),
        ("--debug -n t get rsv", "--debug get rsv -n t"),
        ("-n t release -- -x", "release -n t -- -x"),
        ("revoke x --reason -n", "revoke x --reason -n"),
        ("--context", "--context"),
        ("", ""),
        ("broker --leader-elect=true", "broker --leader-elect"),
        ("broker --leader-elect=False --store=true", "broker --no-leader-elect --store=true"),
        ("broker -http-port=8443 -leader-elect", "broker --http-port=8443 --leader-elect"),
        ("agent -broker-url https://x", "agent --broker-url https://x"),
        ("get rsv -name x", "get rsv -name x"),
    ],
)
def test_the_notation_of_kubectl_and_go_is_accepted(given, parsed):
    assert options.normalize_arguments(given.split()) == parsed.split()


@pytest.mark.parametrize("command", ["broker", "agent"])
def test_flags_of_the_published_programs_without_effect_are_named(command, capsys):
    unused = (
        "-metrics-secure=false --enable-http2 --zap-log-level debug -zap-devel --zap-encoder=json"
        " --metrics-cert-path /c --webhook-cert-path=/w --metrics-bind-address=:8080"
    )
    parsed = options.normalize_arguments([command, *unused.split()])
    assert parsed == [command, "--metrics-bind-address=:8080"]
    names = [line.split()[0] for line in capsys.readouterr().err.splitlines()]
    assert names == [
        *("--metrics-secure", "--enable-http2", "--zap-log-level", "--zap-devel", "--zap-encoder"),
        *("--metrics-cert-path", "--webhook-cert-path"),
    ]


@pytest.mark.parametrize(
    "path, name",
    [
        ("/usr/bin/kubelend", "kubelend"),
        ("/usr/bin/kubectl-lend", "kubectl lend"),
        ("/x/kubelend/__main__.py", "kubelend"),
    ],
)
def test_the_program_has_the_name_that_its_user_typed(path, name):
    assert main.program(path) == name


# -- completion


@pytest.fixture
def own_environment(monkeypatch):
    """Variables for the parser are set in the process that ends with the completion."""
    monkeypatch.setattr(os, "environ", os.environ.copy())


@pytest.mark.usefixtures("own_environment")
@pytest.mark.parametrize(
    "given, candidates, directive",
    [
        pytest.param(("get", ""), NOUNS["get"].split(), main.NO_FILES, id="commands"),
        pytest.param(("get", "clu"), ["clusters"], main.NO_FILES, id="prefix"),
        pytest.param(("ca", "issue", "--rol"), ["--role"], main.NO_FILES, id="flags"),
        pytest.param(("completion", "z"), ["zsh"], main.NO_FILES, id="values"),
        pytest.param((), VERBS, main.NO_FILES, id="nothing typed"),
        pytest.param(("ca", "init", "--ca", ""), [], main.FILES, id="files"),
        pytest.param(("ca", "init", "--ca", "a/b"), [], main.FILES, id="file-prefix"),
        pytest.param(
            ("revoke", "x", "--reason", "it's 'gone' $HOME", "--rol"),
            ["--role"],
            main.NO_FILES,
            id="spaces-and-quotes",
        ),
    ],
)
def test_kubectl_completes_what_is_known(given, candidates, directive):
    *lines, last = main.completion_lines(given).splitlines()
    assert ([line.partition("\t")[0] for line in lines], last) == (candidates, directive)
    assert os.environ[app.COMPLETE_VARIABLE] == "complete_fish"
    assert all(line.partition("\t")[2] for line in lines if given[:1] == ("get",))


def test_the_shell_gets_completions(kubelend):
    _, script, _ = kubelend("completion bash")
    assert f"{app.COMPLETE_VARIABLE}=complete_bash" in script
    typed = {"COMP_WORDS": "kubelend get cl", "COMP_CWORD": "2"}
    environment = os.environ | typed | {app.COMPLETE_VARIABLE: "complete_bash"}
    program = Path(sys.executable).with_name("kubelend")
    done = subprocess.run([program], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["clusters"]


# -- a broker that does not start


@pytest.fixture
def broker(kubelend, certificates):
    """Starts one with these flags in this process; returns the error."""

    def start(*flags, directory=None):
        words = ("broker", "--health-probe-bind-address=0", "--metrics-bind-address=0", *flags)
        with logging_state.put_back():
            code, _, err = kubelend(*words, "--http-cert-path", str(directory or "no/where"))
        assert code == ExitCode.USAGE
        return err.splitlines()[-1]

    return start


@pytest.mark.parametrize(
    "url, problem",
    [
        ("memory:", "no/where/tls.crt is missing; create one"),
        ("postgres://db/kubelend", "unknown kind of store"),
        ("memory:foo", "memory:foo"),
        ("sqlite://host/x", "sqlite://host/x"),
    ],
)
def test_a_broker_without_certificates_or_store_does_not_start(broker, url, problem):
    assert broker("--store", url).startswith(f"error: {problem}")


@pytest.mark.parametrize(
    "host, hint",
    [
        ("no such host", "cannot resolve the host: use an address of this machine"),
        ("x" * 64, "cannot resolve the host"),
        ("192.0.2.1", "use an address of this machine"),
    ],
    ids=["unknown", "impossible", "elsewhere"],
)
def test_a_broker_that_cannot_listen_says_what_to_change(broker, host, hint, certificates):
    error = broker("--store", "memory:", "--http-host", host, directory=certificates.server())
    assert error.startswith(f"error: cannot listen on {host}:8443: ")
    assert f"; {hint}" in error
