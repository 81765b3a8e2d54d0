"""Stop requests: a run writes a checkpoint before it ends.

Requests are SIGTERM (preemption), Ctrl-C, SIGHUP (the terminal closes), and SIGUSR1, which clusters send when a job's
time is nearly up (SLURM's --signal, Grid Engine's -notify).
"""

import contextlib
import ctypes
import os
import signal
import sys

from titans_pt.tools.processes import place

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""Signals after which a run ends with a checkpoint and the status 128 + the signal."""
_PR_SET_PDEATHSIG = 1
"""Operation of prctl(2), from <linux/prctl.h>."""
_STOPPING = (
    b"\ntitans: Ctrl-C: the run ends after this step, with a checkpoint. A second Ctrl-C changes nothing, a third ends "
    b"the run at once, without the checkpoint.\n"
)


def hangs_up() -> bool:
    """Whether SIGHUP reaches this process; under nohup it is ignored."""
    return signal.getsignal(signal.SIGHUP) != signal.SIG_IGN


def stop_with_launcher():
    """Asks Linux to send this process SIGTERM if its launcher (torchrun or deepspeed) dies, by kill -9 for example.

    Without a launcher nothing would stop or restart the run.
    """
    launched = "TORCHELASTIC_RUN_ID" in os.environ or "CROSS_RANK" in os.environ  # the latter is DeepSpeed's
    if launched and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class StopSignals:
    """Counts the signals of STOPS while active: ``with StopSignals() as signals``.

    The old handlers are restored at the end. Under nohup SIGHUP stays ignored: the run outlives its terminal.

    The first Ctrl-C prints at once that the run is stopping. The third raises KeyboardInterrupt, for users who do not
    want to wait for the checkpoint. The second does not, because torchrun passes on each Ctrl-C that its processes also
    get from the terminal.
    """

    def __init__(self):
        self._received = dict.fromkeys(STOPS, 0)
        self._old = {}

    def __enter__(self):
        heard = [number for number in STOPS if number != signal.SIGHUP or hangs_up()]
        self._old = {number: signal.signal(number, self._handle) for number in heard}
        stop_with_launcher()
        return self

    def __exit__(self, *error):
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _handle(self, number, _frame):
        self._received[number] += 1
        if number == signal.SIGINT and self._received[number] == 1 and place(strict=False).rank == 0:
            with contextlib.suppress(OSError):  # the terminal may have closed
                os.write(2, _STOPPING)  # not print: the signal may have interrupted a print
        if self._received[signal.SIGINT] >= 3:
            raise KeyboardInterrupt

    def flags(self) -> list[float]:
        """1.0 for each received signal of STOPS, 0.0 for the others; to be summed over ranks."""
        return [float(count > 0) for count in self._received.values()]

    def decide(self, sums: list[float]) -> int:
        """The signal number to stop for, given the flags summed over ranks; 0: go on. The same on all ranks."""
        return next((int(number) for number, count in zip(self._received, sums, strict=True) if count), 0)
