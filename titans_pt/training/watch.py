"""Ends a run in which some rank no longer gets on, and says where every rank stood."""

import json
import logging
import os
import sys
import threading
import time
import traceback

import torch.distributed as dist

from titans_pt.training.ranks import Ranks

log = logging.getLogger(__name__)


class Watch:
    """``with Watch(ranks, timeout) as watch``: a thread beside training, told by :meth:`at` where that stands.

    Every rank tells its place to the store of the process group. A rank that has stood at one place for ``timeout``
    seconds (a collective that one of its peers never joined, a disk that does not answer) has one of them print all
    places, and ends its process with status 1: torchrun then ends or restarts the others.

    Args:
        timeout: seconds; train.timeout.
    """

    def __init__(self, ranks: Ranks, timeout: float):
        self.ranks, self.timeout = ranks, timeout
        self._interval = min(5.0, timeout / 4)
        self._ended = threading.Event()
        self._main = threading.get_ident()
        self._store = self._thread = None
        self.at("the start")

    def at(self, where: str):
        """Notes what comes next; costs nothing."""
        self._place = (where, time.time())

    def __enter__(self):
        if self.ranks.world_size > 1:
            # A connection of its own: a thread must not wait for the one that the collectives use.
            store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
            self._store = dist.PrefixStore(f"titans-watch-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
            self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *error):
        self._ended.set()
        if self._thread:
            self._thread.join()

    def _run(self):
        while not self._ended.wait(self._interval):
            try:
                self._tell()
                if time.time() - self._place[1] > self.timeout:
                    self._stop()
            except dist.DistError as error:  # the store went with the process that held it
                log.info("the watch over the ranks has ended: %s", error)
                return

    def _tell(self):
        where, since = self._place
        self._store.set(str(self.ranks.rank), json.dumps([where, since, time.time()]))

    def _stop(self):
        if self._store.add("stalled", 1) == 1:
            time.sleep(2 * self._interval)  # for the others to tell their places
            print(f"titans: error: {self._report()}", file=sys.stderr, flush=True)
        else:
            time.sleep(4 * self._interval)  # the report must be out before torchrun ends everyone
        os._exit(1)

    def _report(self) -> str:
        now, places = time.time(), []
        for rank in range(self.ranks.world_size):
            if not self._store.check([str(rank)]):
                places.append(f"rank {rank} never told where it is")
                continue
            where, since, told = json.loads(self._store.get(str(rank)))
            silent = f" and has been silent for {now - told:.0f} s" if now - told > 3 * self._interval else ""
            places.append(f"rank {rank} stands at {where} for {now - since:.0f} s{silent}")
        frame = traceback.extract_stack(sys._current_frames()[self._main])[-1]
        return (
            f"train.timeout: nothing has moved for {self.timeout:g} s: {'; '.join(places)} (rank {self.ranks.rank} in "
            f"{frame.name}, {frame.filename}:{frame.lineno}). Look at the machine of a rank that stands elsewhere or "
            "is silent; if all are merely slow, raise train.timeout. The same command continues from the newest "
            "checkpoint"
        )
