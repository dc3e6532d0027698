"""The tree of errors is drawn in a docstring; the classes, their codes and the drawing must agree."""

import re

import pytest

from kubelend.core import errors
from kubelend.core.errors import Hidden, KubelendError, NotFound


def subclasses(error):
    for child in error.__subclasses__():
        yield child
        yield from subclasses(child)


ERRORS = [KubelendError, *subclasses(KubelendError)]
SEEN = [error for error in ERRORS if error is not Hidden]


def drawn_tree():
    """(name, depth) of each line of the drawing, from its branches of four columns each."""
    for line in errors.__doc__.splitlines():
        match = re.match(r"    ([│├└─ ]*)([A-Z]\w+)(?:  |$)", line)
        if match:
            yield match[2], len(match[1]) // 4


def class_tree(error=KubelendError, depth=0):
    yield error.__name__, depth
    for child in error.__subclasses__():
        yield from class_tree(child, depth + 1)


def test_drawing_shows_the_classes():
    assert list(drawn_tree()) == list(class_tree())


def test_code_is_the_name_of_the_class():
    assert [error.code for error in SEEN] == ["Internal", *(error.__name__ for error in SEEN[1:])]
    assert Hidden.code == NotFound.code, "indistinguishable from a missing one"


def test_what_may_help_when_tried_again():
    assert " ".join(error.__name__ for error in ERRORS if error.retryable) == (
        "TooSlow IdentityInUse LimitExceeded RateLimited QueueFull Unavailable StoreFailed NotReady"
        " NotLeader BrokerUnreachable"
    )


@pytest.mark.parametrize("error", ERRORS)
def test_every_error_is_one_sentence_and_a_hint(error):
    assert str(error("it broke")) == "it broke"
    assert str(error("it broke", hint="mend it")) == "it broke; mend it"
    assert error.__doc__


def test_limits_say_when_to_come_back():
    assert errors.QueueFull("full").retry_after == 1.0
    assert errors.RateLimited("slower", retry_after=7.5).retry_after == 7.5
