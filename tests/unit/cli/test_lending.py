"""The tables of `get borrowed` and `get lent`: the other cluster, how much, used, until when, price, node."""

from msgspec.structs import replace

import make
import object_samples
from kubelend.cli import kube_objects, lending, reservations
from kubelend.cli.reservations import Side
from kubelend.wire import bodies

FOUND = bodies.Reservation(
    "rsv-1",
    "rome",
    "bonn",
    bodies.Quantities("4", "16Gi", "1"),
    bodies.ReservationStatus("Active", "in use", expires_at=make.T0 + make.HOUR),
    make.T0,
    cost=bodies.AgreedCost("0.50", "EUR"),
)
UNTIL = "2026-01-01T13:00:00Z"
USE = object_samples.RESERVATION_INSTRUCTION


def rows(role, found, *, wide=False):
    table = lending.SIDES[role].table([found], make.T0, wide=wide)
    return [line.split() for line in table.splitlines()]


def test_borrowed_of_a_broker_has_no_use_and_no_node():
    header, row = rows(Side.REQUESTER, FOUND)
    assert " ".join(header) == "NAME PHASE FROM CPU MEMORY HELD USED UNTIL PRICE NODE"
    assert row == ["rsv-1", "Active", "bonn", "4", "16Gi", "-", "-", UNTIL, "0.5", "EUR/h", "-"]


def test_borrowed_says_whether_the_provider_holds_it():
    held = bodies.HoldReport(held=False, reason="PartiallyHeld", message="1 CPU of 4 CPU held")
    found = replace(FOUND, status=replace(FOUND.status, held=held))
    assert rows(Side.REQUESTER, found)[1][5] == "PartiallyHeld"
    assert "PartiallyHeld: 1 CPU of 4 CPU held" in reservations.details(found, make.T0)


def test_borrowed_of_a_cluster_has_use_and_node():
    used = bodies.Amounts("1", "2Gi")
    found = bodies.copy_fields(FOUND, kube_objects.InstructedBody, node_name="n", used=used)
    _, row = rows(Side.REQUESTER, found)
    assert (row[6:8], row[-1]) == (["1", "2Gi"], "n")


def test_lent_names_the_requester_and_wide_what_is_left_and_the_message():
    header, row = rows(Side.PROVIDER, FOUND, wide=True)
    assert (header[2], row[2]) == ("TO", "rome")
    assert "NODE" not in header
    assert header[-4:] == ["LEFT", "GPU", "STORAGE", "MESSAGE"]
    assert row[-5:] == ["60m", "1", "-", "in", "use"]


def test_instruction_becomes_a_reservation():
    found = kube_objects.body_from_use(USE)
    assert (found.id, found.target_cluster_id, found.status.phase) == ("rsv-a-1", "b", "Active")
    assert (found.node_name, found.cost) == (USE.status.node_name, USE.spec.cost)
    over = replace(USE, status=replace(USE.status, phase="Finished"))
    assert kube_objects.body_from_use(over).status.phase == "Released"
    waiting = replace(USE, status=replace(USE.status, phase="NotPeered"))
    assert kube_objects.body_from_use(waiting).status.phase == "Reserved"
