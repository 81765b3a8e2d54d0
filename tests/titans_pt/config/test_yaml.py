"""Meaning of unquoted words in files and on the command line; duplicate keys; aliases."""

import shlex

import pytest
import yaml

from titans_pt.config import Config, RunConfig, WandbConfig
from titans_pt.config.files import load_config
from titans_pt.config.plain import usual
from titans_pt.config.yaml import parse_override, parse_yaml, resolved_yaml, write_yaml
from titans_pt.errors import UserError


def loaded(folder, text, *overrides):
    path = folder / "config.yaml"
    path.write_text(text)
    return load_config(path, overrides, model=False)


TEXTS = ["2026-01-05", "no", "yes", "on", "true", "12e4567", "007", "1e6", "1:30", "0x1F", "1_000", "=", "3.10", ".5"]
ODD = ["a: b", "@me", "*x", "100%", "# x", "exp #3", "it's", "-", "<<", "!x", "a, b", "ünï côdé"]


@pytest.mark.parametrize("text", TEXTS + ODD)
def test_a_text_stays_what_was_typed(tmp_path, text):
    assert loaded(tmp_path, "", f"wandb.name={text}").wandb.name == text
    assert loaded(tmp_path, "", f"evaluation.commonsense.tasks=['{text.replace(chr(39), 2 * chr(39))}']"
                  ).evaluation.commonsense.tasks == [text]  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_in_a_file_too_and_in_lists(tmp_path, text):
    config = loaded(tmp_path, f"wandb: {{name: {text}}}\nrun:\n  imports: [{text}, a]\n  dir: {text}")
    assert (config.wandb.name, config.run.imports, config.run.dir) == (text, [text, "a"], text)


@pytest.mark.parametrize("text", TEXTS + ODD)
def test_what_is_written_is_read_as_it_was_here_and_elsewhere(tmp_path, text):
    config = Config(run=RunConfig(dir=text), wandb=WandbConfig(name=text))
    written = resolved_yaml(config)
    assert loaded(tmp_path, written) == config
    assert yaml.safe_load(written)["wandb"]["name"] == text
    assert usual(parse_yaml(write_yaml({"a": text}), "")) == {"a": text}


@pytest.mark.parametrize(("typed", "value"), [
    ("1e6", 10**6), ("1E+3", 1000), ("5_000", 5000), ("0x10", 16), ("0o17", 15), ("017", 17), ("+7", 7), ("17.0", 17),
])  # fmt: skip
def test_whole_numbers(tmp_path, typed, value):
    for config in (loaded(tmp_path, "", f"run.seed={typed}"), loaded(tmp_path, f"run:\n  seed: {typed}")):
        assert config.run.seed == value
        assert type(config.run.seed) is int
    assert loaded(tmp_path, f"evaluation: {{needle: {{lengths: [{typed}]}}}}").evaluation.needle.lengths == [value]


def test_other_numbers_booleans_and_null(tmp_path):
    config = loaded(tmp_path, "train: {lr: 1, eps: 1e-8, clip: .5, min_lr_ratio: 1_0.0e-2}\ndata: {seq_len: 4096}",
                    "train.spike_deviations=~", "train.compile=", "wandb.entity=null", "run.tensorboard=yes",
                    "wandb.checkpoints=True", "wandb.evaluation=off")  # fmt: skip
    assert (config.train.lr, config.train.eps, config.train.clip, config.train.min_lr_ratio) == (1.0, 1e-8, 0.5, 0.1)
    assert (config.train.spike_deviations, config.train.compile, config.wandb.entity) == (None, None, None)
    assert (config.run.tensorboard, config.wandb.checkpoints, config.wandb.evaluation) == (True, True, False)
    assert loaded(tmp_path, "", "train.resume=6").train.resume == 6
    assert loaded(tmp_path, "", "train.resume=never").train.resume == "never"


@pytest.mark.parametrize(("override", "message"), [
    ("run.seed='10'", "run.seed: given '10'; allowed: a valid integer"),
    ("run.seed=1.5", "run.seed: given 1.5; allowed: a valid integer"),
    ("run.seed=12e4567", "run.seed: given inf; allowed: a valid integer"),
    ("run.seed=" + "9" * 5000, "run.seed: given '99.*; allowed: a valid integer"),
    ("run.seed=1e23", "run.seed: given 100000000000000000000000; allowed: less than"),
    ("run.tensorboard=1", "run.tensorboard: given 1; allowed: true or false"),
    ("run.dir=null", "run.dir: given None; allowed: a text"),
    ("run.dir={a: 1}", "run.dir: given {'a': 1}; allowed: a text"),
    ("model.mixers=lmm", r"model.mixers: given 'lmm'; allowed: a list, such as \[lmm\]"),
    ("train.trainable=*.lora_*", r'train.trainable: given .\*.lora_\*.; allowed: a list, such as \["\*.lora_\*"\]'),
    ("model.mixers=lmm,swa", r"model.mixers: given 'lmm,swa'; allowed: a list, such as \[lmm,swa\]"),
    ("model.mixers=[lmm,null]", "model.mixers.1: given None; allowed: a text"),
    ("train=3", "train: given 3; allowed: a section, which has settings under it"),
    ("train={lr: 1, lr: 2}", "override .*: the key 'lr' stands twice in one section, in line 1; join the two, or remove"
     " one$"),
])  # fmt: skip
def test_what_is_refused(tmp_path, override, message):
    with pytest.raises(UserError, match=message):
        loaded(tmp_path, "", override)


def test_a_bracket_that_begins_a_text_has_a_remedy_that_works():
    with pytest.raises(UserError, match="not valid YAML.*; if it is meant as text, write 'wandb.name=\"") as error:
        parse_override("wandb.name=[draft] x")
    remedy = str(error.value).partition("write '")[2].removesuffix("'")
    assert parse_override(remedy) == (["wandb", "name"], "[draft] x")
    with pytest.raises(UserError, match="if it is meant as a list of texts, write 'train.trainable=") as error:
        parse_override("train.trainable=[*.lora_*, a]")
    assert parse_override(shlex.split(str(error.value).partition("write ")[2])[0]) == (
        ["train", "trainable"], ["*.lora_*", "a"]
    )  # fmt: skip


@pytest.mark.parametrize(("text", "message"), [
    ("train: {lr: 1.0}\nmodel: {d_model: 768}\ntrain:\n  max_steps: 9",
     "config.yaml: the key 'train' stands twice in one section, in line 1 and in line 3; join the two, or remove one"),
    ("train:\n  lr: 1.0\n  'lr': 2.0", "'lr' stands twice in one section, in line 2 and in line 3"),
    ("data:\n  sources:\n  - path: a\n    kind: files\n    path: b", "'path' stands twice .* line 3 and in line 5"),
    ("a: &a [*a]", "an alias .* stands inside what it repeats"),
    ("a: &a [1, 2]\n" + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 10)}]\n" for a, b in zip("abcde", "bcdef",
     strict=True)), "more than 100,000 values"),
    ("[" * 3000, "nested too deeply"),
    ("train: {lr: !!int abc}", "not valid YAML: invalid literal"),
])  # fmt: skip
def test_files_that_are_refused(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        loaded(tmp_path, text)


def test_merge_keys_and_aliases_are_values(tmp_path):
    text = ("evaluation:\n  needle: &n {samples: 7, max_new_tokens: 9}\n"
            "  babilong: &b\n    <<: *n\n    samples: 8\n  perplexity: &p {tokens: 5}\n")  # fmt: skip
    config = loaded(tmp_path, text, "evaluation.needle.samples=50")
    assert (config.evaluation.needle.samples, config.evaluation.needle.max_new_tokens) == (50, 9)
    assert (config.evaluation.babilong.samples, config.evaluation.babilong.max_new_tokens) == (8, 9)
    same = "evaluation: {needle: &n {samples: 7}, babilong: *n}"
    config = loaded(tmp_path, same, "evaluation.needle.samples=50")
    assert (config.evaluation.needle.samples, config.evaluation.babilong.samples) == (50, 7)
    (tmp_path / "parent.yaml").write_text(same)
    config = loaded(tmp_path, "inherit: parent.yaml\nevaluation: {babilong: {samples: 3}}")
    assert (config.evaluation.needle.samples, config.evaluation.babilong.samples) == (7, 3)


def test_a_heading_with_nothing_under_it_is_an_empty_section(tmp_path):
    (tmp_path / "parent.yaml").write_text("train: {lr: 0.5}\nevaluation:\n  needle:\n")
    assert loaded(tmp_path, "inherit: parent.yaml\ntrain:\n  # lr: 1\nmodel:\n").train.lr == 0.5


@pytest.mark.parametrize(("text", "remedy"), [
    ("train.lr: 0.1", "train: {lr: 0.1}"), ("model.memory: {depth: 3}", "model: {memory: {'depth': 3}}"),
    ("model: {memory.depth: 3}", "model: {memory: {depth: 3}}"),
    ("model.mac.segment: 64", "model: {mac: {segment: 64}}"),
    ("model: {mac.segment: 64}", "model: {mac: {segment: 64}}"),
])  # fmt: skip
def test_a_flat_key_in_a_file_is_told_what_to_write(tmp_path, text, remedy):
    (tmp_path / "flat.yaml").write_text(text)
    with pytest.raises(UserError, match="a key with dots is for the command line; write it in the file as") as error:
        load_config(tmp_path / "flat.yaml")
    assert str(error.value).partition("file as ")[2] == remedy
    loaded(tmp_path, remedy)
