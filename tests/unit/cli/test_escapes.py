"""What others have written cannot speak to a terminal in our name, and every row stays one line."""

import json
from datetime import UTC, datetime

import msgspec
import pytest
import yaml

from kubelend.cli import (
    clusters,
    limits,
    main,
    members,
    output,
    reservation_views,
    reservations,
)
from kubelend.cli.output import Format
from kubelend.core.errors import Forbidden, KubelendError
from kubelend.kits import tables
from kubelend.wire import admin_bodies, bodies

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
ACTIVE = [*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029, *range(0x202A, 0x202F)]
ACTIVE += [0x061C, 0x200E, 0x200F, *range(0x2066, 0x206A), 0xD800]
HOSTILE = "a\x1b[2K\r\n\x00\x9b31m\u202eb\u2028c\x85d"
SHOWN = r"a\x1b[2K\r\n\x00\x9b31m\u202eb\u2028c\x85d"
AMOUNTS = bodies.Quantities("1", "1Gi")
CLUSTER = bodies.Cluster(
    bodies.Advertisement(
        HOSTILE,
        bodies.Metrics(AMOUNTS, AMOUNTS, AMOUNTS, AMOUNTS, AMOUNTS),
        region=HOSTILE,
        labels={HOSTILE: HOSTILE},
        endpoint_url=HOSTILE,
        cost=bodies.Cost("1", "1", currency=HOSTILE),
    ),
    bodies.ClusterStatus(
        HOSTILE,
        True,
        "1",
        HOSTILE,
        last_update_time=NOW,
        valid_until=NOW,
        cordoned=True,
        cordon_reason=HOSTILE,
        message=HOSTILE,
    ),
)
RESERVATION = bodies.Reservation(
    id=HOSTILE,
    requester_id=HOSTILE,
    target_cluster_id=HOSTILE,
    requested_resources=AMOUNTS,
    status=bodies.ReservationStatus(HOSTILE, HOSTILE, HOSTILE),
    created_at=NOW,
)
EXPLANATION = bodies.Explanation(
    summary=HOSTILE,
    total=1,
    fitting=0,
    refusals={},
    candidates=[bodies.Candidate(HOSTILE, False, [HOSTILE])],
    remedy=bodies.Suggestion(HOSTILE, HOSTILE),
    quota=[HOSTILE],
)
MEMBER = admin_bodies.Member(role=HOSTILE, name=HOSTILE, standing=HOSTILE, asked_at=NOW)


@pytest.mark.parametrize("code", ACTIVE, ids=hex)
def test_what_a_terminal_would_obey_is_written_out(code):
    written = tables.sanitize_line(f"a{chr(code)}b")
    assert written.isascii()
    assert written.isprintable()
    assert written[:2] == "a\\"
    assert written[-1] == "b"


@pytest.mark.parametrize("text", ["", "eu-west 1", "Zürich", "東京", "a\\b", "50 €", "👩‍🚀"])
def test_all_else_stays_as_it_is(text):
    assert tables.sanitize_line(text) == tables.sanitize_lines(text) == text


def test_lines_of_our_own_stay_lines():
    assert tables.sanitize_lines("one\x1b\ntwo\r") == "one\\x1b\ntwo\\r"


def test_a_table_has_one_line_for_each_row_and_its_columns_line_up():
    header, first, second = tables.format_table(("A", "B"), [(HOSTILE, "x"), ("y", HOSTILE)]).split(
        "\n"
    )
    assert first == f"{SHOWN}  x"
    assert header.index("B") == second.index(SHOWN) == len(f"{SHOWN}  ")
    assert tables.format_row((HOSTILE, ""), (3, 3)) == f"{SHOWN}  -"
    assert tables.format_pairs([("Name", HOSTILE), (HOSTILE, "x")]).count("\n") == 1


VIEWS = {
    "clusters": (clusters.cluster_table([CLUSTER], NOW, wide=True), 2),
    "a cluster": (clusters.cluster_details(CLUSTER, NOW), 16),
    "a drained cluster": (
        clusters.drain_summary(bodies.DrainResult(CLUSTER, [RESERVATION]), NOW),
        4,
    ),
    "reservations": (reservation_views.table([RESERVATION], NOW, wide=True), 2),
    "a reservation": (reservation_views.details(RESERVATION, NOW), 8),
    "a sentence": (reservation_views.summary(RESERVATION, NOW), 1),
    "an explanation": (reservations.explanation_text(EXPLANATION, None), 8),
    "members": (members.member_table([MEMBER], NOW, wide=True), 2),
    "a member": (members.approval_summary(MEMBER, NOW), 1),
    "a policy": (limits.policy_text(admin_bodies.PolicyStatus(HOSTILE), None), 1),
}
"""How bodies of a broker are shown to people, and how many lines that takes."""


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_of_hostile_bodies_has_no_line_of_theirs(name):
    text, count = VIEWS[name]
    assert SHOWN in text
    assert len(text.split("\n")) == count
    assert all(line.isprintable() for line in text.split("\n"))


def test_notes_and_errors_are_one_line(capsys):
    output.note(HOSTILE)
    output.print_error(Forbidden(HOSTILE, hint=HOSTILE))
    note, error, end = capsys.readouterr().err.split("\n")
    assert note == SHOWN
    assert error.startswith(r"error: a\x1b[2K \x00\x9b31m\u202eb c d; a\x1b")
    assert error.isprintable()
    assert end == ""


@pytest.mark.parametrize("flags", [[], ["--debug"]], ids=["", "debug"])
def test_an_error_that_a_broker_words_ends_no_line(flags, monkeypatch, capsys):
    def fail(*_):
        raise KubelendError(HOSTILE)

    monkeypatch.setattr("kubelend.cli.app.Versions", fail)
    assert main.run([*flags, "version"]) == 1
    text = capsys.readouterr().err
    assert all(line.isprintable() for line in text.split("\n"))
    assert text.count("\n") == 1 or flags


class Body(msgspec.Struct):
    """Anything that is shown."""

    name: str


def test_names_are_lines_and_none_is_no_line(capsys):
    output.show(Body(HOSTILE), Format.NAME, text=str, names=[HOSTILE, "b"])
    assert capsys.readouterr().out == f"{SHOWN}\nb\n"
    output.show(Body(HOSTILE), Format.NAME, text=str, names=[])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("code", ACTIVE[:-1], ids=hex)
def test_programs_read_the_very_value_and_a_terminal_obeys_nothing(code):
    body = Body(f"a{chr(code)}é")
    for text, value in (
        (output.json(body), json.loads),
        (output.json_line(body), json.loads),
        (output.yaml(body), yaml.safe_load),
    ):
        assert value(text) == {"name": body.name}
        assert all(line.isprintable() for line in text.split("\n"))


def test_ordinary_letters_are_not_written_out():
    assert output.yaml(Body("Zürich")) == "name: Zürich\n"
    assert '"Zürich"' in output.json(Body("Zürich"))
