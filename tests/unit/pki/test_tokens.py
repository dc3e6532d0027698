"""Tokens: unguessable, easy to paste, and never repeated by an error."""

import hashlib
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import make
from kubelend.core import enrolment
from kubelend.core.enrolment import JoinPolicy
from kubelend.core.errors import InvalidInput, TokenRefused
from kubelend.core.lifecycle import Role
from kubelend.core.members import Token, TokenId
from kubelend.pki import tokens

REFUSAL = (
    "not a valid token: expected kl1.ID.SECRET, with 10 and 32 letters or digits;"
    " copy the complete output of `kubelend create token`"
)
TOKEN = "kl1.abcdefghij.abcdefghijklmnopqrstuvwxyz234567"


def test_a_new_token_has_an_id_and_160_random_bits():
    text, name, digest = tokens.new_token()
    assert re.fullmatch(r"kl1\.[a-z2-7]{10}\.[a-z2-7]{32}", text)
    assert tokens.parse_token(text) == (name, text.rpartition(".")[2])
    assert digest == hashlib.sha256(text.rpartition(".")[2].encode()).hexdigest()


def test_no_two_tokens_share_anything():
    made = [tokens.new_token() for _ in range(200)]
    assert len({token.id for token in made}) == len({token.digest for token in made}) == 200
    # Each place of the secret takes many values: none of its bits is fixed.
    secrets = [tokens.parse_token(token.text).secret for token in made]
    assert all(len(set(letters)) > 20 for letters in zip(*secrets, strict=True))


def test_no_other_secret_than_its_own_passes_for_a_token():
    desk, one, other = make.desk(), tokens.new_token(), tokens.new_token()
    for made in (one, other):
        kept = Token(
            TokenId(made.id), made.digest, Role.CLUSTER, make.T0, "alice", make.T0 + make.HOUR
        )
        desk.run(enrolment.create_token(desk.ledger, kept, JoinPolicy(), desk.now))
    own, others = tokens.parse_token(one.text).secret, tokens.parse_token(other.text).secret
    mine = TokenId(one.id)
    assert enrolment.check_token(desk.ledger, mine, tokens.secret_digest(own)).id == mine
    for wrong in (
        tokens.secret_digest(others),
        tokens.secret_digest(own[:-1]),
        tokens.secret_digest(""),
        own,
        "",
    ):
        with pytest.raises(TokenRefused):
            enrolment.check_token(desk.ledger, mine, wrong)


def test_white_space_around_a_pasted_token_is_nothing():
    assert tokens.parse_token(f"  {TOKEN}\n").id == "abcdefghij"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "kl1",
        TOKEN[:-1],
        TOKEN + "a",
        TOKEN.upper(),
        TOKEN.replace("kl1", "kl2"),
        TOKEN.replace("abcdefghij.", "abcdefghi.", 1),
        TOKEN.replace("a", "1"),
        TOKEN.replace("kl1.", ""),
        TOKEN + "\x00",
        f"{TOKEN}\n{TOKEN}",
        TOKEN + " " * 1000,
        TOKEN * 100_000,
    ],
    ids=lambda text: repr(text)[:70],
)
def test_what_is_no_token_is_refused(text):
    with pytest.raises(InvalidInput, match="not a valid token"):
        tokens.parse_token(text)


@settings(max_examples=500)
@given(st.text(max_size=60) | st.from_regex(r"kl[0-9]\.[a-z2-9]{9,11}\.[a-z2-9]{30,34}\n?"))
@example(TOKEN)
@example("\ud800")
def test_any_text_is_a_token_or_refused_without_a_word_of_it(text):
    try:
        parts = tokens.parse_token(text)
    except InvalidInput as refusal:
        said = str(refusal)
    else:
        assert f"kl1.{parts.id}.{parts.secret}" == text.strip()
        return
    assert said == REFUSAL


def test_no_secret_is_shown_by_what_prints_a_token():
    made = tokens.new_token()
    parts = tokens.parse_token(made.text)
    shown = f"{made} {made!r} {parts} {parts!r} {[made, parts]}"
    assert made.id in shown
    assert parts.secret not in shown
