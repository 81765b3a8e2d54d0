"""Work on a separate thread, so that training need not wait for it."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class BackgroundTask:
    """A thread that runs one task at a time while training goes on, such as writing a checkpoint."""

    def __init__(self):
        self._pool = ThreadPoolExecutor(1, "background")
        self._work: Future | None = None

    def start(self, work: Callable[[], None]):
        """Begins ``work``. Call :meth:`wait` for earlier work first."""
        self._work = self._pool.submit(work)

    @property
    def failed(self) -> bool:
        """Whether the work has ended with an exception, which :meth:`wait` raises."""
        return self._work is not None and self._work.done() and self._work.exception() is not None

    def wait(self):
        """Waits until the work is done; raises what it raised, once."""
        work, self._work = self._work, None
        if work is not None:
            work.result()

    def settle(self):
        """Waits for the work and ignores its exception."""
        work, self._work = self._work, None
        if work is not None:
            work.exception()

    def close(self):
        """Waits for the work without raising what it raised."""
        self._pool.shutdown()
