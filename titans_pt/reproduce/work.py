"""Work through the runs of a study, one after the other, together with all other processes that see the folder."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from titans_pt.reproduce.claims import claim
from titans_pt.reproduce.records import Records
from titans_pt.reproduce.runs import Run, in_order

PATIENCE = 20.0
"""Seconds between two checks of runs that wait for another process."""


def work(runs: Sequence[Run], folder: Path, records: Records, ranks: int, finished: Callable[[], None]) -> int:
    """Complete the runs that no other process is working on; return 0, or the status of a training that was stopped.

    It waits for a run whose learning rate other processes are still choosing, but not for runs that others train.

    Args:
        folder: folder of the claims.
        finished: called after each run.
    """
    while True:
        waiting, elsewhere = False, []
        for run in in_order(runs, records):
            if (ready := run.settled(records)) is None:
                waiting = True
                continue
            if not ready.missing(ready.record(records)):
                continue
            with claim(folder / "claims" / ready.name) as descriptor:
                if descriptor is None:
                    elsewhere.append(ready.name)
                    continue
                if not (undone := ready.missing(ready.record(records))):  # finished while we looked elsewhere
                    break
                print(f"== {ready.name}: {', '.join(undone)}", flush=True)
                if status := ready.complete(records, ranks, descriptor):
                    return status
            finished()
            break  # start from the top: the most useful runs come first
        else:
            if not waiting:
                if elsewhere:
                    print(f"other processes are at work on {', '.join(elsewhere)}", flush=True)
                return 0
            time.sleep(PATIENCE)
