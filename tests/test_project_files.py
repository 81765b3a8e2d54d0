"""The files around the code agree with the code."""

import re
import tomllib
from pathlib import Path

import yaml

from titans_pt import __version__

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]


def test_the_version_stands_once_in_the_code_and_the_citation_has_it():
    assert PROJECT["dynamic"] == ["version"] and "version" not in PROJECT
    assert PYPROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "titans_pt.__version__"}
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert (str(citation["version"]), citation["license"]) == (__version__, PROJECT["license"])
    assert [author["name"] for author in citation["authors"]] == [author["name"] for author in PROJECT["authors"]]
    assert {*citation["keywords"]} <= {*PROJECT["keywords"]}
    assert [paper["identifiers"][0]["value"] for paper in citation["references"]] == ["arXiv:2501.00663"]
    assert citation["references"][0]["url"] == PROJECT["urls"]["Paper"]


def test_the_changelog_begins_with_what_is_not_released_and_has_this_version():
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", text, re.M)
    assert versions[0] == ("Unreleased", "") and versions[1][0] == __version__
    dates = [date for _, date in versions[1:]]
    assert all(dates) and dates == sorted(dates, reverse=True)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert str(citation["date-released"]) == dates[0]


def test_an_entry_of_the_changelog_is_one_line():
    text = (ROOT / "CHANGELOG.md").read_text().split("## [0.1.0]")[0]
    assert [line for line in text.splitlines() if line.startswith("  ") or len(line) > 170] == []


def test_the_workflow_runs_the_checks_on_the_oldest_python():
    job = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["check"]
    assert [step["run"] for step in job["steps"] if "run" in step] == ["bash .ci/run"]
    oldest = job["strategy"]["matrix"]["python-version"][0]
    assert PROJECT["requires-python"] == f">={oldest}"


def test_every_change_passes_the_default_and_the_thorough_tests():
    steps = (ROOT / ".ci/run").read_text().splitlines()[-3:]
    assert steps == ["make lint", "make test", "make thorough"]
    default, thorough = (re.search(r' -m "(.+?)"', _recipe(name)) for name in ("test", "thorough"))
    assert default is None  # the default is in pyproject.toml
    assert "-m 'not thorough and not slow and not gpu'" in PYPROJECT["tool"]["pytest"]["ini_options"]["addopts"]
    assert thorough[1] == "thorough and not slow and not gpu"


def test_slow_tests_run_every_week():
    workflow = yaml.safe_load((ROOT / ".github/workflows/slow.yml").read_text())
    (trigger,) = workflow[True]["schedule"]  # YAML reads "on" as true
    minute, hour, day_of_month, month, day_of_week = trigger["cron"].split()
    assert (day_of_month, month) == ("*", "*") and day_of_week in "0123456"
    assert [step["run"] for step in workflow["jobs"]["slow"]["steps"] if "run" in step] == ["make slow"]
    assert '-m "slow and not gpu"' in _recipe("slow")


def test_lint_checks_style_and_types_and_so_does_each_commit():
    assert "$(BIN)/ruff check ." in _recipe("lint")
    assert "$(BIN)/mypy" in _recipe("lint").splitlines()
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local"  # nothing is downloaded
    (hook,) = repository["hooks"]
    assert (hook["entry"], hook["language"], hook["pass_filenames"]) == ("make lint", "system", False)


def test_types_of_the_whole_package_are_checked():
    """No folder is left out, no error is hidden."""
    settings = PYPROJECT["tool"]["mypy"]
    assert settings["files"] == ["titans_pt"]
    assert not {"exclude", "ignore_errors", "disable_error_code"} & settings.keys()
    assert all(override.keys() == {"module", "follow_imports"} for override in settings["overrides"])
    assert not any(name.startswith("titans_pt") for override in settings["overrides"] for name in override["module"])


def test_users_of_the_package_get_its_types():
    assert (ROOT / "titans_pt/py.typed").is_file()
    assert "py.typed" in PYPROJECT["tool"]["setuptools"]["package-data"]["titans_pt"]


def test_an_ignored_type_error_has_a_code_and_a_reason():
    for file in (ROOT / "titans_pt").rglob("*.py"):
        for line in file.read_text().splitlines():
            if "# type: ignore" in line:
                assert re.search(r"# type: ignore\[[a-z, -]+\]  # \w+", line), f"{file}: {line}"


def _recipe(target: str) -> str:
    """Commands of a Makefile target, one per line."""
    (found,) = re.findall(rf"^{target}:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)
    return found.replace("\t", "")
