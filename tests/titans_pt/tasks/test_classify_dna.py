"""Classification of sequences: the mean over bases, the protocol, training, weights of a language model."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers.processes import curve, run_jobs
from titans_pt import cli
from titans_pt.config import Config
from titans_pt.config.checks import checked
from titans_pt.config.files import load_config
from titans_pt.errors import UserError
from titans_pt.genomics.alphabet import COMPLEMENT, PAD
from titans_pt.genomics.sets import source_files, state_of
from titans_pt.runs import checkpoints
from titans_pt.runs.loaded import load_run
from titans_pt.runs.metrics import read_metrics
from titans_pt.tasks import task_of
from titans_pt.tasks.classify_dna import CLASSES, LabelledSamples, SequenceClassifier
from titans_pt.tools.sealed import seal, unseal
from titans_pt.training import loop
from titans_pt.training.plan import make_plan

DNA = {"data": {"tokenizer": {"kind": "nucleotides"}, "validation_fraction": 0.1},
       "model": {"vocab_size": 12, "vocab_multiple": 4}}  # fmt: skip


def write_set(folder: Path, rows: int = 80) -> Path:
    """Three classes: sequences of 5 to 30 bases that hold AAAA, CCCC or neither; some of the test are copies."""
    draw, copied = np.random.default_rng(0), []
    (folder / "set").mkdir(parents=True)
    for split in ("train", "test"):
        lines = ["sequence,label"]
        for n in range(rows if split == "train" else rows // 2):
            bases = "".join(draw.choice(list("ACGT"), draw.integers(5, 27)))
            lines.append(f"{bases}{('AAAA', 'CCCC', '')[n % 3]},{'abc'[n % 3]}")
        lines += copied
        copied = lines[1:5]
        (folder / "set" / f"{split}.csv").write_text("\n".join(lines) + "\n")
    return folder / "set"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a set, and with its sequences prepared as ``dna`` has them."""
    folder = tmp_path_factory.mktemp("dna")
    path = write_set(folder)
    tree = {"task": "classify_dna", "classify_dna": {"set": None, "path": str(path), "middle": 20},
            "data": DNA["data"] | {"dir": str(folder / "data"), "seq_len": 32}, "model": DNA["model"],
            "train": {"batch_tokens": 512}}  # fmt: skip
    task_of(checked(Config.model_validate(tree))).prepare()
    return folder


@pytest.fixture
def dna(tiny, tmp_path, made):
    """A tiny config of the task, its set prepared."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "set"
    data = {"dir": str(tmp_path / "data"), "sources": [{"kind": "stdlib"}], "seq_len": 32, "reverse_complement": True}
    changes = {
        "task": "classify_dna", "classify_dna": {"set": None, "path": str(path), "middle": 20},
        "data": DNA["data"] | data, "model": DNA["model"] | {"mixers": ["lmm"]},
        "train": {"batch_tokens": 512, "micro_batch": 4, "eval_every": 5, "checkpoint_every": 5, "lr": 5e-3,
                  "warmup_steps": 2},
    }  # fmt: skip
    file, manifest = tiny(**changes), tmp_path / "data" / "set.json"
    settings = {"path": str(path), "set": None, "crop": None, "middle": 20, "reference": None}
    moved = unseal(manifest.read_bytes()) | {"settings": settings, "state": state_of(source_files(path, None))}
    manifest.write_text(json.dumps(seal(moved)))
    return file


MIXERS = ("lmm", "mac", "mag", "mal", "attention", "swa", "mamba2", "gated_deltanet")


@pytest.mark.parametrize("mixer", MIXERS)
def test_what_stands_behind_a_sequence_changes_nothing(dna, mixer):
    """Padded rows have the logits and gradients of each row alone, whatever the padding holds."""
    config = load_config(dna, [f"model.mixers=[{mixer}]"])
    torch.manual_seed(0)
    model = SequenceClassifier(config.model, 3).double()
    lengths = torch.tensor([5, 17, 32, 9])
    ids = torch.randint(7, 12, (4, 48))
    padded = ids.masked_fill(torch.arange(48) >= lengths[:, None], PAD)
    found = {name: model(given, lengths)[0] for name, given in {"any": ids, "pad": padded}.items()}
    alone = torch.cat([model(row[None, :n], n[None])[0] for row, n in zip(ids, lengths, strict=True)])
    for name, logits in found.items():
        assert torch.allclose(logits, alone, rtol=0, atol=1e-12), name
    weight = torch.randn(4, 3, dtype=torch.float64)
    gradients = [torch.autograd.grad((logits * weight).sum(), model.embedding.weight)[0]
                 for logits in (found["pad"], alone)]  # fmt: skip
    assert torch.allclose(*gradients, rtol=0, atol=1e-12) and gradients[0][PAD].abs().max() == 0


def test_the_mean_is_of_the_bases_alone(dna):
    config = load_config(dna)
    model = SequenceClassifier(config.model, 2)
    seen = {}
    model.norm.register_forward_hook(lambda _m, _a, y: seen.update(x=y))
    model.classifier.register_forward_hook(lambda _m, a, _y: seen.update(mean=a[0]))
    model(torch.randint(7, 12, (2, 12)), torch.tensor([3, 12]))
    assert torch.allclose(seen["mean"][0], seen["x"][0, :3].mean(0)) and torch.allclose(
        seen["mean"][1], seen["x"][1].mean(0)
    )


def test_the_protocol(dna):
    """The seed selects a tenth of the training set for validation; an epoch reads each training sequence once.

    Half of the samples are of the other strand, in training alone.
    """
    task = task_of(load_config(dna))
    data = task.open()
    assert (len(data.train), len(data.validation)) == (72, 8)
    train, held_out = ({data.index(i) for i in range(len(data))} for data in (data.train, data.validation))
    assert not train & held_out and train | held_out == set(range(80))
    other = task_of(load_config(dna, ["run.seed=1"])).open()
    assert {other.validation.index(i) for i in range(8)} != held_out
    more = task_of(load_config(dna, ["data.validation_fraction=0.2"]))
    assert more.open().identity["split"] != data.identity["split"], "a run is not continued with another split"
    told = more.differs("split", Path("RUN"), "8", "16")
    assert told.startswith(
        "data.validation_fraction: given 0.2, for 16 sequences of validation, but RUN was trained with 8"
    )
    turned = 0
    for position in range(72):
        ids, length, label = data.train.sample(position)
        own = data.train.split.sequences[data.train.index(position)]
        assert (
            length == len(own)
            and (ids[length:] == PAD).all()
            and label == data.train.split.labels[data.train.index(position)]
        )
        plain = LabelledSamples(data.train.split, data.train.rows, 32, 0, shuffle=True, turned=False).sample(position)[
            0
        ]
        if not np.array_equal(ids, plain):
            assert np.array_equal(ids[:length], COMPLEMENT[plain[:length][::-1]])
            assert data.train.describe(position)["other_strand"]
            turned += 1
    assert 22 <= turned <= 50
    assert sum("other_strand" in data.train.describe(position) for position in range(72)) < 72
    assert not data.validation.turned and data.baseline == pytest.approx(np.log(3), abs=0.01)
    batch = tuple(torch.from_numpy(np.stack(part)) for part in zip(*map(data.train.sample, range(4)), strict=True))
    assert task.to_device(batch, torch.device("cpu"))[0].shape == (4, 32)


def test_settings_and_data_that_do_not_go_together(dna, tmp_path):
    for words, message in {
        ("data.tokenizer.kind=text", "data.reverse_complement=false"): "must be nucleotides for task=classify_dna",
        ("classify_dna.set=splice",): "classify_dna.path: .* name a folder with classify_dna.set=null",
        ("classify_dna.path=null",): "classify_dna.path: given None; name a folder",
        (
            "classify_dna.path=null",
            "classify_dna.set=splice",
            "classify_dna.reference=a.fa",
        ): "only with classify_dna.path",
        ("classify_dna.crop=64",): "classify_dna.crop: given 64; at most data.seq_len=32",
        ("model.memory.write_cost=0.1",): "not with task=classify_dna",
        ("parallel.sequence=true",): "parallel.sequence: given True; not with task=classify_dna",
        ("parallel.context=2",): "parallel.context: given 2; must be 1 with task=classify_dna",
        ("model.vocab_size=8",): "model.vocab_size: given 8; at least 12",
    }.items():
        with pytest.raises(UserError, match=message):
            load_config(dna, words)
    with pytest.raises(UserError, match="data.seq_len: given 16, but the longest sequence of .* bases; set it to"):
        task_of(load_config(dna, ["data.seq_len=16"])).open()
    with pytest.raises(
        UserError, match=r"classify_dna.crop: made with None, config has 8\); choose another data.dir, or run"
    ):
        task_of(load_config(dna, ["classify_dna.crop=8"])).open()
    with pytest.raises(UserError, match=r"classify_dna.middle: made with 20, config has 10\)"):
        task_of(load_config(dna, ["classify_dna.middle=10"])).open()
    with pytest.raises(UserError, match="holds no labelled sequences; run: titans prepare CONFIG"):
        task_of(load_config(dna, [f"data.dir={tmp_path / 'none'}"])).open()
    with pytest.raises(UserError, match=r"another set \(classify_dna.crop differs\)"):
        task_of(load_config(dna, ["classify_dna.crop=8"])).prepare()
    cropped = task_of(load_config(dna, ["classify_dna.crop=8", "data.seq_len=8", "train.batch_tokens=64"]))
    cropped.prepare(force=True)
    assert max(map(len, cropped.open().train.split.sequences)) == 8


def test_a_damaged_manifest_of_a_set_is_one_line(dna, tmp_path):
    manifest = tmp_path / "data" / "set.json"
    whole = unseal(manifest.read_bytes())
    for text, message in (("{", r"damaged \("), (json.dumps(seal(whole | {"format": 0})), "of format 0, this")):
        manifest.write_text(text)
        for read in (task_of(load_config(dna)).prepare, task_of(load_config(dna)).open):
            with pytest.raises(UserError, match=f"{manifest}: {message}.*titans prepare CONFIG --force"):
                read()
    task_of(load_config(dna)).prepare(force=True)
    task_of(load_config(dna)).open()


def test_other_letters_are_told(dna, tmp_path, capsys):
    table = tmp_path / "set" / "train.csv"
    table.write_text(table.read_text() + "ACGTRRY,a\n")
    task_of(load_config(dna)).prepare(force=True)
    assert "letters other than A, C, G, T, N, all read as N: 2 R, 1 Y" in capsys.readouterr().err


def test_a_run_keeps_its_split_and_its_classes(dna, tmp_path, one_group):
    words, run = [f"run.dir={tmp_path / 'run'}", "train.warmup_steps=0"], tmp_path / "run"
    assert loop.train(load_config(dna, [*words, "train.max_steps=1"])) == 0
    with pytest.raises(UserError, match="data.validation_fraction: given 0.3, for .* was trained with .*; put it back"):
        loop.train(load_config(dna, [*words, "train.max_steps=2", "data.validation_fraction=0.3"]))
    (run / CLASSES).write_text("3")
    with pytest.raises(UserError, match=f"{run / CLASSES}: missing or damaged .*; the same titans train command write"):
        load_run(run)
    assert loop.train(load_config(dna, [*words, "train.max_steps=1"])) == 0
    assert load_run(run).task.classes == ("a", "b", "c")


def test_a_set_is_compared_by_its_content(dna, tmp_path, capsys):
    """Copied files have other times; they are the same set unless their sequences or labels differ."""
    task, table = task_of(load_config(dna)), tmp_path / "set" / "train.csv"
    manifest = tmp_path / "data" / "set.json"
    before = unseal(manifest.read_bytes())
    for change in (lambda: os.utime(table, ns=(0, 0)), lambda: (tmp_path / "set" / "README").write_text("a note")):
        change()
        task.prepare()
        assert "up to date" in capsys.readouterr().err
        after = unseal(manifest.read_bytes())
        assert after["state"] == state_of(source_files(tmp_path / "set", None)) != before["state"]
        assert {**after, "state": 0} == {**before, "state": 0}
    text = table.read_text()
    table.write_text(text.replace("AAAA", "AAAC", 1))  # of the same size
    with pytest.raises(UserError, match=r"another set \(the files have changed\)"):
        task.prepare()
    table.write_text(text)
    task.prepare()
    task.open()


@pytest.mark.thorough
def test_it_trains_resumes_and_is_evaluated(dna, tmp_path, capsys, one_group):
    """10 steps at once, or 5 and 5: the same weights, bit for bit. Tensor ranks and ZeRO 2: the same losses."""
    for name, *words in (("whole",), ("parts", "train.stop_at=5"), ("parts",)):
        assert cli.run(["train", str(dna), f"run.dir={tmp_path / name}", *words]) == 0
    run_jobs(2, dna, tmp_path, {"tensor": ["parallel.tensor=2", "parallel.zero_stage=2"],
                               "zero": ["parallel.zero_stage=2"]})  # fmt: skip
    capsys.readouterr()
    for name in (checkpoints.MODEL, checkpoints.OPTIMIZER):
        whole, parts = (tmp_path / run / "checkpoints" / "step-00000010" / name for run in ("whole", "parts"))
        assert whole.read_bytes() == parts.read_bytes()
    curves = {name: curve(tmp_path / name, "loss", "grad_norm") for name in ("whole", "parts", "tensor", "zero")}
    assert curves["parts"] == curves["whole"]
    for name in ("tensor", "zero"):
        for a, b in zip(curves["whole"], curves[name], strict=True):
            assert b == pytest.approx(a, rel=1e-3)
    validations = [r for r in read_metrics(tmp_path / "whole" / "metrics.jsonl") if r["kind"] == "validation"]
    assert [r["step"] for r in validations] == [5, 10] and all(0 <= r["validation_accuracy"] <= 1 for r in validations)
    assert load_run(tmp_path / "whole").task.classes == ("a", "b", "c")

    run = str(tmp_path / "whole")
    assert cli.run(["evaluate", run]) == 0
    told = capsys.readouterr().out
    assert "without copies of training sequences" in told and "middle 20 bases alone" in told and "look-up" in told
    summary = json.loads((tmp_path / "whole" / "evaluation" / "step-00000010" / "summary.json").read_text())["classes"]
    assert {name: row["n"] for name, row in summary["columns"].items()} == {"test": 44, "distinct": 40, "middle": 44}
    counts = np.array(summary["columns"]["test"]["confusion"])
    truth = [line.rpartition(",")[2] for line in (tmp_path / "set" / "test.csv").read_text().split()[1:]]
    assert counts.sum(1).tolist() == [truth.count(name) for name in summary["classes"]]
    assert counts.trace() == round(44 * summary["columns"]["test"]["mean"])
    assert f"of {truth.count('b')} b, predicted: " in told
    assert summary["baselines"]["majority"]["test"]["n"] == 44 and summary["copies"] == 4

    def error(*words):
        assert cli.run([str(word) for word in words]) == 2
        return capsys.readouterr().err

    assert "trained for the task 'classify_dna', which has no text" in error("generate", run, "--prompt", "A")
    (tmp_path / "set" / "train.csv").write_text((tmp_path / "set" / "test.csv").read_text())
    assert "holds sequences of another set (the files have changed)" in error("prepare", dna)
    assert "--shard: given 0/2, which divides the text of token files, but task=classify_dna reads none" in error(
        "prepare", dna, "--shard", "0/2"
    )
    assert cli.run(["prepare", str(dna), "--force"]) == 0
    assert "holds another set than" in error("evaluate", run)
    assert "holds another set than" in error("train", dna, f"run.dir={run}", "train.max_steps=20")


def test_weights_of_a_language_model(dna, tiny, tmp_path, one_group, capsys):
    """Embedding, blocks and norm are loaded, the linear layer is drawn; another tokenizer's weights are refused."""
    genome = "".join(np.random.default_rng(1).choice(list("ACGT"), 4000))
    (tmp_path / "g.fa").write_text(f">g\n{genome}\n")
    data = {
        "dir": str(tmp_path / "genome"),
        "sources": [{"kind": "fasta", "path": str(tmp_path / "g.fa"), "block": 200}],
    }
    text = dna.read_text()
    model = DNA["model"] | {"mixers": ["lmm"]}
    language = tiny(data=DNA["data"] | data, model=model, run={"dir": str(tmp_path / "lm")}, train={"max_steps": 3})
    assert cli.run(["prepare", str(language)]) == 0
    assert cli.run(["train", str(language)]) == 0
    assert "Markov chain of order" in capsys.readouterr().out
    assert load_run(tmp_path / "lm").task.usual == ("perplexity",), "the other suites ask in English"
    assert cli.run(["evaluate", str(tmp_path / "lm"), "--suite", "needle"]) == 2
    assert "--suite: given 'needle'; allowed: perplexity" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"evaluation.suites: given \['needle'\]; must be \[perplexity\] with data.tok"):
        load_config(language, ["evaluation.every=5"])
    assert cli.run(["train", str(language), f"run.dir={tmp_path / 'words'}", "data.tokenizer.kind=text",
                    "data.sources=[{kind: stdlib}]"]) == 2  # fmt: skip
    dna.write_text(text)
    start = [f"train.init_from={tmp_path / 'lm'}", "train.max_steps=1", "train.lr=1e-12", "train.warmup_steps=0"]
    assert cli.run(["train", str(dna), *start, f"run.dir={tmp_path / 'tuned'}"]) == 0
    before, after = (load_run(tmp_path / name).model.state_dict() for name in ("lm", "tuned"))
    shared = [name for name in after if not name.startswith("classifier.")]
    assert set(shared) <= set(before) and all(torch.allclose(before[n], after[n], atol=1e-6) for n in shared)
    capsys.readouterr()
    # A classifier's weights can start another classifier, also with other classes, but no language model.
    again = [f"train.init_from={tmp_path / 'tuned'}", *start[1:], f"run.dir={tmp_path / 'again'}"]
    assert cli.run(["train", str(dna), *again]) == 0
    language = tiny(data=DNA["data"] | data, model=DNA["model"] | {"mixers": ["lmm"]})
    assert cli.run(["train", str(language), f"train.init_from={tmp_path / 'tuned'}"]) == 2
    assert "was trained for the task 'classify_dna', not 'language'" in capsys.readouterr().err


def test_its_plan(dna, tmp_path):
    plan = make_plan(task_of(load_config(dna)), 1)
    assert plan.bytes["activations"] > 0 and "logits" not in plan.bytes
    model = task_of(load_config(dna)).build_model()
    assert model.classifier.out_features == 3, "as many as the prepared set has"
    assert task_of(load_config(dna, [f"data.dir={tmp_path / 'none'}"])).build_model().classifier.out_features == 2
