"""Stop requests: after a preemption's SIGTERM or a user's Ctrl-C a run writes a checkpoint before it ends."""

import os
import signal

_STOPPING = (
    b"\ntitans: Ctrl-C: the run ends after this step, with a checkpoint. A second Ctrl-C changes nothing, a third ends "
    b"the run at once, without the checkpoint.\n"
)


class StopSignals:
    """Counts SIGTERM and SIGINT while active; ``with StopSignals() as signals``. Old handlers come back at the end.

    The first Ctrl-C says at once what happens. The third raises KeyboardInterrupt, for users who do not want to wait
    for the checkpoint; the second does not, since torchrun passes on the Ctrl-C that its processes get from the
    terminal, too.
    """

    def __init__(self):
        self._received = {signal.SIGTERM: 0, signal.SIGINT: 0}
        self._old = {}

    def __enter__(self):
        self._old = {number: signal.signal(number, self._handle) for number in self._received}
        return self

    def __exit__(self, *error):
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _handle(self, number, _frame):
        self._received[number] += 1
        if number == signal.SIGINT and self._received[number] == 1 and int(os.environ.get("RANK", 0)) == 0:
            os.write(2, _STOPPING)  # not print: the signal may have come within one
        if self._received[signal.SIGINT] >= 3:
            raise KeyboardInterrupt

    def flags(self) -> list[float]:
        """[SIGTERM received, SIGINT received] as 0.0 or 1.0, to be summed over ranks."""
        return [float(count > 0) for count in self._received.values()]

    def decide(self, sums: list[float]) -> int:
        """The signal number to stop for, given the flags summed over ranks; 0: go on. The same on all ranks."""
        return next((int(number) for number, count in zip(self._received, sums, strict=True) if count), 0)
