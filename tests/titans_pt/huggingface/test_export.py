"""Exports into a folder that holds an earlier export, another run's, a killed one's, or other files."""

import errno
import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers.untrained import untrained_run
from titans_pt import cli, huggingface
from titans_pt.errors import UserError
from titans_pt.huggingface.card import model_card
from titans_pt.runs import checkpoints
from titans_pt.runs.loaded import load_run

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, prepared):
    """Two runs: ``words`` with a SentencePiece model, ``bytes`` with a tokenizer.json and another mixer."""
    folder = tmp_path_factory.mktemp("runs")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    (folder / "tokenizer").mkdir()
    tokenizer.save(str(folder / "tokenizer/tokenizer.json"))
    (folder / "tokenizer/tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    untrained_run(folder / "words", prepared, mixers=["mac"])
    untrained_run(folder / "bytes", folder / "tokenizer", mixers=["swa"])
    return folder


def names(folder) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.thorough
@pytest.mark.parametrize(("first", "second"), [("words", "bytes"), ("bytes", "words")])
def test_a_second_export_leaves_nothing_of_the_first(runs, tmp_path, first, second):
    """The first export's tokenizer, shards, code and generation settings are gone; the user's files stay."""
    folder = huggingface.export_run(runs / first, tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="5KB")
    (folder / "notes.txt").write_text("mine")
    (folder / "mine.py").write_text("print('mine')\n")
    for stale in ("chat_template.jinja", "special_tokens_map.json", "added_tokens.json"):
        (folder / stale).write_text("{}")
    huggingface.export_run(runs / second, folder)
    clean = huggingface.export_run(runs / second, tmp_path / "clean")
    assert names(folder) == names(clean) | {"notes.txt", "mine.py"}
    for path in clean.iterdir():
        assert (folder / path.name).read_bytes() == path.read_bytes(), path.name
    assert AutoTokenizer.from_pretrained(folder)("abc")["input_ids"] == load_run(runs / second).tokenizer.encode("abc")
    back = load_run(huggingface.import_run(folder, tmp_path / "back"))
    assert back.tokenizer.sha256 == load_run(runs / second).tokenizer.sha256


def test_adapters_end_in_the_weights(prepared, tmp_path):
    run = untrained_run(tmp_path / "run", prepared, mixers=["mab"], n_layers=2, init_std=0.1, lora={"rank": 3})
    path = checkpoints.find(run / "checkpoints")
    state, weights, draw = checkpoints.read_state(path), checkpoints.read_weights(path), torch.manual_seed(1)
    weights |= {n: 0.3 * torch.randn(p.shape, generator=draw) for n, p in weights.items() if n.endswith("lora_b")}
    checkpoints.save(run / "checkpoints", weights, {}, state)
    folder = huggingface.export_run(run, tmp_path / "hf")
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert not [name for name in file.keys() if "lora" in name]  # noqa: SIM118
    assert json.loads((folder / "config.json").read_text())["settings"]["model"]["lora"] is None
    ids = torch.randint(3, 280, (2, 30), generator=draw)
    with torch.no_grad():
        expected = load_run(run).model(ids)[0]
        found = AutoModelForCausalLM.from_pretrained(folder)(ids).logits
        back = load_run(huggingface.import_run(folder, tmp_path / "back")).model(ids)[0]
    assert expected.abs().max() > 0.3
    assert (found - expected).abs().max() < 1e-5 and (back - expected).abs().max() < 1e-5


class Killed(BaseException):
    pass


@pytest.mark.thorough
@pytest.mark.parametrize("moved", [0, 3, 30])
def test_an_export_that_was_cut_short_is_no_model(runs, tmp_path, monkeypatch, moved):
    """However many files are in place, readers refuse the folder; the next export completes it."""
    folder = huggingface.export_run(runs / "bytes", tmp_path / "hf")
    replace, left = os.replace, [moved]

    def stops(source, target):
        if not left[0]:
            raise Killed
        left[0] -= 1
        replace(source, target)

    monkeypatch.setattr(os, "replace", stops)
    monkeypatch.setattr("tempfile.TemporaryDirectory.__exit__", lambda *_: None)  # a killed process removes nothing
    monkeypatch.setattr("tempfile.TemporaryDirectory._cleanup", lambda *_, **__: None)
    with pytest.raises(Killed):
        huggingface.export_run(runs / "words", folder)
    monkeypatch.undo()
    with pytest.raises(UserError, match="an export into it was cut short; export again"):
        huggingface.import_run(folder, tmp_path / "back")
    with pytest.raises((OSError, ValueError), match=r"config\.json"):
        AutoModelForCausalLM.from_pretrained(folder)
    huggingface.export_run(runs / "words", folder)
    assert names(folder) == names(huggingface.export_run(runs / "words", tmp_path / "clean"))
    huggingface.import_run(folder, tmp_path / "back")


def test_one_export_into_a_folder_at_a_time(runs, tmp_path, monkeypatch):
    """The second one begins while the first one writes its model card."""
    folder, card, told = tmp_path / "hf", model_card, []

    def meanwhile(run):
        if not told:
            told.append("")
            with pytest.raises(UserError) as error:
                huggingface.export_run(runs / "bytes", folder)
            told[0] = str(error.value)
        return card(run)

    monkeypatch.setattr("titans_pt.huggingface.export.model_card", meanwhile)
    huggingface.export_run(runs / "words", folder)
    assert told == [f"--out: another titans export is at work in {folder}; wait for it, or name another folder"]
    assert names(folder) == names(huggingface.export_run(runs / "words", tmp_path / "clean"))


def test_an_export_that_fails_leaves_the_one_before(runs, tmp_path, monkeypatch):
    folder = huggingface.export_run(runs / "words", tmp_path / "hf")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr("titans_pt.huggingface.export.model_card", full)
    with pytest.raises(OSError, match="No space left"):
        huggingface.export_run(runs / "bytes", folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), KeyboardInterrupt()])
def test_an_export_that_fails_among_its_files_can_be_repeated(runs, tmp_path, monkeypatch, error):
    """A full disk or Ctrl-C while the files are moved into place."""
    folder, replace = tmp_path / "hf", os.replace

    def fails(source, target):
        if Path(target).name == "tokenizer_config.json":  # after model.safetensors, before config.json
            raise error
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fails)
        with pytest.raises(type(error)):
            huggingface.export_run(runs / "words", folder)
    assert (folder / "model.safetensors").exists() and not (folder / "config.json").exists()
    with pytest.raises(UserError, match="an export into it was cut short; export again"):
        huggingface.import_run(folder, tmp_path / "back")
    huggingface.export_run(runs / "words", folder)
    assert names(folder) == names(huggingface.export_run(runs / "words", tmp_path / "clean"))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.json", '{"model_type": "llama"}', "holds config.json, which titans export did not write"),
        ("config.json", "[" * 100_000, "holds config.json, which titans export did not write"),
        ("config.json", "{", "holds config.json, which titans export did not write"),
        ("tokenizer.model", "mine", "holds tokenizer.model, which titans export did not write"),
        ("model.safetensors", "mine", "holds model.safetensors, which titans export did not write"),
        ("config.yaml", "mine", "holds a run; name another folder"),
    ],
)
def test_what_is_not_an_export_is_left_alone(runs, tmp_path, capsys, name, content, words):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text(content)
    assert cli.run(["export", str(runs / "words"), "--out", str(tmp_path / "out")]) == 2
    assert words in capsys.readouterr().err
    assert names(tmp_path / "out") == {name} and (tmp_path / "out" / name).read_text() == content


def test_a_fresh_clone_of_a_repository_is_exported_into(runs, tmp_path):
    for name in (".gitattributes", "README.md"):
        (tmp_path / name).write_text("of the hub")
    huggingface.export_run(runs / "words", tmp_path)
    assert (tmp_path / ".gitattributes").read_text() == "of the hub"
    assert (tmp_path / "README.md").read_text() != "of the hub"


def test_import_takes_the_tokenizer_that_the_model_was_trained_with(runs, tmp_path):
    """Import takes the right one of two tokenizers and refuses a single wrong one; older folders must hold just one."""
    folder = huggingface.export_run(runs / "bytes", tmp_path / "hf")
    shutil.copy(runs / "words/tokenizer.model", folder)
    back = load_run(huggingface.import_run(folder, tmp_path / "back"))
    assert back.tokenizer.sha256 == load_run(runs / "bytes").tokenizer.sha256
    config = json.loads((folder / "config.json").read_text())
    assert config.pop("tokenizer_hash") == back.tokenizer.sha256
    (folder / "tokenizer.json").rename(folder / "other.json")
    with pytest.raises(UserError, match=r"tokenizer\.model: not the tokenizer of this model .*export it again"):
        huggingface.import_run(folder, tmp_path / "wrong")
    (folder / "other.json").rename(folder / "tokenizer.json")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "SHA256SUMS").unlink()
    with pytest.raises(UserError, match=r"holds tokenizer\.model and tokenizer\.json; delete the one"):
        huggingface.import_run(folder, tmp_path / "which")
    (folder / "tokenizer.model").unlink()
    huggingface.import_run(folder, tmp_path / "old")


def test_a_missing_shard_is_one_line(runs, tmp_path):
    folder = huggingface.export_run(runs / "words", tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="5KB")
    next(iter(folder.glob("*.safetensors"))).unlink()
    with pytest.raises(UserError, match="damaged, or of a later version"):
        huggingface.import_run(folder, tmp_path / "back")
    assert not (tmp_path / "back").exists()


MINE = """
from titans_pt.kernels.memory.rules import RULES
from titans_pt.kernels.memory.rules.titans import Titans

@RULES.register
class Mine(Titans):
    name = "mine_{}"
"""


@pytest.mark.parametrize("told", [True, False], ids=["by the folder", "by a setting"])
def test_models_with_rules_of_ones_own_are_imported(prepared, tmp_path, monkeypatch, told):
    """The importing process has not loaded the module that defines the rule."""
    monkeypatch.chdir(tmp_path)
    name = f"mine_{told}".lower()
    (tmp_path / f"{name}.py").write_text(MINE.format(str(told).lower()))
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module(name)
    run = untrained_run(tmp_path / "run", prepared, mixers=["lmm"], n_layers=1, memory={"rule": name})
    settings = run / "config.yaml"
    settings.write_text(settings.read_text().replace("imports: []", f"imports: [{name}]"))
    huggingface.export_run(run, tmp_path / "exported")
    config = tmp_path / "exported" / "config.json"
    tree = json.loads(config.read_text())
    assert tree["settings"].pop("run") == {"imports": [name]}
    if not told:  # like exports of earlier versions
        config.write_text(json.dumps(tree))
        (tmp_path / "exported" / "SHA256SUMS").unlink()
    words = ["import", "exported", "--out", "again", *([] if told else [f"run.imports=[{name}]"])]
    subprocess.run([sys.executable, "-m", "titans_pt", *words], check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    again = load_run(tmp_path / "again")
    assert again.config.run.imports == [name] and again.config.model.memory.rule == name


def test_an_import_that_was_killed_is_made_again(runs, tmp_path, monkeypatch):
    """A folder counts as a run only when it has its checkpoint, its tokenizer and the place of relative paths."""
    folder, back, replace = huggingface.export_run(runs / "bytes", tmp_path / "hf"), tmp_path / "back", os.replace
    for last in ("tokenizer.json", "versions.json", "config.yaml"):

        def stops(source, target, last=last):
            if Path(target) == back / last:
                raise Killed
            replace(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", stops)
            with pytest.raises(Killed):
                huggingface.import_run(folder, back)
        assert not (back / "config.yaml").exists(), last
    huggingface.import_run(folder, back)
    assert load_run(back).tokenizer.encode("a") and names(back) >= {"tokenizer.json", "versions.json", "config.yaml"}
