"""Work that need not hold up training, on a thread of its own."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class BackgroundTask:
    """At most one piece of work at a time beside the training steps, such as writing a checkpoint."""

    def __init__(self):
        self._pool = ThreadPoolExecutor(1, "background")
        self._work: Future | None = None

    def start(self, work: Callable[[], None]):
        """Begins ``work``; what was begun before must have been waited for."""
        self._work = self._pool.submit(work)

    @property
    def failed(self) -> bool:
        """Whether the work has ended with an exception, which :meth:`wait` raises."""
        return self._work is not None and self._work.done() and self._work.exception() is not None

    def wait(self):
        """Returns when there is no work left, or raises what it raised, once."""
        work, self._work = self._work, None
        if work is not None:
            work.result()

    def close(self):
        """Lets work that was begun come to its end, whatever that is."""
        self._pool.shutdown()
