"""A run's own config.yaml means that run, wherever its folder lies and from wherever it is read."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from titans_pt.config.files import load_config, load_stored
from titans_pt.config.names import ABOUT, STARTED_IN
from titans_pt.runs.folder import RunFolder

TEXT = """
run: {dir: runs/short}
data:
  dir: data/small
  sources: [{kind: files, path: corpora/text.jsonl}]
  validation_sources: [{kind: indexed, path: corpora/tokens}]
evaluation: {needle: {essays: essays}}
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with data and a run that was started there with relative paths."""
    folder = tmp_path / "project"
    for name in ("data/small", "essays", "corpora", "runs/short"):
        (folder / name).mkdir(parents=True)
    for name in ("text.jsonl", "tokens.bin", "tokens.idx"):
        (folder / "corpora" / name).write_text("")
    monkeypatch.chdir(folder)
    Path("given.yaml").write_text(TEXT)
    RunFolder("runs/short").write_settings(load_config("given.yaml"))
    (tmp_path / "elsewhere").mkdir()
    return folder


def places(config):
    return [config.run.dir, config.data.dir, config.data.sources[0].path, config.evaluation.needle.essays,
            config.data.validation_sources[0].path]  # fmt: skip


WHERE = ["data/small", "corpora/text.jsonl", "essays", "corpora/tokens"]


def test_where_it_was_started_nothing_changes(project):
    assert places(load_config("runs/short/config.yaml")) == ["runs/short", *WHERE]
    assert load_config("runs/short/config.yaml") == load_config("given.yaml") == load_stored("runs/short/config.yaml")


@pytest.mark.parametrize("noted", [True, False], ids=["", "of an earlier version"])
def test_from_elsewhere_paths_count_from_where_it_was_started(project, monkeypatch, noted):
    if not noted:
        Path("runs/short", ABOUT).write_text("{}")
    monkeypatch.chdir(project.parent / "elsewhere")
    path = project / "runs/short/config.yaml"
    expected = [str(project / "runs/short"), *(str(project / name) for name in WHERE)]
    assert places(load_config(path)) == places(load_stored(path)) == expected
    assert load_config(path, ["data.dir=mine"]).data.dir == "mine", "the command line's counts from here"


def test_paths_of_a_task_count_from_there_and_names_stay_names(project, monkeypatch):
    Path("corpora/own.csv").write_text("")
    for name, series in (("runs/own", "corpora/own.csv"), ("runs/known", "elecdemand")):
        Path(name).mkdir()
        RunFolder(name).write_settings(load_config("forecast/lmm", [f"run.dir={name}", f"forecast.series={series}"]))
    monkeypatch.chdir(project.parent / "elsewhere")
    for load in (load_config, load_stored):
        assert load(project / "runs/own/config.yaml").section("forecast")["series"] == str(project / "corpora/own.csv")
        assert load(project / "runs/known/config.yaml").section("forecast")["series"] == "elecdemand"


OWN_TASK = """
from titans_pt.config import PathName, Section
from titans_pt.tasks.base import TASKS, Task

@TASKS.register
class Own(Task):
    name = "own_with_a_path"

    class Settings(Section):
        path: PathName
"""


def test_paths_of_a_task_of_ones_own(project, monkeypatch):
    """Its module is imported before its section is read."""
    (project / "modules").mkdir()
    Path("modules/own_with_a_path.py").write_text(OWN_TASK)
    Path("corpora/own.csv").write_text("")
    monkeypatch.syspath_prepend(project / "modules")
    Path("runs/own").mkdir()
    Path("runs/own", ABOUT).write_text(json.dumps({STARTED_IN: str(project)}))
    Path("runs/own/config.yaml").write_text(
        "{task: own_with_a_path, run: {dir: runs/own, imports: [own_with_a_path]}, "
        "own_with_a_path: {path: corpora/own.csv}}"
    )
    monkeypatch.chdir(project.parent / "elsewhere")
    found = load_stored(project / "runs/own/config.yaml").section("own_with_a_path")
    assert found["path"] == str(project / "corpora/own.csv")


@pytest.mark.parametrize("noted", [True, False], ids=["", "of an earlier version"])
@pytest.mark.parametrize("place", ["runs/best", "../elsewhere/best"])
def test_a_run_that_was_moved_is_the_run_where_it_now_lies(project, place, noted):
    if not noted:
        Path("runs/short", ABOUT).write_text("{}")
    shutil.move("runs/short", place)
    assert places(load_config(f"{place}/config.yaml")) == [place, *WHERE]
    assert load_config(f"{place}/config.yaml", ["run.dir=other"]).run.dir == "other"


def test_a_copy_of_a_run_whose_project_may_not_be_entered(project, monkeypatch):
    """A colleague's home, for example: its paths stay as they are."""
    shutil.copytree("runs/short", "../elsewhere/short")
    stat = os.stat
    monkeypatch.chdir(project.parent / "elsewhere")

    def guarded(path, *args, **kwargs):
        if not isinstance(path, int) and Path(path).is_relative_to(project):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", guarded)
    assert places(load_config(project.parent / "elsewhere/short/config.yaml")) == [
        str(project.parent / "elsewhere/short"), *WHERE,
    ]  # fmt: skip


def test_a_project_that_was_moved(project, monkeypatch):
    shutil.move(project, project.parent / "renamed")
    renamed = project.parent / "renamed"
    monkeypatch.chdir(project.parent / "elsewhere")
    assert places(load_config("../renamed/runs/short/config.yaml"))[1:] == [str(renamed / name) for name in WHERE]


def test_a_copy_of_the_settings_alone_is_no_run(project):
    shutil.copy("runs/short/config.yaml", "mine.yaml")
    Path("new").mkdir()
    shutil.copy("runs/short/config.yaml", "new")
    assert load_config("mine.yaml").run.dir == load_config("new/config.yaml").run.dir == "runs/short"


def test_inside_its_folder(project, monkeypatch):
    monkeypatch.chdir("runs/short")
    config = load_config("config.yaml")
    assert (config.run.dir, config.data.dir) == (str(project / "runs/short"), str(project / "data/small"))


def test_paths_of_a_run_are_not_expanded_again(project, monkeypatch):
    """Paths were expanded when the run was started; an earlier version took ~ for the name of a folder."""
    Path("given.yaml").write_text("run: {dir: ~/run}\ndata: {dir: $PLACE/data}")
    monkeypatch.setenv("HOME", str(project))
    monkeypatch.setenv("PLACE", str(project))
    config = load_config("given.yaml")
    RunFolder(config.run.dir).write_settings(config)
    monkeypatch.setenv("PLACE", "/nowhere")
    assert load_config(project / "run/config.yaml").data.dir == str(project / "data")
    text = Path("run/config.yaml").read_text()
    Path("run/config.yaml").write_text(text.replace(f"{project}/data", "~/data"))
    assert load_config("run/config.yaml").data.dir == "~/data"


def test_what_is_noted_is_the_folder(project):
    assert json.loads(Path("runs/short", ABOUT).read_text())[STARTED_IN] == str(project)
