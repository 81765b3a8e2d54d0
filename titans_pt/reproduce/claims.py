"""Claims on work among processes that share a folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from titans_pt.tools.locks import sign, take


@contextmanager
def claim(path: Path) -> Iterator[int | None]:
    """Locks ``path`` for this process and yields the file's descriptor, or None where another process holds it.

    A child that inherits the descriptor also holds it: see :mod:`titans_pt.tools.locks`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        if not take(file.fileno(), path, "start one process only"):
            yield None
            return
        sign(file)
        yield file.fileno()
