import errno
import sys
import threading

import pytest

from titans_pt.errors import UserError
from titans_pt.runs.folder import RunFolder
from titans_pt.runs.tensorboard_log import TensorBoardLog


def read(folder: RunFolder) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder.tensorboard))
    events.Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_a_resume_continues_the_curves_without_the_steps_that_come_again(tmp_path):
    folder = RunFolder(tmp_path)
    for resumed, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        log = TensorBoardLog(True, folder, resumed)
        for step in steps:
            log.write(step, {"train/loss": step + resumed, "train/mfu": None})
        log.close()
    assert read(folder) == {"train/loss": [(1, 1.0), (2, 2.0), (3, 5.0), (4, 6.0)]}


def test_it_is_off_unless_it_is_wanted(tmp_path):
    log = TensorBoardLog(False, RunFolder(tmp_path), 0)
    log.write(1, {"loss": 1.0})
    log.close()
    assert list(tmp_path.iterdir()) == []


def test_without_the_package_one_line_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UserError, match=r"run.tensorboard: .* pip install 'titans-pt\[tensorboard\]'"):
        TensorBoardLog(True, RunFolder(tmp_path), 0)


def test_a_full_disk_is_one_error_without_a_traceback(tmp_path, monkeypatch):
    """The writer's thread fails, and would print the traceback of its own error before our line."""
    printed = []
    monkeypatch.setattr(threading, "excepthook", printed.append)
    folder = RunFolder(tmp_path)
    log = TensorBoardLog(True, folder, 0)
    log.write(1, {"loss": 1.0})
    file = next(folder.tensorboard.iterdir())
    file.unlink()
    file.mkdir()
    with pytest.raises(OSError) as error:
        for step in range(2, 5):
            log.write(step, {"loss": 1.0})
    assert (error.value.errno, error.value.filename) == (errno.EISDIR, str(folder.tensorboard))
    log.write(9, {"loss": 1.0})  # nothing more is written
    log.close()
    for thread in threading.enumerate():
        if type(thread).__module__.startswith("tensorboard."):
            thread.join(5)
    assert not printed


def test_errors_of_other_threads_are_printed(tmp_path, monkeypatch):
    printed = []
    monkeypatch.setattr(threading, "excepthook", lambda told: printed.append(told.exc_type))
    before = threading.excepthook
    log = TensorBoardLog(True, RunFolder(tmp_path), 0)
    thread = threading.Thread(target=lambda: (tmp_path / "missing").read_bytes())
    thread.start()
    thread.join()
    log.close()
    assert printed == [FileNotFoundError] and threading.excepthook is before
