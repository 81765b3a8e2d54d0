"""Ends a run in which some rank makes no progress, and says where each rank was."""

import contextlib
import faulthandler
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist

from titans_pt.tools.screen import say
from titans_pt.tools.stacks import stacks_to
from titans_pt.training.ranks import Ranks

ANSWER = 8
"""Intervals in which the ranks' store must answer a stalled rank, which otherwise ends by itself."""
log = logging.getLogger(__name__)


class Watchdog:
    """``with Watchdog(ranks, timeout) as watchdog``: a thread that watches training, which calls :meth:`at`.

    Every rank reports its place to the store of the process group. If no rank reaches a new place for ``timeout``
    seconds (in a collective that a peer never joined, or at a disk that does not answer), every rank writes its stacks
    and one rank prints all places. Then the process ends with status 1, and torchrun ends or restarts the others.

    Time in which the watchdog itself did not run does not count: a job that was suspended (SIGSTOP, a sleeping laptop)
    is not hanging. If a rank moves on in time, the run continues.

    Args:
        timeout: seconds; train.timeout.
    """

    def __init__(self, ranks: Ranks, timeout: float):
        self.ranks, self.timeout = ranks, timeout
        self._interval = min(5.0, timeout / 4)
        self._ended = threading.Event()
        self._main = threading.get_ident()
        self._began = time.monotonic()
        self._stood = 0.0
        self._unanswered = 0
        self._store: dist.Store  # set by __enter__ if there are other ranks; no thread uses it before
        self._threads: list[threading.Thread] = []
        self._stacks: Path | None = None
        self.at("the start", slow=True)  # imports, perhaps from a busy file system

    def at(self, where: str, slow: bool = False):
        """Notes the work that comes next, at no cost. slow: it may take five times ``timeout``."""
        self._place = (where, self.timeout * (5 if slow else 1))  # a new tuple each time: its identity is the progress

    def __enter__(self):
        if self.ranks.world_size > 1:
            # A separate connection: a thread must not wait for the one that the collectives use.
            store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
            self._store = dist.PrefixStore(f"titans-watch-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
            # Two threads: if the store's host hangs, one thread blocks on it and the other notices.
            self._threads = [threading.Thread(target=f, daemon=True) for f in (self._tell, self._look)]
            for thread in self._threads:
                thread.start()
        return self

    def __exit__(self, *error):
        self.end()

    def end(self):
        """Stops watching: later work may take any time."""
        self._ended.set()
        for thread in self._threads:
            thread.join(1.0)

    @contextlib.contextmanager
    def stacks_in(self, folder: Path) -> Iterator[None]:
        """While active, ``folder``/rank-R.txt gets the stacks of all threads of rank R when the run hangs.

        The process also writes them at SIGUSR2: the only way for a process that holds Python's lock.
        """
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank-{self.ranks.rank}.txt"
        try:
            with path.open("a") as file:
                stacks_to(file)
                self._stacks = path
                try:
                    yield
                finally:
                    self._stacks = None
                    stacks_to()
        finally:
            with contextlib.suppress(OSError):  # other ranks' files are still in the folder
                if not path.stat().st_size:
                    path.unlink()
                    folder.rmdir()

    def _tell(self):
        told = 0  # consecutive checks in which a rank was reported as stalled
        while not self._ended.wait(self._interval):
            # Report ages from a monotonic clock instead of times: hosts do not agree on the time of day.
            alive, process = time.monotonic() - self._began, os.getpid() if self._stacks else None
            place = [self._place[0], self._stood, alive, _process_space(), process]
            try:
                self._store.set(str(self.ranks.rank), json.dumps(place))
                told = told + 1 if self._stalled() else 0
                if told == 1:
                    self._write_stacks()
                elif told == 2:
                    self._wake_neighbours()
            except dist.DistError:  # the process that holds the store has ended: the run is ending
                return

    def _look(self):
        """Counts the time at the current place, and ends the process when this time is too long."""
        last, seen, asking = time.monotonic(), self._place, False
        while not self._ended.wait(self._interval):
            now = time.monotonic()
            # Count only part of a long gap: no other thread of this process ran in it.
            passed, last = min(now - last, 2 * self._interval), now
            if self._place is not seen:
                seen, self._stood, asking = self._place, 0.0, False
                continue
            self._stood += passed
            if self._stood > seen[1] and not asking:
                asking, self._unanswered = True, 0
                threading.Thread(target=self._ask, args=(seen,), daemon=True).start()  # the store may not answer
            self._unanswered += 1
            if asking and self._unanswered > ANSWER:
                self._end(self._alone())

    def _ask(self, place: tuple[str, float]):
        """Tells all ranks that this one is stalled. The first to do this ends the run, unless it moves on in time."""
        stood = self._stood
        with contextlib.suppress(dist.DistError):  # then _look ends this process
            while self._stands(place):
                if self._others_move():  # this rank waits for them, for example for their samples of an evaluation
                    self._unanswered = 0
                    self._ended.wait(self._interval)
                    continue
                if self._store.add("stalled", 1) == 1:
                    for _ in range(3):  # the others report their places and write their stacks; one pause may be a gap
                        self._unanswered = 0
                        self._ended.wait(self._interval)
                    if self._stands(place):
                        self._end(self._report())
                    self._store.set("stalled", "0")
                    log.warning("train.timeout: rank %d was at %s for more than %.0f s; it goes on",
                                self.ranks.rank, place[0], stood)  # fmt: skip
                    return
                for _ in range(6):
                    self._ended.wait(self._interval)
                    if not self._stalled():  # the first stalled rank has moved on
                        break
                    self._unanswered = 0
                else:
                    if self._stands(place):
                        self._end(None)  # the first stalled rank has printed the report

    def _stands(self, place: tuple[str, float]) -> bool:
        return self._place is place and not self._ended.is_set()

    def _others_move(self) -> bool:
        """Whether another rank has reached a new place within ``timeout``."""
        ages = [age for rank, (_, age, *_) in self._places().items() if rank != self.ranks.rank]
        return min(ages, default=self.timeout) < self.timeout

    def _stalled(self) -> bool:
        """Whether a rank is reported as stalled."""
        return self._store.check(["stalled"]) and int(self._store.get("stalled")) > 0

    def _write_stacks(self):
        """Writes the stacks of this process, and a record of its collectives (torch's flight recorder)."""
        if not (path := self._stacks):
            return
        with path.open("a") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}, {self._place[0]}\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        recorder = "_dump_nccl_trace" if dist.get_backend() == "nccl" else "_dump_fr_trace"
        if dump := getattr(torch._C._distributed_c10d, recorder, None):
            # Without the recorder's stacks: resolving their lines waits for the very collective that hangs.
            record = dump(includeStackTraces=False)
            path.with_name(f"collectives-rank-{self.ranks.rank}").write_bytes(record)

    def _wake_neighbours(self):
        """Sends SIGUSR2 to silent processes of this machine, which cannot write their stacks by themselves."""
        here = _process_space()
        for _, _, silent, space, process in self._places().values():
            if process and here and space == here and silent > 3 * self._interval:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGUSR2)

    def _places(self) -> dict[int, list]:
        """Rank -> [place, seconds at this place, seconds of silence, process space, process], of ranks that reported.

        All ranks began together: the report of the longest life is the newest.
        """
        keys = [str(rank) for rank in range(self.ranks.world_size)]
        # All at once: when a run hangs all ranks ask, and with a thousand the store would not get through one by one.
        if not self._store.check(keys):
            keys = [key for key in keys if self._store.check([key])]
        found = {int(key): json.loads(place) for key, place in zip(keys, self._store.multi_get(keys), strict=True)}
        newest = max((alive for _, _, alive, *_ in found.values()), default=0.0)
        return {rank: [place, stood + newest - alive, newest - alive, *process]
                for rank, (place, stood, alive, *process) in found.items()}  # fmt: skip

    def _end(self, message: str | None):
        if message:
            say(f"titans: error: {message}", sys.stderr)
        os._exit(1)

    def _alone(self) -> str:
        return (
            f"train.timeout: rank {self.ranks.rank} has been at {self._place[0]} for {self._place[1]:g} s, and the "
            "process that holds the ranks' store (rank 0, or torchrun's) does not answer: look at its machine first. "
            "The same command continues from the newest checkpoint"
        )

    def _report(self) -> str:
        places, lines, alike = self._places(), [], dict[str, list[int]]()
        for rank in range(self.ranks.world_size):
            where, age, silent, *_ = places.get(rank, ("", 0.0, 0.0))
            if silent > 3 * self._interval:
                lines.append(f"rank {rank} has been at {where} for {age:.0f} s and has been silent for {silent:.0f} s")
            else:
                alike.setdefault(where, []).append(rank)
        for where, ranks in sorted(alike.items(), key=lambda item: len(item[1])):  # the odd one out before a thousand
            if not where:
                lines.append(f"{_named(ranks)} never reported {'its' if len(ranks) == 1 else 'their'} place")
                continue
            first, last = (f"{end(places[rank][1] for rank in ranks):.0f}" for end in (min, max))
            spent = first if first == last else f"{first} to {last}"
            lines.append(f"{_named(ranks)} {'has' if len(ranks) == 1 else 'have'} been at {where} for {spent} s")
        frame = traceback.extract_stack(sys._current_frames()[self._main])[-1]
        stacks = f"Their stacks are in {self._stacks.parent}. " if self._stacks else ""
        return (
            f"train.timeout: no progress for {self._place[1]:g} s: {'; '.join(lines)} (rank {self.ranks.rank} in "
            f"{frame.name}, {frame.filename}:{frame.lineno}). {stacks}Look at the machine of a rank that is elsewhere "
            "or silent; if all are merely slow, raise train.timeout. The same command continues from the newest "
            "checkpoint"
        )


def _named(ranks: list[int]) -> str:
    """Ascending ranks in words: "rank 3", "ranks 0-2, 4"."""
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])]
    return f"rank{'s' * (len(ranks) > 1)} " + ", ".join(f"{a[0]}-{a[-1]}" if len(a) > 1 else str(a[0]) for a in runs)


def _process_space() -> str | None:
    """Identifies the process-id namespace, of the machine or of a container."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return None
