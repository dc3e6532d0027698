"""How the demo speaks: plain lines that fit 80 columns."""

import pytest

from kubelend.demo import screen, story
from kubelend.demo.screen import PlainDisplay


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0.00084, "0.8 ms"),
        (0.0124, "12 ms"),
        (0.812, "812 ms"),
        (1.24, "1.2 s"),
    ],
)
def test_durations_have_three_digits_at_most(seconds, text):
    assert screen.format_seconds(seconds) == text


def test_the_time_of_a_step_ends_at_the_edge(capsys):
    PlainDisplay().step(3, "Something happens", 0.0124, ["and this is seen"])
    _, title, line = capsys.readouterr().out.splitlines()
    assert title.startswith(" 3  Something happens ")
    assert title.endswith(" 12 ms")
    assert len(title) == 80
    assert line == "    and this is seen"


def test_what_is_to_be_copied_is_not_wrapped(capsys):
    long = "kubelend get clusters --cert-path " + "x" * 100
    PlainDisplay().show_commands("To try:", [long])
    assert long in capsys.readouterr().out.splitlines()


def test_long_sentences_are_wrapped_with_their_indent():
    lines = screen.wrap_text("word " * 60)
    assert len(lines) > 1
    assert max(map(len, lines)) <= 76


def test_titles_leave_room_for_their_time():
    assert max(len(step.title) for step in (*story.LIFECYCLE_STEPS, *story.FINAL_STEPS)) <= 66
