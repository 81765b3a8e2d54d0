"""Paths in settings: ``~``, variables, one spelling for one file."""

from pathlib import Path

import pytest

from titans_pt.config import Config
from titans_pt.config.files import load_config
from titans_pt.config.values import expanded, mapped, typed
from titans_pt.config.yaml import parse_yaml
from titans_pt.errors import UserError

EVERYWHERE = """
run: {dir: ~/a, spare_dir: $PLACE/a}
data:
  dir: ~/a
  sources: [{kind: files, path: ~/a}, {kind: files, path: "${PLACE}/a"}]
  validation_sources: [{kind: files, path: ~/a}]
  tokenizer: {path: ~/a}
train: {init_from: ~/a}
evaluation:
  perplexity: {text: ~/a}
  needle: {essays: ~/a}
  babilong: {haystack: {kind: files, path: ~/a}}
  commonsense: {data: ~/a}
"""


@pytest.fixture(autouse=True)
def home(monkeypatch):
    monkeypatch.setenv("HOME", "/home")
    monkeypatch.setenv("PLACE", "/home")
    monkeypatch.delenv("NOWHERE", raising=False)


def test_they_are_expanded_wherever_a_setting_is_a_path(tmp_path):
    (tmp_path / "config.yaml").write_text(EVERYWHERE)
    tree = load_config(tmp_path / "config.yaml", ["run.dir=~/a"], model=False).model_dump()
    found = []
    mapped(tree, Config, lambda value, kinds, path: found.append((path, value)) if kinds.get(str) else None)
    # Two settings that can hold a path hold something else here: a data set of the hub, a task of the package.
    assert {value for _, value in found} == {"/home/a"}
    assert len(found) == 12


@pytest.mark.parametrize(("given", "path"), [
    ("./text.jsonl", "text.jsonl"), ("a//b/./c/", "a/b/c"), ("../a/../b", "../a/../b"), (".", "."), ("~", "/home"),
    ("~/a b/ü", "/home/a b/ü"), ("$PLACE/x", "/home/x"), ("${PLACE}x", "/homex"), ("a$", "a$"), ("a$5", "a$5"),
    ("a~", "a~"), ("hf://org/name", "hf://org/name"), ("", ""), ("HuggingFaceFW/fineweb", "HuggingFaceFW/fineweb"),
])  # fmt: skip
def test_one_file_has_one_spelling(given, path):
    assert expanded(given, "run.dir") == path


@pytest.mark.parametrize(("given", "message"), [
    ("$NOWHERE/x", "run.dir: given '.NOWHERE/x', but the environment variable NOWHERE is not set; set it, or write"),
    ("~nobody-of-this-name/x", "run.dir: given .*, but ~nobody-of-this-name has no home folder here"),
])  # fmt: skip
def test_what_stands_for_nothing_is_refused(given, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text("")
    with pytest.raises(UserError, match=message):
        load_config("config.yaml", [f"run.dir={given}"], model=False)
    Path("~nobody-of-this-name").mkdir()
    assert expanded("~nobody-of-this-name/x", "") == "~nobody-of-this-name/x", "a folder may have such a name"


def test_settings_of_others_are_left_alone():
    tree = parse_yaml("model: {leaky: {gain: 1}}\nwaves: {noise: 007}", "")
    assert typed(tree, Config) == {"model": {"leaky": {"gain": "1"}}, "waves": {"noise": "007"}}


def test_a_folder_with_the_name_of_a_variable(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    named = Path("runs/cost $NOWHERE")
    with pytest.raises(UserError, match="NOWHERE is not set"):
        expanded(str(named), "RUN")
    named.mkdir(parents=True)
    assert expanded(str(named), "RUN") == str(named)
