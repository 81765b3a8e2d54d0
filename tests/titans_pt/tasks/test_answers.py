"""Tasks with answers: packed samples stay separate, loss and accuracy count answers only, ranks change nothing."""

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.helpers.processes import ENVIRONMENT, curve, run_jobs
from tests.titans_pt.parallel.test_split import on_ranks
from tests.titans_pt.tasks.test_ruler import settings
from titans_pt.config.files import load_config
from titans_pt.config.yaml import resolved_yaml
from titans_pt.data_pipeline.loader import collate
from titans_pt.errors import UserError
from titans_pt.layers.memory_gates import MemoryGates
from titans_pt.parallel import RankGroup, TensorParallel
from titans_pt.runs import checkpoints
from titans_pt.runs.metrics import read_metrics
from titans_pt.tasks import TASKS
from titans_pt.tasks.answers import AnswerLoss, AnswersOnly, PackedQuestions, answered, apart, equal_samples
from titans_pt.tasks.sft import DocumentAnswers
from titans_pt.training import loop

pytestmark = pytest.mark.usefixtures("one_group")

SMALL = [
    "model.d_model=16", "model.vocab_size=64", "model.n_layers=1", "model.window=8", "model.memory.chunk_size=8",
    "model.mac.segment=8", "model.mac.memory_tokens=4", "needles.held_out=0", "needles.needles=2",
    "needles.lengths='24,48'", "data.seq_len=64", "train.batch_tokens=256", "train.micro_batch=2", "train.max_steps=8",
    "train.warmup_steps=1", "train.eval_every=4", "train.eval_samples=4", "train.log_every=1",
    "train.checkpoint_every=4", "train.stop_when=null",
]  # fmt: skip


def objective(*words):
    task = TASKS.find("needles")(load_config("configs/needles.yaml", [*SMALL, *words]))
    torch.manual_seed(0)
    return task, task.objective(task.build_model(), RankGroup())


@pytest.mark.parametrize("mixer", ["lmm", "mac", "swa"])
def test_loss_and_accuracy_are_those_of_the_answers_of_each_sample_alone(mixer):
    """A row of 64 tokens holds two samples of 24 and a rest of 16."""
    task, loss = objective(f"model.mixers=[{mixer}]")
    rows = collate([task.open().train.sample(n) for n in range(3)])
    losses, right = [], []
    for row in range(3):
        for n in range(2):
            ids, places = task.questions(0).sample(0, 2 * row + n)
            logits = loss.model(torch.from_numpy(ids)[None])[0][0]
            losses.append(F.cross_entropy(logits[places], torch.from_numpy(ids)[places + 1]))
            right.append(answered(loss.model, torch.from_numpy(ids)[None], torch.from_numpy(places)[None]))
    assert float(loss(*rows)) == pytest.approx(float(torch.stack(losses).mean()), rel=1e-5)
    weighted = loss(*rows, weight=torch.tensor([1.0, 1.0, 0.0]))
    assert float(weighted["loss"]) == pytest.approx(float(torch.stack(losses[:4]).mean()), rel=1e-5)
    assert float(weighted["accuracy"]) == pytest.approx(float(torch.stack(right[:4]).float().mean()))


def test_rows_of_unlike_samples_are_documents_and_give_the_same():
    task, loss = objective("model.mixers=[lmm]")
    data = task.open().train
    short, long = collate([data.sample(0)]), collate([data.sample(31)])
    assert equal_samples(short[1]) == (2, 24) and equal_samples(long[1]) == (1, 48)
    both = collate([data.sample(0), data.sample(31)])
    assert equal_samples(both[1]) is None
    expected = (loss(*short) + loss(*long)) / 2
    assert float(loss(*both)) == pytest.approx(float(expected), rel=1e-5)
    x = torch.arange(2 * 7).view(2, 7)
    assert apart(x, 2, 3).tolist() == [[0, 1, 2], [3, 4, 5], [7, 8, 9], [10, 11, 12]]


@pytest.mark.parametrize("mixer", ["lmm", "swa"])
def test_ranks_that_share_steps_keep_rows_whole_unless_they_divide_a_sample(mixer):
    """Four ranks cannot share the 26 steps of a sample: they share the 64 of its row, with the same loss."""
    words = [f"model.mixers=[{mixer}]", "model.n_heads=4", "needles.lengths='26,48'"]
    task, whole = objective(*words)
    shared, _ = objective(*words, "parallel.tensor=4", "parallel.sequence=true")
    rows = collate([task.open().train.sample(n) for n in range(2)])
    models = [objective(*words)[1].model for _ in range(4)]

    def on_rank(group):
        model = models[group.rank]
        TensorParallel(model, group, sequence=True)
        return float(shared.objective(model, group)(*rows))

    assert on_ranks(4, on_rank) == pytest.approx([float(whole(*rows))] * 4, rel=1e-5)


def test_a_length_that_fills_the_row_leaves_no_rest():
    fixed = SimpleNamespace(length=8, sample=lambda seed, index: (np.full(8, index), np.array([6])))
    ids, reset, asked = PackedQuestions(lambda position: fixed, 16, 0).sample(3)
    assert ids.tolist() == [6] * 8 + [7] * 8 + [0]
    assert np.flatnonzero(reset).tolist() == [0, 8] and np.flatnonzero(asked).tolist() == [6, 14]


@pytest.mark.parametrize("length", [48, 50])  # rows with and without a rest
def test_the_head_is_applied_to_answers_alone(length):
    task, loss = objective("model.mixers=[lmm]", f"data.seq_len={length}", f"train.batch_tokens={2 * length}")
    ids, reset, asked = collate([task.open().train.sample(n) for n in range(2)])
    seen = []
    loss.model.head.register_forward_hook(lambda module, given, out: seen.append(given[0].shape[:-1].numel()))
    loss(ids, reset, asked).backward()
    assert sum(seen) == int(asked.sum()) < asked.numel() / 3


def test_writes_cost_only_rows_whose_answers_are_right_and_move_gradients_alone():
    def gradients(cost, right):
        task, loss = objective("model.mixers=[lmm]", f"model.memory.write_cost={cost}")
        rows = collate([task.open().train.sample(n) for n in range(2)])
        targets = rows[0][:, 1:][rows[2]]  # of the answers
        loss.best = lambda logits: targets if right else targets + 1
        value = loss(*rows)
        value.backward()
        (gates,) = (module for module in loss.model.modules() if isinstance(module, MemoryGates))
        return float(value), gates.linear.weight.grad.clone()

    free, wrong, dear = gradients(0, True), gradients(10, False), gradients(10, True)
    assert free[0] == wrong[0] == dear[0]
    assert torch.equal(free[1], wrong[1])
    assert (free[1] - dear[1]).abs().max() > 1e-4


@pytest.fixture(scope="module")
def needles(tmp_path_factory):
    """A config file of the small task."""
    path = tmp_path_factory.mktemp("needles") / "needles.yaml"
    words = [*SMALL, "model.mixers=[lmm]", "model.memory.write_cost=0.1", "train.lr=0.01"]
    path.write_text(resolved_yaml(load_config("configs/needles.yaml", words)))
    return path


def train(config, folder, *words):
    """Train in this process."""
    assert loop.train(load_config(config, [f"run.dir={folder}", *words])) == 0


def test_pieces_of_rows_have_their_share_of_the_answers():
    task, _ = objective("model.mixers=[lmm]")
    ids, reset, asked = batch = collate([task.open().train.sample(n) for n in range(3)])
    pieces = [task.cut(batch, part, 4) for part in range(4)]
    for whole, parts in ((ids[:, :-1], [p[0][:, :-1] for p in pieces]), (ids[:, 1:], [p[0][:, 1:] for p in pieces]),
                         (reset, [p[1] for p in pieces]), (asked, [p[2] for p in pieces])):  # fmt: skip
        assert torch.equal(whole, torch.cat(parts, 1))
    shares = torch.stack([piece[3].sum(1) for piece in pieces])
    assert torch.allclose(shares.mean(0), torch.ones(3)) and (shares == 0).any()


@pytest.mark.parametrize("kind", [AnswerLoss, DocumentAnswers])
def test_pieces_weigh_answers_as_whole_rows_do(kind):
    """The first sample of the row has one answer, the second three."""
    _, whole = objective("model.mixers=[lmm]")
    task = SimpleNamespace(answer_loss=kind)
    ids = torch.randint(0, 64, (1, 9), generator=torch.Generator().manual_seed(1))
    reset, asked = torch.zeros(2, 1, 8, dtype=torch.bool)
    reset[0, [0, 4]] = asked[0, [1, 4, 5, 6]] = True
    loss = kind(whole.model, whole.cross_entropy, whole.best, 0.0, 0.0)
    expected = float(loss(ids, reset, asked))
    found = []
    losses = loss._losses(loss.model(ids[:, :-1], reset=reset, head=False)[0], ids[:, 1:])[..., 0]
    for part in range(2):
        *_, asked_here, here = AnswersOnly.cut(task, (ids, reset, asked), part, 2)
        assert torch.equal(here > 0, asked_here)
        found.append((losses[:, 4 * part : 4 * part + 4] * here).sum())
    assert float(torch.stack(found).mean()) == pytest.approx(expected, rel=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("mixer", ["lmm", "mac"])
def test_context_ranks_change_nothing(needles, tmp_path, mixer):
    """Also where a rank's piece has no answer: needles are asked for at the end of a sample."""
    free = ["model.memory.write_cost=0", f"model.mixers=[{mixer}]", "needles.lengths='48'"]
    train(needles, tmp_path / "free", *free)
    run_jobs(2, needles, tmp_path, {"context": ["parallel.context=2", *free]})
    for a, b in zip(*(curve(tmp_path / name, "loss", "grad_norm") for name in ("free", "context")), strict=True):
        assert b == pytest.approx(a, rel=1e-4)
    figures = [
        [(r["validation_loss"], r["validation_accuracy"]) for r in read_metrics(tmp_path / name / "metrics.jsonl")
         if r["kind"] == "validation"]
        for name in ("free", "context")
    ]  # fmt: skip
    assert figures[1] == [pytest.approx(each, rel=1e-4) for each in figures[0]] and len(figures[0]) == 2


@pytest.mark.thorough
def test_ranks_change_nothing_and_a_figure_ends_a_training(needles, tmp_path):
    for name, words in (
        ("whole", []),
        ("parts", ["train.stop_at=3"]),
        ("parts", []),
        ("ended", ["train.stop_when=loss <= 100"]),
        ("ended", ["train.stop_when=loss <= 100"]),
    ):
        train(needles, tmp_path / name, *words)
    run_jobs(2, needles, tmp_path, {"tensor": ["parallel.tensor=2"], "data": ["parallel.zero_stage=2"]})
    whole, parts = (tmp_path / run / "checkpoints" / "step-00000008" / checkpoints.MODEL for run in ("whole", "parts"))
    assert whole.read_bytes() == parts.read_bytes()
    reference = curve(tmp_path / "whole", "loss", "grad_norm")
    for name in ("tensor", "data"):
        for a, b in zip(reference, curve(tmp_path / name, "loss", "grad_norm"), strict=True):
            assert b == pytest.approx(a, rel=1e-4)
    rows = {name: [r for r in read_metrics(tmp_path / name / "metrics.jsonl") if r["kind"] == "validation"]
            for name in ("whole", "tensor", "ended")}  # fmt: skip
    assert [r["step"] for r in rows["whole"]] == [4, 8] and [r["step"] for r in rows["ended"]] == [4]
    for a, b in zip(rows["whole"], rows["tensor"], strict=True):
        assert b["validation_loss"] == pytest.approx(a["validation_loss"], rel=1e-4)
        assert b["validation_accuracy"] == pytest.approx(a["validation_accuracy"], abs=0.05)
    log = (tmp_path / "ended" / "log.txt").read_text()
    assert log.count("ended by train.stop_when='loss <= 100'") == 2, "the second start trains nothing"


@pytest.mark.thorough
def test_a_killed_training_goes_on(needles, tmp_path):
    """After kill -9 between two checkpoints, the same command ends with the weights of an uninterrupted run."""
    more = ["train.max_steps=40", "train.checkpoint_every=10"]
    words = [sys.executable, "-m", "titans_pt", "train", str(needles), f"run.dir={tmp_path / 'cut'}", *more]
    with subprocess.Popen(words, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while not (tmp_path / "cut/checkpoints/step-00000010/manifest.json").exists() and process.poll() is None:
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
    for name in ("cut", "whole"):
        train(needles, tmp_path / name, *more)
    weights = [tmp_path / name / "checkpoints/step-00000040" / checkpoints.MODEL for name in ("cut", "whole")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_a_changed_setting_of_the_task_is_named_at_a_resume_and_moved_stages_are_told(needles, tmp_path, caplog):
    train(needles, tmp_path / "run", "train.max_steps=4")
    words = [f"run.dir={tmp_path / 'run'}", "train.max_steps=6"]
    with pytest.raises(
        UserError, match="needles.needles: given 1, but .*step-00000004 was trained with 2; put it back"
    ):
        loop.train(load_config(needles, [*words, "needles.needles=1"]))
    train(needles, tmp_path / "run", "train.max_steps=6")
    told = (
        "the stages of needles.lengths are parts of train.max_steps: step 5 begins after 67% of them, with the former"
    )
    assert told in caplog.text


@pytest.mark.parametrize("name", ["recall", "needles", "state_tracking", "ruler"])
def test_a_batch_of_another_device(name, tiny, prepared):
    """Parts of a batch stay on the host; meta tensors stand for a GPU's."""
    config, words = (tiny(), settings(prepared)) if name == "ruler" else (name, [])
    small = ["model.mixers=[swa]", "model.d_model=32", "model.n_layers=1"]
    task = TASKS.find(name)(load_config(config, [*words, *small]))
    batch = collate([task.open().train.sample(0)])
    with torch.device("meta"):
        loss = task.objective(task.build_model(), RankGroup())
    assert loss(*task.to_device(batch, torch.device("meta"))).is_meta
