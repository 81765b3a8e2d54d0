"""Work on a separate thread, so that the caller need not wait for it, or not forever."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def within(seconds: float, action: Callable[[], T]) -> T:
    """Returns what ``action`` returns, or raises what it raises.

    Raises:
        TimeoutError: it takes more than ``seconds``; it then goes on in a thread that does not keep the process alive.
    """
    result: Future[T] = Future()

    def run():
        try:
            result.set_result(action())
        except Exception as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result.result(timeout=seconds)


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

    def close(self):
        """Waits for the work without raising what it raised."""
        self._pool.shutdown()
