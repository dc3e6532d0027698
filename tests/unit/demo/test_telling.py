"""How the demo speaks: plain lines that fit 80 columns."""

import pytest

from kubelend.demo import story, telling


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
    assert telling.duration(seconds) == text


def test_the_time_of_a_step_ends_at_the_edge(capsys):
    telling.step(3, "Something happens", 0.0124, ["and this is seen"])
    _, title, line = capsys.readouterr().out.splitlines()
    assert title.startswith(" 3  Something happens ")
    assert title.endswith(" 12 ms")
    assert len(title) == 80
    assert line == "    and this is seen"


def test_no_colour_goes_into_a_pipe(capsys):
    telling.heading("Kubelend")
    telling.step(1, "Title", 1.0, [])
    assert "\x1b" not in capsys.readouterr().out


def test_long_sentences_are_wrapped_with_their_indent():
    lines = telling.sentence("word " * 60)
    assert len(lines) > 1
    assert max(map(len, lines)) <= 76


def test_every_title_leaves_room_for_its_time():
    for step in (*story.LIFE, *story.END):
        assert len(step.title) <= 66
