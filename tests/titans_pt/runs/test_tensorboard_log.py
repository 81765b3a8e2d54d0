import sys

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
