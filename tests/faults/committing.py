"""A process that does nothing but commit, to be killed: `python committing.py PATH`.

It goes on from what the store holds, and prints the revision after each commit. What it does follows
from where it starts, so the test can do the same again and compare.
"""

import random
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import make
from kubelend.core import commands
from kubelend.core.errors import KubelendError
from kubelend.core.events import WorkingSet
from kubelend.core.models import ReservationId
from kubelend.stores.sqlite import SqliteStore


def history(start: WorkingSet) -> Iterator[make.Desk]:
    """The desk after each group of commands; its changes are what the group did."""
    dice = random.Random(start.revision)
    ledger = make.Recorder.restore(start)
    assert isinstance(ledger, make.Recorder)
    desk = make.Desk(ledger, make.T0 + start.revision * make.SECOND)
    while True:
        desk.changes.clear()
        for _ in range(dice.randint(1, 8)):
            with suppress(KubelendError):
                _do_something(desk, dice)
        desk.pass_time(make.MINUTE)
        yield desk


def main(path: Path) -> None:
    store = SqliteStore.open(path)
    for desk in history(store.load()):
        store.commit(desk.changes, desk.ledger.revision)
        print(desk.ledger.revision, flush=True)  # noqa: T201


def _do_something(desk: make.Desk, dice: random.Random) -> None:
    live = [found.id for found in desk.ledger.reservations.values() if found.is_live]
    match dice.randrange(8):
        case 0:
            desk.advertise(f"cluster-{dice.randrange(5)}", f"cpu={dice.randint(8, 32)},memory=64Gi")
        case 1 if live:
            desk.release(dice.choice(live))
        case 2:
            desk.expire(retention=make.HOUR)
        case _:
            new_id = ReservationId(f"rsv-{desk.ledger.revision}-{dice.randrange(10**6)}")
            wanted = make.request("cpu=1,memory=1Gi", wait=dice.choice([0, 5]) * make.MINUTE)
            desk.run(commands.reserve(desk.ledger, wanted, new_id, 20, desk.now))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
