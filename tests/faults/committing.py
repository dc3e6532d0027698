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


def history(start: WorkingSet) -> Iterator[make.CommandRunner]:
    """The runner after each group of commands; its changes are what the group did."""
    dice = random.Random(start.revision)
    ledger = make.Recorder.restore(start)
    assert isinstance(ledger, make.Recorder)
    runner = make.CommandRunner(ledger, make.T0 + start.revision * make.SECOND)
    while True:
        runner.changes.clear()
        for _ in range(dice.randint(1, 8)):
            with suppress(KubelendError):
                _do_something(runner, dice)
        runner.pass_time(make.MINUTE)
        yield runner


def main(path: Path) -> None:
    store = SqliteStore.open(path)
    for runner in history(store.load()):
        store.commit(runner.changes, runner.ledger.revision)
        print(runner.ledger.revision, flush=True)  # noqa: T201


def _do_something(runner: make.CommandRunner, dice: random.Random) -> None:
    live = [found.id for found in runner.ledger.reservations.values() if found.is_live]
    match dice.randrange(8):
        case 0:
            runner.advertise(
                f"cluster-{dice.randrange(5)}", f"cpu={dice.randint(8, 32)},memory=64Gi"
            )
        case 1 if live:
            runner.release(dice.choice(live))
        case 2:
            runner.expire(retention=make.HOUR)
        case _:
            new_id = ReservationId(f"rsv-{runner.ledger.revision}-{dice.randrange(10**6)}")
            wanted = make.request("cpu=1,memory=1Gi", wait=dice.choice([0, 5]) * make.MINUTE)
            runner.run(
                commands.reserve(runner.ledger, wanted, new_id, commands.WaitLimits(20), runner.now)
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
