"""Work on a separate thread."""

import threading

import pytest

from titans_pt.training.background import within


def test_work_within_a_time_returns_raises_or_is_left_behind():
    assert within(60.0, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        within(60.0, lambda: 1 / 0)
    never = threading.Event()
    with pytest.raises(TimeoutError):
        within(0.05, never.wait)
    never.set()
