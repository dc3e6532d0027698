"""What kubectl is told when somebody presses Tab behind `kubectl lend`."""

import os

import pytest

from kubelend.cli import app, main


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """What is set for the parser is the process's own, and ends with it."""
    monkeypatch.setattr(os, "environ", os.environ.copy())


def offered(*words):
    *lines, directive = main.completion_lines(words).splitlines()
    return [line.partition("\t")[0] for line in lines], directive


@pytest.mark.parametrize(
    "words, candidates",
    [
        pytest.param(
            ("get", ""),
            [
                "clusters",
                "reservations",
                "borrowed",
                "lent",
                "members",
                "tokens",
                "quotas",
                "policies",
            ],
            id="commands",
        ),
        pytest.param(("get", "clu"), ["clusters"], id="begun"),
        pytest.param(("ca", "issue", "--rol"), ["--role"], id="flags"),
        pytest.param(("completion", "z"), ["zsh"], id="values"),
    ],
)
def test_known_words_are_offered_and_no_files(words, candidates):
    assert offered(*words) == (candidates, main.NO_FILES)


def test_all_commands_are_offered_where_nothing_was_typed():
    assert {"borrow", "get", "create", "version"} <= set(offered()[0])


def test_help_stands_behind_a_tab():
    [line, _] = main.completion_lines(["get", "members"]).splitlines()
    assert line.startswith("members\tList members")


@pytest.mark.parametrize("begun", ["", "some/dir"])
def test_files_are_offered_where_nothing_else_is_known(begun):
    assert offered("ca", "init", "--ca", begun) == ([], main.FILES)


def test_word_with_spaces_and_quotes_is_one_word():
    assert offered("revoke", "x", "--reason", "it's 'gone' $HOME", "--rol")[0] == ["--role"]


def test_variable_is_the_one_of_the_completion_script():
    main.completion_lines([""])
    assert os.environ[app.COMPLETE_VARIABLE] == "complete_fish"
