import json
import sys
from pathlib import Path

import pytest

from titans_pt import cli
from titans_pt.config import Config, config_hash
from titans_pt.config.checks import checked
from titans_pt.config.files import CONFIGS, explained, load_config
from titans_pt.config.words import NAMES_ELSEWHERE, known_paths
from titans_pt.config.yaml import resolved_yaml
from titans_pt.errors import UserError


def write(path, text):
    path.write_text(text)
    return path


@pytest.fixture
def file(tmp_path):
    return lambda text, name="config.yaml": write(tmp_path / name, text)


def test_an_empty_file_is_the_defaults(file):
    assert load_config(file("")) == checked(Config())
    assert load_config(file(""), model=False) == Config()


def test_inheritance_goes_key_by_key_and_later_ones_win(file):
    file("train: {lr: 1e-3, max_steps: 5000}\nmodel: {mixers: [mac, mag]}", "a.yaml")
    file("train: {lr: 2e-3}", "b.yaml")
    config = load_config(file("inherit: [a.yaml, b.yaml]\nmodel: {mixers: [swa]}"))
    assert (config.train.lr, config.train.max_steps, config.model.mixers) == (2e-3, 5000, ["swa"])


def test_inheriting_from_oneself(file):
    file("inherit: config.yaml", "a.yaml")
    with pytest.raises(UserError, match="inherits from itself"):
        load_config(file("inherit: a.yaml"))


def test_overrides_are_yaml(file):
    config = load_config(file(""), ["train.lr=3e-4", "model.mixers=[lmm]", "model.mlp_hidden=null", "run.dir=x=y"])
    assert (config.train.lr, config.model.mixers, config.run.dir) == (3e-4, ["lmm"], "x=y")
    assert config.model.mlp_hidden is None


def test_the_resolved_tree_gives_itself_back(file):
    config = load_config(file("train: {lr: 1e-3}\nmodel: {mixers: [lmm, swa]}"))
    again = load_config(file(resolved_yaml(config), "resolved.yaml"))
    assert again == config
    assert config_hash(again) == config_hash(config) != config_hash(Config())


@pytest.mark.parametrize(("text", "overrides", "message"), [
    ("train: {learning_rate: 1}", [], r"train.learning_rate: unknown key \(given 1\); nearest known key: train.lr$"),
    ("num_hidden_layers: 12", [], "num_hidden_layers: unknown key .*nearest known key: model.n_layers$"),
    ("", ["train.nesterov=true"], "train.nesterov: unknown key .*; train has max_steps, .*, max_nonfinite"),
    ("", ["parallel.seq_len=8"], "parallel.seq_len: unknown key .*nearest known key: data.seq_len$"),
    ("lr: 1", [], "lr: unknown key .*nearest known key: train.lr"),
    ("train: {max_steps: '10'}", [], "train.max_steps: given '10'; allowed: .*integer"),
    ("train: {max_steps: 0}", [], "train.max_steps: given 0; allowed: greater than or equal to 1"),
    ("train: {resume: soon}", [], "train.resume: given 'soon'; allowed: 'auto' or 'never', or a valid integer$"),
    ("train: {resume: 0, lr: -1}", [], "train.resume: given 0; .*never', or greater than or .* 1 [(]and 1 more[)]$"),
    ("", ["train.precision=fp16"], "train.precision: given 'fp16'; allowed: 'bf16' or 'fp32'"),
    ("", ["train.max_steps"], "override 'train.max_steps': write it as key.path=value"),
    ("", ["train.lr=[1"], "override 'train.lr=.*not valid YAML"),
    ("", ["model.memory.chunk_size=8192"], "model.memory.chunk_size: given 8192; at most data.seq_len=4096"),
    ("", ["model.memory.n_heads=768"], "model.memory.n_heads: given 768; at most model.d_model / 2 = 384"),
    ("", ["model.n_heads=7"], "model.n_heads: given 7; must divide model.d_model=768"),
    ("", ["model.d_model=769"], "model.d_model: given 769; must be even: RoPE"),
    ("", ["model.attention.kv_heads=3"], "model.attention.kv_heads: given 3; must divide model.n_heads=16"),
    ("", ["model.attention.head_width=32"],
     "model.attention.head_width: given 32; must be model.d_model / model.n_heads = 48 for mac and mag, .* swa or mal"),
    ("", ["model.attention.sinks=4"], "model.attention.sinks: given 4; must be 0: no attention .* swa, mag, mal have"),
    ("", ["model.mixers=[swa]", "model.attention.head_width=33"], "head_width: given 33; must be even for RoPE"),
    ("", ["model.attention.rope_scaling={factor: 4, low_freq: 4}"], "must be above low_freq=4"),
    ("", ["parallel.tensor=2", "model.attention.kv_heads=1"],
     "parallel.tensor: given 2; must divide model.attention.kv_heads=1, .* set it to 1, or change"),
    ("", ["model.segment=40", "model.memory_tokens=8"],
     "model.mac.segment: given 40; must be a multiple of model.memory.chunk_size=16"),
    ("", ["model.mac.segment=40"], "model.mac.segment: given 40; must be a multiple of model.memory.chunk_size=16"),
    ("", ["model.mac.memory_tokens=40"], "model.mac.memory_tokens: given 40; must divide segment=512"),
    ("", ["model.mixers=[samba]"], r"model.mixers: given 'samba', which is no mixer but a config; set "
     r"model.mixers=\[mamba,swa\], as it does, or start it by its name: .*titans train 170m/samba, .*"
     "titans needles needles/samba, titans recall recall/samba, titans train tiny/samba$"),
    ("", ["model.mixers=[lmm,transformer]"], r"given 'transformer', which .*; set model.mixers=\[attention\], as it"),
    ("", ["model.mac.segmnt=40"], "model.mac.segmnt: unknown key .*nearest known key: model.mac.segment"),
    ("", ["model.windw=40"], "model.windw: unknown key .*nearest known key: model.window"),
    ("model: {segment: 16, mac: 5}", [], r"model.mac: unknown key \(given 5\)"),
    ("model: {windw: }", [], "model.windw: unknown key .*nearest known key: model.window"),
    ("", ["model.macc.segment=40"], "model.macc: unknown key .*nearest known key: model.mac"),
    ("", ["model.mixers=[swa]", "model.swa.window=64"],
     r"model.swa.window: unknown key \(given 64\); model.swa has no settings of its own"),
    ("", ["model.mixers=[gru]"], "model.mixers: given 'gru'; allowed: .*attention, .*lmm, .*mac, .*swa"),
    ("", ["task=chess"], "task: given 'chess'; allowed: .*language"),
    ("", ["run.imports=[no_such_module]"], "run.imports: given 'no_such_module', which cannot be imported"),
    ("", ["run.imports=[./my_rules]"], "given './my_rules', a file; name the module, such as my_rules, and start in"),
    ("", ["run.imports=[lab/my_rules.py]"], "given 'lab/my_rules.py', a file; name the module, such as my_rules, "),
    ("", ["evaluation.every=5", "evaluation.suites=[chess]"], "evaluation.suites: given 'chess'; allowed: perplexity"),
    ("", ["train.batch_tokens=5000"], "train.batch_tokens: given 5000; must be a multiple of data.seq_len=4096"),
    ("", ["train.warmup_steps=28610"], "train.warmup_steps: given 28610; must be below train.max_steps"),
    ("", ["train.stop_at=28611"], "train.stop_at: given 28611; at most train.max_steps"),
    ("", ["train.profile_at=28611"], "train.profile_at: given 28611; at most train.max_steps"),
    ("", ["parallel.tensor=3"], "parallel.tensor: given 3; must divide model.n_heads=16.*set it to 1, or change"),
    ("", ["parallel.tensor=8", "model.memory.n_heads=12"],
     "parallel.tensor: given 8; must divide model.memory.n_heads=12, .* set it to 4, or change model.memory.n_heads"),
    ("", ["parallel.tensor=4", "model.mlp_hidden=30"], "parallel.tensor: given 4; must divide model.mlp_hidden=30"),
    ("", ["parallel.tensor=16", "parallel.sequence=true", "data.seq_len=2056", "train.batch_tokens=2056"],
     "parallel.tensor: given 16; must divide data.seq_len=2056"),
    ("", ["train.compile=true", "parallel.zero_stage=3"], "train.compile: given True; ZeRO 3 .*parallel.zero_stage=2"),
    ("- 1", [], "must hold key: value pairs, holds a list"),
    ("a: [", [], "not valid YAML"),
    ("inherit: 3", [], "inherit: given 3; allowed: a file, or a list of files"),
    ("inherit: [a.yaml, 3]", [], "inherit: given .*; allowed: a file, or a list of files"),
    ("train: {lr: .inf}", [], "train.lr: given inf; allowed: a finite number"),
    ("", ["run.seed=9223372036854775808"], "run.seed: given 9223372036854775808; allowed: less than"),
])  # fmt: skip
def test_an_error_names_the_key_and_the_remedy_in_one_line(file, text, overrides, message):
    with pytest.raises(UserError, match=message) as error:
        load_config(file(text), overrides)
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_utf_8_is_one_line(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_bytes("run: {dir: runs/caf\u00e9}".encode("latin-1"))
    with pytest.raises(UserError, match="config: .*config.yaml: not UTF-8 at byte 19; convert it"):
        load_config(path)
    path.write_bytes("run: {dir: runs/caf\u00e9}".encode("utf-8-sig"))
    assert load_config(path).run.dir == "runs/caf\u00e9"


@pytest.mark.parametrize("name", ["170m/mac", "170m/mac.yaml", "configs/170m/mac.yaml", "./configs/170m/mac"])
def test_a_config_of_the_package_is_found_by_name_anywhere(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_config(name, ["run.seed=5"])
    assert (config.run.dir, config.run.seed, config.model.d_model) == ("runs/170m-mac", 5, 768)


def test_an_existing_path_wins_over_the_package_and_a_folder_does_not(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart").mkdir()
    assert load_config("quickstart").run.dir == "runs/quickstart"
    file("run: {dir: mine}", "quickstart.yaml")
    assert load_config("quickstart.yaml").run.dir == "mine"


def test_a_file_inherits_from_its_neighbour_before_the_package(file, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    child = file("inherit: 170m/mac\nrun: {dir: mine}")
    assert (load_config(child).run.dir, load_config(child).model.d_model) == ("mine", 768)
    (tmp_path / "170m").mkdir()
    file("model: {d_model: 64}", "170m/mac")
    assert load_config(child).model.d_model == 64


def test_a_mixer_of_a_name_that_is_taken(tmp_path, monkeypatch):
    (tmp_path / "taken_name.py").write_text(
        "from titans_pt.models.mixers.lmm import LMM, MIXERS\n\n@MIXERS.register\nclass Mine(LMM):\n    name = 'lmm'\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path, str(tmp_path)])
    message = "model.mixers: 'lmm' is titans_pt.models.mixers.lmm.LMM already; choose another name for taken_name.Mine"
    with pytest.raises(UserError, match=message):
        load_config("quickstart", ["run.imports=[taken_name]"])


@pytest.mark.parametrize(("name", "message"), [
    ("quickstar", "config quickstar: does not exist; .* titans-pt: quickstart, quickstart-needles$"),
    ("mac.yaml", "config mac.yaml: does not exist; .*: 1.3b/mac, 170m/mac, 340m/mac, 400m/mac, 760m/mac, babilong/mac, "
     "forecast/mac, needles/mac, recall/mac, state_tracking/mac, tiny/mac$"),
    ("configs/170/mal.yaml", "does not exist; .*: 170m/mal, "),
    ("/nowhere/quickstart.yaml", "config /nowhere/quickstart.yaml: does not exist"),
    ("zzz", r"config zzz: does not exist; .*: 1.3b/\*, .*, needles/\*, needles, .*, quickstart, .*, tiny/\*$"),
    (".", "config .: is a folder; name a YAML file, or a config that comes with titans-pt"),
    ("run", r"config run: is a folder \(its settings are run/config.yaml\); name a YAML file, or a config that comes"),
])  # fmt: skip
def test_a_config_that_is_not_there(name, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    Path("run/config.yaml").touch()
    with pytest.raises(UserError, match=message) as error:
        load_config(name)
    assert "\n" not in str(error.value)


def test_a_section_with_nothing_under_it_has_its_defaults(file):
    asked = load_config("recall/mac", ["model.memory.rule=yaad"])
    assert load_config(file("inherit: recall/mac\nrecall:\nmodel: {mac: , memory: {rule: yaad, yaad: }}")) == asked
    moved = load_config(file("model: {segment: 32, mac: }\ninherit: quickstart"))
    assert moved.model.section("mac")["segment"] == 32


# ---- titans config


def test_where_every_value_came_from(file, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    file(
        "model: {memory: {chunk_size: 8}, segment: 64, memory_tokens: 8}\ndata: {sources: [{kind: files, path: a}]}",
        "parent.yaml",
    )
    path = file("inherit: [parent.yaml, quickstart]\ntrain: {lr: 0.5}\nmodel: {d_model: 128}\nrun: {dir: 'runs/#1'}")
    words = ["train.max_steps=7", "train.warmup_steps=1", "model.segment=32"]
    assert cli.run(["config", path.name, *words]) == 0
    text = capsys.readouterr().out
    origins = {line.partition(":")[0].strip(): line.rpartition("# ")[2] for line in text.splitlines()[1:]}
    assert {key: origins[key] for key in ("max_steps", "lr", "chunk_size", "segment", "memory_tokens", "betas")} == {
        "max_steps": "command line", "lr": path.name, "chunk_size": "configs/quickstart.yaml",
        "segment": "command line", "memory_tokens": "configs/quickstart.yaml", "betas": "default"}  # fmt: skip
    assert "  dir: runs/#1" in text and text.splitlines()[0].endswith(config_hash(load_config(path, words)))
    assert load_config(file(text, "again.yaml")) == load_config(path, words)


@pytest.mark.parametrize("name", ["170m/mac", "needles", "1.3b/gated_deltanet_h1"])
def test_what_is_explained_loads_as_the_same(file, name):
    assert load_config(file(explained(name), "again.yaml")) == load_config(name)


def test_the_schema_needs_no_config(capsys):
    assert cli.run(["config", "--schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((CONFIGS / "schema.json").read_text())
    assert cli.run(["config"]) == 2
    assert "Missing argument 'CONFIG'" in capsys.readouterr().err
    assert cli.run(["config", "quickstart", "train.lr=x"]) == 2


def test_names_of_other_trainers_lead_to_settings():
    known = known_paths()
    own = {path.rpartition(".")[2] for path in known}
    for name, setting in NAMES_ELSEWHERE.items():
        assert setting in known and name not in own, name
