"""Ends a run in which some rank makes no progress, and says where each rank was."""

import json
import os
import sys
import threading
import time
import traceback

import torch.distributed as dist

from titans_pt.training.ranks import Ranks


class Watchdog:
    """``with Watchdog(ranks, timeout) as watchdog``: a thread that watches training, which calls :meth:`at`.

    Every rank reports its place to the store of the process group. When a rank has been at one place for ``timeout``
    seconds (a collective that a peer never joined, a disk that does not answer), one rank prints all places, and the
    process ends with status 1: torchrun then ends or restarts the others.

    Args:
        timeout: seconds; train.timeout.
    """

    def __init__(self, ranks: Ranks, timeout: float):
        self.ranks, self.timeout = ranks, timeout
        self._interval = min(5.0, timeout / 4)
        self._ended = threading.Event()
        self._main = threading.get_ident()
        self._store = None
        self._threads: list[threading.Thread] = []
        self.at("the start")

    def at(self, where: str, slow: bool = False):
        """Notes what comes next; costs nothing. slow: it may take five times as long."""
        self._place = (where, time.time())
        self._limit = self.timeout * (5 if slow else 1)

    def __enter__(self):
        if self.ranks.world_size > 1:
            # A separate connection: a thread must not wait for the one that the collectives use.
            store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
            self._store = dist.PrefixStore(f"titans-watch-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
            # Two threads: a store whose host hangs must not keep us from noticing that.
            self._threads = [threading.Thread(target=f, daemon=True) for f in (self._tell, self._look)]
            for thread in self._threads:
                thread.start()
        return self

    def __exit__(self, *error):
        self._ended.set()
        for thread in self._threads:
            thread.join(1.0)

    def _tell(self):
        while not self._ended.wait(self._interval):
            where, since = self._place
            try:
                self._store.set(str(self.ranks.rank), json.dumps([where, since, time.time()]))
            except dist.DistError:  # the store went with the process that held it: the run is ending
                return

    def _look(self):
        while not self._ended.wait(self._interval):
            if time.time() - self._place[1] > self._limit:
                threading.Timer(6 * self._interval, self._end, [self._alone()]).start()
                try:
                    self._stop()
                except dist.DistError:
                    self._end(self._alone())

    def _stop(self):
        if self._store.add("stalled", 1) == 1:
            time.sleep(2 * self._interval)  # for the others to report their places
            self._end(self._report())
        time.sleep(4 * self._interval)  # the report must be out before torchrun ends everyone
        os._exit(1)

    def _end(self, message: str):
        print(f"titans: error: {message}", file=sys.stderr, flush=True)
        os._exit(1)

    def _alone(self) -> str:
        return (
            f"train.timeout: rank {self.ranks.rank} has been at {self._place[0]} for {self._limit:g} s, and the "
            "process that holds the ranks' store (rank 0, or torchrun's) does not answer: look at its machine first. "
            "The same command continues from the newest checkpoint"
        )

    def _report(self) -> str:
        now, places = time.time(), []
        for rank in range(self.ranks.world_size):
            if not self._store.check([str(rank)]):
                places.append(f"rank {rank} never reported its place")
                continue
            where, since, told = json.loads(self._store.get(str(rank)))
            silent = f" and has been silent for {now - told:.0f} s" if now - told > 3 * self._interval else ""
            places.append(f"rank {rank} has been at {where} for {now - since:.0f} s{silent}")
        frame = traceback.extract_stack(sys._current_frames()[self._main])[-1]
        return (
            f"train.timeout: no progress for {self._limit:g} s: {'; '.join(places)} (rank {self.ranks.rank} in "
            f"{frame.name}, {frame.filename}:{frame.lineno}). Look at the machine of a rank that is elsewhere or "
            "silent; if all are merely slow, raise train.timeout. The same command continues from the newest "
            "checkpoint"
        )
