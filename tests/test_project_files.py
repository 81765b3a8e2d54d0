"""The files around the code agree with the code."""

import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert (str(citation["version"]), citation["license"]) == (PROJECT["version"], PROJECT["license"])
    assert [paper["identifiers"][0]["value"] for paper in citation["references"]] == ["arXiv:2501.00663"]


def test_the_changelog_begins_with_what_is_not_released_and_has_this_version():
    versions = re.findall(r"^## \[(.+?)\]( - \d{4}-\d\d-\d\d)?$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert versions[0] == ("Unreleased", "")
    assert PROJECT["version"] in {version for version, date in versions if date}


def test_the_workflow_runs_the_checks_on_the_oldest_python():
    job = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["check"]
    assert [step["run"] for step in job["steps"] if "run" in step] == ["bash .ci/run"]
    oldest = job["strategy"]["matrix"]["python-version"][0]
    assert PROJECT["requires-python"] == f">={oldest}"
