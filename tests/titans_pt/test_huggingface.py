"""To Hugging Face and back: the same bits, the same ids, the same text."""

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
import yaml

from tests.conftest import TINY
from tests.helpers.mixers import EVERY
from tests.helpers.untrained import untrained_run
from titans_pt import cli
from titans_pt.config.files import load_config
from titans_pt.data_pipeline import TokenFiles
from titans_pt.errors import UserError
from titans_pt.models.mixers import MIXERS
from titans_pt.runs.loaded import load_run
from titans_pt.streaming import greedy, prefill
from titans_pt.training.transfer import find_weights

transformers = pytest.importorskip("transformers")

from titans_pt import huggingface  # noqa: E402 - needs transformers

ROOT = Path(__file__).parents[2]
TEXTS = ["abc dea  fo\n\tnk", " leading", "</s> is text \u2581 and so is \u00e9\u4e2d", "", "a</s>b <s><|endoftext|>"]


ELSEWHERE = """
import sys
sys.modules["titans_pt"] = None  # as if it were not installed
import torch, transformers

found = {}
for name in sys.argv[1:]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(f"{name}-hf", trust_remote_code=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(f"{name}-hf", trust_remote_code=True)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    with torch.no_grad():
        logits = model(torch.arange(30)[None]).logits
    ids = tokenizer("abc dea", return_tensors="pt")
    text = tokenizer.decode(model.generate(**ids, max_new_tokens=5, do_sample=False)[0], skip_special_tokens=True)
    # whose classes' labels the Trainer shifts before it smooths them
    assert type(model).__name__ in transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    found[name] = [type(model).__module__.split(".")[0], logits, ids["input_ids"], text]
torch.save(found, "found")
"""


def loaded_elsewhere(tmp_path, *names):
    """Results of ELSEWHERE in the exported folders NAME-hf of ``tmp_path``."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    words = [sys.executable, "-c", ELSEWHERE, *names]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return torch.load(tmp_path / "found")


def from_pretrained(folder):
    """Load into fresh memory: from_pretrained uses the mapped file, whose alignment changes the last bit of sums."""
    hub = transformers.AutoModelForCausalLM.from_pretrained(folder)
    for parameter in hub.parameters():
        parameter.data = parameter.data.clone()
    return hub


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    """A folder with a byte-level tokenizer.json like GPT-2's."""
    folder = tmp_path_factory.mktemp("byte-level")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    return folder


@pytest.fixture(scope="module", params=["mac", "untied", "tokenizer.json"])
def folders(request, tmp_path_factory, prepared, byte_level):
    folder = tmp_path_factory.mktemp("hf")
    model = {"tie_embeddings": False, "mixers": ["mal"]} if request.param == "untied" else {}
    # Forgetting as in version 0.1.0, whose settings do not name it.
    model["memory"] = {**TINY["model"]["memory"], "forget_to": "zero"}
    run = untrained_run(folder / "run", byte_level if request.param == "tokenizer.json" else prepared, **model)
    assert cli.run(["export", str(run), "--out", str(folder / "hf")]) == 0
    assert cli.run(["import", str(folder / "hf"), "--out", str(folder / "back")]) == 0
    return folder


def exact(run):
    """The model settings of a run as an export has them: vocabulary rows for the tokenizer's entries alone."""
    return run.config.model.model_copy(update={"vocab_size": run.tokenizer.vocab_size})


def test_round_trip_is_bit_exact(folders):
    first, back = load_run(folders / "run"), load_run(folders / "back")
    hub = from_pretrained(folders / "hf")
    assert isinstance(hub, huggingface.TitansForCausalLM)
    entries = first.tokenizer.vocab_size
    assert hub.config.vocab_size == len(hub.model.head.weight) == entries < first.config.model.vocab_rows
    for other in (back.model, hub.model):
        theirs = other.state_dict()
        for name, tensor in first.model.state_dict().items():
            found = theirs[name]
            if name in first.model.counted_rows:  # rows that stand for no token are left behind
                assert not found[entries:].any()
                found, tensor = found[:entries], tensor[:entries]
            assert found.dtype == tensor.dtype and torch.equal(found, tensor), name
    assert exact(first) == back.config.model and first.step == back.step
    assert (back.config.data.seq_len, back.config.train.precision) == (16, "fp32")
    ids = torch.arange(30)[None] * 7 % 256
    with torch.no_grad():
        assert torch.equal(hub(ids).logits, first.model(ids)[0])


def test_ids_and_texts_are_the_tokenizers_own(folders):
    own = load_run(folders / "run").tokenizer
    hub = transformers.AutoTokenizer.from_pretrained(folders / "hf")
    for text in TEXTS:
        ids = hub(text)["input_ids"]
        assert ids == own.encode(text)
        assert hub.decode(ids) == own.decode(ids)
    assert hub.eos_token_id == own.eos_id and len(hub) == own.vocab_size


@pytest.mark.parametrize("kind", ["sentencepiece", "tokenizer.json"])
def test_bos_comes_where_training_had_it(kind, tmp_path, prepared, byte_level):
    if kind == "tokenizer.json":
        tokenizer = tokenizers.Tokenizer.from_file(str(byte_level / "tokenizer.json"))
        tokenizer.add_special_tokens(["<|start|>"])
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        ends = {"eos_token": "<|endoftext|>", "bos_token": "<|start|>"}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(ends))
    source = tmp_path if kind == "tokenizer.json" else prepared
    run = untrained_run(tmp_path / "run", source, data={"tokenizer": {"add_bos": True}})
    assert cli.run(["export", str(run), "--out", str(tmp_path / "hf")]) == 0
    assert cli.run(["import", str(tmp_path / "hf"), "--out", str(tmp_path / "back")]) == 0
    own, back = load_run(run).tokenizer, load_run(tmp_path / "back").tokenizer
    hub = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert own.bos_id >= 0 and back.begin == own.begin == (own.bos_id,)
    for text in TEXTS:
        assert hub(text)["input_ids"] == own.document(text) == [own.bos_id, *own.encode(text)]
        assert hub(text, add_special_tokens=False)["input_ids"] == own.encode(text)
    mask = hub("abc", return_special_tokens_mask=True)["special_tokens_mask"]
    assert mask == [1] + [0] * len(own.encode("abc"))
    assert mask == hub.get_special_tokens_mask(hub("abc")["input_ids"], None, True)
    assert hub("abc", " dea")["input_ids"] == own.document("abc") + own.encode(" dea")
    assert hub.bos_token_id == own.bos_id == transformers.AutoConfig.from_pretrained(tmp_path / "hf").bos_token_id


def test_control_tokens_stay_text_where_tokenizer_json_does_not_mark_them(tmp_path, byte_level):
    """Only tokenizer_config.json names eos and pad; an exported folder has another one."""
    tokenizer = tokenizers.Tokenizer.from_file(str(byte_level / "tokenizer.json"))
    tokenizer.add_tokens([tokenizers.AddedToken("<|pad|>", special=False)])
    tree = json.loads(tokenizer.to_str())
    tree["added_tokens"] = [token | {"special": False} for token in tree["added_tokens"]]
    given = tmp_path / "given"
    given.mkdir()
    (given / "tokenizer.json").write_text(json.dumps(tree))
    (given / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>", "pad_token": "<|pad|>"}')
    run = untrained_run(tmp_path / "run", given)
    huggingface.export_run(run, tmp_path / "hf")
    huggingface.import_run(tmp_path / "hf", tmp_path / "back")
    text, own = "a<|pad|>b<|endoftext|>", load_run(run).tokenizer
    ids = own.encode(text)
    assert not {own.eos_id, own.names.index("<|pad|>")} & set(ids) and own.decode(ids) == text
    assert load_run(tmp_path / "back").tokenizer.encode(text) == ids
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")(text)["input_ids"] == ids


def test_generate_carries_the_state(folders, monkeypatch):
    run = load_run(folders / "run")
    hub = from_pretrained(folders / "hf")
    prompt = torch.arange(25)[None] * 5 % 256
    expected = list(greedy(run.model, *prefill(run.model, prompt, 25), 12, {run.tokenizer.eos_id}))
    lengths, forward = [], hub.model.forward

    def watched(ids, *rest, **options):
        lengths.append(ids.shape[1])
        return forward(ids, *rest, **options)

    monkeypatch.setattr(hub.model, "forward", watched)
    out = hub.generate(prompt, max_new_tokens=12, do_sample=False)
    assert out[0, 25:].tolist()[: len(expected)] == expected
    assert lengths[0] == 25 and set(lengths[1:]) <= {1}
    # A saved state continues where it ended.
    state = hub(prompt[:, :10]).state
    more = hub.generate(prompt[:, 10:], state=state, max_new_tokens=12, do_sample=False)
    assert more[0, 15:].tolist()[: len(expected)] == expected


def test_loss_and_masks(folders):
    hub = from_pretrained(folders / "hf")
    ids = torch.arange(20)[None]
    out = hub(ids, labels=ids)
    expected = torch.nn.functional.cross_entropy(out.logits[0, :-1], ids[0, 1:])
    assert out.loss.item() == pytest.approx(expected.item())
    for hidden in (slice(0, 20), slice(5, 9)):
        mask = torch.ones_like(ids)
        mask[:, hidden] = 0
        with pytest.raises(ValueError, match="attention_mask"):
            hub(ids, attention_mask=mask)
    with pytest.raises(ValueError, match="after a state"):
        hub(ids, state=hub(ids).state, attention_mask=torch.tensor([[0] + [1] * 19]))


def test_a_padded_batch_is_its_texts_each_alone(folders):
    hub = from_pretrained(folders / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders / "hf")
    texts = ["abc dea fonk abc dea", "k", "abc dea"]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    assert not batch["attention_mask"].bool().all() and batch["attention_mask"][:, -1].all()
    together = hub.generate(**batch, max_new_tokens=10, do_sample=False)
    losses = [hub(**batch, labels=batch["input_ids"]).loss.item()]
    total = count = 0
    for row, text in enumerate(texts):
        one = tokenizer(text, return_tensors="pt")
        alone = hub.generate(**one, max_new_tokens=10, do_sample=False)
        new = alone[0, one["input_ids"].shape[1] :].tolist()
        assert together[row, batch["input_ids"].shape[1] :].tolist()[: len(new)] == new
        pairs = one["input_ids"].shape[1] - 1
        if pairs:
            total += hub(**one, labels=one["input_ids"]).loss.item() * pairs
            count += pairs
    assert losses[0] == pytest.approx(total / count, rel=1e-5)


@pytest.mark.parametrize("mixer", EVERY)
def test_every_mixer(mixer, tmp_path, prepared):
    run = untrained_run(tmp_path / "run", prepared, mixers=[mixer])
    huggingface.export_run(run, tmp_path / "hf")
    hub = from_pretrained(tmp_path / "hf")
    ids = torch.arange(30)[None]
    with torch.no_grad():
        assert torch.equal(hub(ids).logits, load_run(run).model(ids)[0])


@pytest.fixture
def own_mixer(tmp_path, monkeypatch):
    """Write a user's package with a registered mixer; return the package's folder."""
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "scale.py").write_text("SCALE = 2.0\n")
    (package / "mixers.py").write_text(
        "from titans_pt.models.mixers.base import MIXERS\nfrom titans_pt.models.mixers.swa import SlidingWindowMixer\n"
        "from . import scale\n\n\n@MIXERS.register\nclass Twice(SlidingWindowMixer):\n    name = 'twice'\n\n"
        "    def forward(self, x, state, documents):\n        y, state = super().forward(x, state, documents)\n"
        "        return scale.SCALE * y, state\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(MIXERS, "_found", dict(MIXERS._found))
    importlib.import_module("mine.mixers")
    return package


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_the_folders_carry_their_code(tmp_path, prepared, byte_level, own_mixer):
    """transformers gives the same logits, ids and texts without this package.

    Covers all mixers (rmt allows no other beside it), both kinds of tokenizers, and a mixer from a user's package.
    """
    together = [mixer for mixer in MIXERS.built_in() if mixer != "rmt"]
    models = {"all": {"mixers": together, "n_layers": len(together)}, "rmt": {"mixers": ["rmt"]},
              "untied": {"tie_embeddings": False, "mixers": ["mal"], "vocab_size": 257},
              "own": {"mixers": ["twice"]}}  # fmt: skip
    for name, model in models.items():
        run = untrained_run(tmp_path / name, byte_level if name == "untied" else prepared, **model)
        huggingface.export_run(run, tmp_path / f"{name}-hf")
    runs = {name: load_run(tmp_path / name) for name in models}
    shutil.rmtree(own_mixer)  # only the exported folders remain
    for name, (kind, logits, ids, text) in loaded_elsewhere(tmp_path, *models).items():
        run = runs[name]
        with torch.no_grad():
            assert torch.equal(logits, run.model(torch.arange(30)[None])[0]), name
        assert ids.tolist() == [run.tokenizer.encode("abc dea")]
        new = list(greedy(run.model, *prefill(run.model, ids, 25), 5, {run.tokenizer.eos_id}))
        assert text == run.tokenizer.decode([*ids[0].tolist(), *new])
        assert kind == "transformers_modules"
    for source in (ROOT / "kernels").rglob("*.[ch]"):  # kernels in C travel as text
        [*_, found] = (tmp_path / "modules").rglob(str(source.relative_to(ROOT)))
        assert found.read_text() == source.read_text()


def test_nothing_of_this_machine_is_told(folders):
    """Exports contain no path, such as the run's folder, and nothing of the user; files have the usual permissions."""
    settings = json.loads((folders / "hf/config.json").read_text())["settings"]
    assert set(settings) == {"task", "model", "data", "train"}
    for path in (folders / "hf").iterdir():
        if path.suffix in (".json", ".md", ".py"):
            assert str(folders) not in path.read_text(), path
        assert path.stat().st_mode & 0o777 == 0o666 & ~umask(), path
    assert not [path for path in (folders / "hf").iterdir() if path.name.startswith(".")]


def umask() -> int:
    os.umask(mask := os.umask(0))
    return mask


def test_the_model_card_has_the_runs_figures(tmp_path, prepared):
    run = untrained_run(tmp_path / "run", prepared)
    rows = [{"length": 2048, "mean": 0.25}]
    summary = {"checkpoint_hash": load_run(run).checkpoint_hash, "perplexity": {"perplexity": 123.456},
               "needle": {"tasks": {"niah_single_1": {"by_length": rows}}},
               "commonsense": {"tasks": {"piqa": {"acc": 0.75, "n": 8}}}}  # fmt: skip
    (run / "evaluation/step-00000003").mkdir(parents=True)
    (run / "evaluation/step-00000003/summary.json").write_text(json.dumps(summary))
    records = [{"kind": "validation", "step": step, "validation_loss": 5.0 - step} for step in (2, 3)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    card = (huggingface.export_run(run, tmp_path / "hf") / "README.md").read_text()
    front, body = card.removeprefix("---\n").split("\n---\n", 1)
    measured = yaml.safe_load(front)["model-index"][0]["results"]
    values = [metric["value"] for result in measured for metric in result["metrics"]]
    assert values == [2.0, 123.456, 0.25, 0.75]
    for row in ("| validation text | perplexity per token | 123.5 |",
                "| needle: niah_single_1 | accuracy at 2,048 tokens | 0.25 |",
                "| lm-eval: piqa | acc | 0.75 |", "| step | 3 of 10 |", "| mixers | mac |"):  # fmt: skip
        assert row in body
    summary["checkpoint_hash"] = "of another checkpoint"
    (run / "evaluation/step-00000003/summary.json").write_text(json.dumps(summary))
    assert "123.5" not in (huggingface.export_run(run, tmp_path / "hf") / "README.md").read_text()
    (run / "evaluation/step-00000003/summary.json").write_text("{")
    with pytest.raises(
        UserError, match=r"summary.json: damaged \(.*\); make it again with: titans evaluate .*, or delete"
    ):
        huggingface.export_run(run, tmp_path / "hf")


def test_a_folder_of_version_0_1_0(folders, tmp_path):
    """Such a folder has all settings of its time, under former names and without newer ones, and no code."""
    old = tmp_path / "old"
    shutil.copytree(folders / "hf", old)
    for file in [*old.glob("*.py"), old / "README.md", old / "SHA256SUMS"]:
        file.unlink()
    path = old / "config.json"
    config = json.loads(path.read_text())
    config.pop("auto_map")
    run = load_run(folders / "run")
    whole = run.config.model_copy(update={"model": exact(run)}).model_dump(mode="json")
    whole["model"].pop("vocab_multiple")
    if "mac" in whole["model"]:
        own = whole["model"].pop("mac")
        whole["model"] |= {"segment": own["segment"], "memory_tokens": own["memory_tokens"]}
    for newer in ("forget_to", "gates"):
        whole["model"]["memory"].pop(newer)
    path.write_text(json.dumps(config | {"settings": whole}))
    hub = from_pretrained(old)
    with torch.no_grad():
        ids = torch.arange(30)[None]
        assert torch.equal(hub(ids).logits, run.model(ids)[0])
    back = load_run(huggingface.import_run(old, tmp_path / "back"))
    assert back.config.model == exact(run).model_copy(update={"vocab_multiple": 1})


@pytest.mark.parametrize("damage", ["flip", "zero", "cut"])
def test_every_damaged_file_of_an_export_is_found(folders, fails, tmp_path, damage):
    """titans import, train.init_from and sha256sum find the damage; a new export repairs it."""
    shutil.copytree(folders / "hf", tmp_path / "hf")
    files = [path for path in sorted((tmp_path / "hf").iterdir()) if path.suffix in (".safetensors", ".json", ".model")]
    assert len(files) >= 3
    for path in files:
        content = path.read_bytes()
        half = len(content) // 2
        path.write_bytes(
            {
                "flip": content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :],
                "zero": content[:half] + bytes(len(content) - half),
                "cut": content[:half],
            }[damage]
        )
        words = f"{path}: not the file that SHA256SUMS names: damaged, or changed since; copy or export it again"
        assert words in fails("import", tmp_path / "hf", "--out", tmp_path / "run")
        with pytest.raises(UserError, match="not the file that SHA256SUMS names"):
            find_weights(str(tmp_path / "hf"))
        path.write_bytes(content)
    find_weights(str(tmp_path / "hf"))
    (tmp_path / "hf" / "SHA256SUMS").write_bytes(b"\xff\xfe")
    assert "SHA256SUMS: damaged" in fails("import", tmp_path / "hf", "--out", tmp_path / "run")


def test_an_import_takes_settings_of_this_machine(folders, tmp_path):
    words = ["import", str(folders / "hf"), "data.dir=elsewhere", "--out", str(tmp_path / "run")]
    assert cli.run(words) == 0
    assert load_run(tmp_path / "run").config.data.dir == "elsewhere"


def test_an_imported_run_encodes_text_with_its_own_tokenizer(folders, prepared, tmp_path):
    source = f"[{{kind: files, path: {prepared.parent / 'text.jsonl'}}}]"
    config, words = str(folders / "back" / "config.yaml"), [f"data.dir={tmp_path / 'data'}", f"data.sources={source}"]
    assert cli.run(["prepare", config, *words]) == 0
    back, files = load_run(folders / "back"), TokenFiles.open(load_config(config, words))
    assert files.tokenizer.sha256 == back.tokenizer.sha256 == load_run(folders / "run").tokenizer.sha256


@pytest.fixture
def fails(capsys):
    """Runs a command line that must fail with one line; returns it."""

    def run(*words) -> str:
        assert cli.run([str(word) for word in words]) == 2
        (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("titans: error")]
        return line

    return run


def test_says_what_is_wrong(folders, fails, tmp_path):
    assert "name a folder that titans export wrote" in fails("import", folders / "run", "--out", folders / "x")
    assert "holds a run already" in fails("import", folders / "hf", "--out", folders / "back")
    (tmp_path / "file").write_text("mine")
    assert "is a file (see" in fails("export", folders / "run", "--out", tmp_path / "file")
    with pytest.raises(UserError, match="is a file; name a folder"):
        huggingface.export_run(folders / "run", tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_foreign_and_damaged_folders_are_one_line(folders, fails, tmp_path):
    def copy(name, change):
        shutil.copytree(folders / "hf", tmp_path / name)
        (tmp_path / name / "SHA256SUMS").unlink()  # else every change is found by its checksum
        change(tmp_path / name)
        return fails("import", tmp_path / name, "--out", tmp_path / "run")

    config = json.loads((folders / "hf/config.json").read_text())
    weights = (folders / "hf/model.safetensors").read_bytes()
    deeper = config["settings"] | {"model": config["settings"]["model"] | {"n_layers": 2}}
    for name, file, content, words in (
        ("gemma", "config.json", json.dumps({"model_type": "gemma", "vocab_size": 3}), "a model of type 'gemma'"),
        ("llama", "config.json", json.dumps({"model_type": "llama", "vocab_size": 999}), "not those of a llama"),
        ("list", "config.json", "[1]", "not JSON with fields"),
        ("half", "config.json", '{"model_type": "tit', "not JSON with fields"),
        ("later", "config.json", json.dumps(config | {"settings": {"model": {"wings": 2}}}), "of a later version"),
        ("other", "config.json", json.dumps(config | {"settings": deeper}), "its weights are not those of the model"),
        ("cut", "model.safetensors", weights[:-10], "damaged"),
    ):
        change = content.encode() if isinstance(content, str) else content
        assert words in copy(name, lambda folder, file=file, change=change: (folder / file).write_bytes(change))
    assert "holds no model*.safetensors" in copy("none", lambda folder: (folder / "model.safetensors").unlink())
    assert not (tmp_path / "run").exists()
