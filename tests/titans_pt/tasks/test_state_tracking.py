"""State tracking: tables are groups, samples keep their promises, impossible ones are refused, beta reaches 2."""

import itertools
import json

import numpy as np
import pytest
import torch

from tests.helpers.processes import curve, run_jobs
from titans_pt.config.files import load_config
from titans_pt.config.yaml import resolved_yaml
from titans_pt.data_pipeline.loader import collate
from titans_pt.errors import UserError
from titans_pt.evaluation.runner import evaluate
from titans_pt.models.mixers import MIXERS
from titans_pt.parallel import RankGroup
from titans_pt.runs import checkpoints
from titans_pt.runs.loaded import load_run
from titans_pt.tasks import TASKS
from titans_pt.tasks.answers import EVALUATION_SEED
from titans_pt.tasks.groups import group
from titans_pt.tasks.state_tracking import NOTHING, stages
from titans_pt.training import loop

pytestmark = pytest.mark.usefixtures("one_group")

CONFIG = "configs/state_tracking.yaml"
SMALL = [
    "model.d_model=16", "model.n_layers=1", "model.mixers=[lmm]", "model.memory.chunk_size=1", "data.seq_len=64",
    "state_tracking.lengths='4,8-16'", "train.batch_tokens=256", "train.micro_batch=2", "train.max_steps=8",
    "train.warmup_steps=1", "train.eval_every=4", "train.eval_samples=4", "train.log_every=1",
    "train.checkpoint_every=4", "evaluation.state_tracking.lengths=[16,64]", "evaluation.state_tracking.samples=8",
]  # fmt: skip


def task(*words):
    return TASKS.find("state_tracking")(load_config(CONFIG, list(words)))


@pytest.mark.parametrize(
    ("name", "order", "abelian", "square_roots"),
    [("parity", 2, True, 2), ("Z60", 60, True, 2), ("S3", 6, False, 4), ("S4", 24, False, 10), ("A5", 60, False, 16),
     ("S5", 120, False, 26), ("A4xZ5", 60, False, 4)],
)  # fmt: skip
def test_tables_are_groups(name, order, abelian, square_roots):
    """``square_roots`` is the known number of elements whose square is the identity."""
    table = group(name).table
    assert table.shape == (order, order)
    assert (table[0] == np.arange(order)).all() and (table[:, 0] == np.arange(order)).all()
    assert (np.sort(table, 0) == np.arange(order)[:, None]).all() and (np.sort(table, 1) == np.arange(order)).all()
    assert (table[table] == table[:, table]).all(), "(a b) c = a (b c)"
    assert (table == table.T).all() == abelian
    assert (np.diagonal(table) == 0).sum() == square_roots


def test_known_products():
    assert (group("Z60").table == (np.arange(60)[:, None] + np.arange(60)) % 60).all()
    s3 = group("S3")
    of = {tuple(p): n for n, p in enumerate(s3.elements.tolist())}
    assert s3.table[of[1, 0, 2], of[0, 2, 1]] == of[2, 0, 1], "0 to 1 to 2, 1 to 0, 2 to 1: the first swap first"
    s5 = group("S5")
    kinds = {name: len(s5.generators(name)) for name in ("all", "swaps", "three_cycles", "moves-3", "moves-2")}
    assert kinds == {"all": 120, "swaps": 10, "three_cycles": 20, "moves-3": 31, "moves-2": 11}
    assert group("A5").generators("pair").tolist() == [1, 15] and len(group("Z2xZ2xZ2").generators("pair")) == 0
    assert s5.products(s5.generators("swaps"), 65).max() == pytest.approx(1 / 60), "an odd number of swaps is odd"


@pytest.mark.parametrize(
    "words",
    [["parity"], ["Z7"], ["S5", "state_tracking.generators=swaps"], ["A5", "state_tracking.tokens=3"],
     ["S3", "state_tracking.asked=last"]],
)  # fmt: skip
def test_answers_are_prefix_products(words):
    own = task(f"state_tracking.problem={words[0]}", "state_tracking.lengths=3-5/9".replace("/9", ""), *words[1:])
    states, sizes = own.questions(None), set()
    table, width = states.group.table, own.settings.tokens
    allowed = set(states.group.generators(own.settings.generators).tolist())
    for index in range(40):
        ids, targets = states.sample(7, index)
        assert len(ids) == len(targets) == 5 * width
        size = int((ids < states.group.order).sum())
        sizes.add(size)
        product, answers = 0, np.full(5 * width, NOTHING)
        for n, element in enumerate(ids[: size * width : width]):
            assert element in allowed
            product = table[product, element]
            if own.settings.asked == "every" or n == size - 1:
                answers[(n + 1) * width - 1] = product
        assert np.array_equal(targets, answers)
        assert (np.delete(ids, np.arange(0, size * width, width)) == states.group.order).all(), "fillers"
        assert all(map(np.array_equal, (ids, targets), states.sample(7, index)))
    assert sizes == {3, 4, 5}


@pytest.mark.parametrize("problem", ["arithmetic", "brackets"])
@pytest.mark.parametrize("asked", ["every", "last"])
def test_values_are_those_of_python(problem, asked):
    states = task(f"state_tracking.problem={problem}", f"state_tracking.asked={asked}",
                  "state_tracking.lengths=2-30").questions(None)  # fmt: skip
    for index in range(200):
        ids, targets = states.sample(3, index)
        text = "".join("01234+-*()="[n] for n in ids if n < states.symbols - 1)
        end = text.index("=")
        assert end == len(text) - 1 and targets[end] == eval(text[:end]) % 5 and (targets[end + 1 :] == NOTHING).all()
        for n in range(end):
            prefix = problem == "arithmetic" and asked == "every" and text[n].isdigit()
            assert targets[n] == (eval(text[: n + 1]) % 5 if prefix else NOTHING)


def test_lengths_grow_with_the_position():
    assert [(list(each), parts) for each, parts in stages("4:2,3-5,32/64")] == [([4], 2), ([3, 4, 5], 1), ([32, 64], 1)]
    own = task("state_tracking.lengths='4:3,8-16'", "data.seq_len=40", "train.batch_tokens=80", "train.max_steps=80")
    assert [own.questions(n).length for n in range(160)] == [4] * 120 + [16] * 40
    ids, reset, targets = own.open().train.sample(150)
    assert np.flatnonzero(reset).tolist() == [0, 16, 32] and (ids[32:] == 2).all() and (targets[32:] == NOTHING).all()
    assert np.array_equal(ids[16:32], own.questions(150).sample(0, 301)[0])


@torch.no_grad()
def test_figures_are_those_of_each_sample_alone():
    own = task(*SMALL)
    torch.manual_seed(0)
    loss = own.objective(own.build_model(), RankGroup())
    rows = collate([own.open().validation.sample(n) for n in range(2)])
    shares, whole, last = [], [], []
    for row in range(2):
        for n in range(4):
            part = slice(16 * n, 16 * n + 16)
            ids, targets = rows[0][row : row + 1, part], rows[2][row, part]
            right = (loss.model(ids)[0][0].argmax(-1) == targets)[targets != NOTHING].float()
            shares.append(right.mean()), whole.append(right.all().float()), last.append(right[-1])
    found = loss(*rows, weight=torch.ones(2))
    for name, each in (("accuracy", shares), ("whole", whole), ("last", last)):
        assert float(found[name]) == pytest.approx(float(torch.stack(each).mean()))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["problem=Q8"], "state_tracking.problem: given 'Q8'; .*Zn, Sn or An.*; or arithmetic, brackets"),
        (["problem=Z1"], "state_tracking.problem: given 'Z1'; a group of 2 to 1,000 elements, this one has 1"),
        (["problem=S7"], "this one has 5,040"),
        (["problem=A5", "generators=swaps"], "generators: given 'swaps'; A5 has none of them.*; set all"),
        (["generators=swaps"], "generators: given 'swaps'; parity has 1 of them"),
        (["generators=four_cycles"], "state_tracking.generators: given 'four_cycles'"),
        (["problem=arithmetic", "tokens=2"], "state_tracking.tokens: given 2; 1: arithmetic has no group elements"),
        (["problem=arithmetic", "lengths=1-9"], "state_tracking.lengths: given '1-9'; each at least 2"),
        (["lengths=9-3"], "state_tracking.lengths: given '9-3'; ranges from the lower length"),
        (["lengths=3-400"], "state_tracking.lengths: given '3-400'; .*set data.seq_len=400"),
        (["lengths=30", "tokens=2"], "set data.seq_len=60"),
        (["problem=S6"], "model.vocab_size: given 128; at least 721 for state_tracking.problem=S6"),
        *((["lengths=" + text], "state_tracking.lengths: given") for text in ("''", "'0'", "'3-'", "'4:0'", "'4,,8'")),
    ],
)  # fmt: skip
def test_impossible_problems_are_refused(words, message):
    with pytest.raises(UserError, match=message):
        load_config(CONFIG, [f"state_tracking.{word}" for word in words])


@pytest.mark.parametrize("problem", ["arithmetic", "brackets"])
def test_a_guesser_of_values_says_the_commonest_one(problem):
    states = task(f"state_tracking.problem={problem}").asked(64)
    last = [states.sample(1, n)[1][-1] for n in range(1000)]
    assert states.chance == pytest.approx(np.bincount(last).max() / 1000, abs=0.06)


@pytest.mark.parametrize("name", ["deltanet", "gated_deltanet"])
def test_beta_reaches_two(name):
    """Compare with the delta rule token by token in float64, with beta twice the sigmoid."""
    words = [f"model.mixers=[{name}]", f"model.{name}.allow_neg_eigval=true"]
    torch.manual_seed(0)
    mixer = MIXERS.find(name)(load_config(CONFIG, words).model).double()
    seen = {}
    remember = mixer.remember
    mixer.remember = lambda *given: seen.setdefault("y", (given, remember(*given)[0])) and remember(*given)
    x = 3 * torch.randn(2, 70, 64, dtype=torch.float64)
    mixer(x)
    (q, k, v, decay, beta, *_), y = seen["y"]
    torch.testing.assert_close(beta, 2 / (1 + torch.exp(-mixer.beta(x))))
    assert beta.max() > 1.5
    state, found = torch.zeros(2, q.shape[2], k.shape[3], v.shape[3], dtype=torch.float64), []
    for t in range(70):
        if decay is not None:
            state = state * decay[:, t].exp()[..., None, None]
        error = v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        state = state + beta[:, t, :, None, None] * k[:, t, :, :, None] * error[:, :, None]
        found.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    torch.testing.assert_close(y, torch.stack(found, 1), rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_it_trains_resumes_and_ranks_change_nothing(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(resolved_yaml(load_config(CONFIG, SMALL)))
    for name, words in (("whole", []), ("parts", ["train.stop_at=3"]), ("parts", [])):
        assert loop.train(load_config(path, [f"run.dir={tmp_path / name}", *words])) == 0
    whole, parts = (tmp_path / run / "checkpoints/step-00000008" / checkpoints.MODEL for run in ("whole", "parts"))
    assert whole.read_bytes() == parts.read_bytes()
    run_jobs(4, path, tmp_path, {"both": ["parallel.tensor=2", "parallel.zero_stage=2", "train.micro_batch=1"]})
    for a, b in zip(*(curve(tmp_path / name, "loss", "grad_norm") for name in ("whole", "both")), strict=True):
        assert b == pytest.approx(a, rel=1e-4)


def test_it_is_evaluated_in_pieces_and_continues_where_it_was_stopped(tmp_path, monkeypatch, caplog):
    import titans_pt.evaluation.state_tracking as suite

    folder = tmp_path / "run"
    words = [*SMALL, f"run.dir={folder}", "train.max_steps=1", "train.warmup_steps=0"]
    assert loop.train(load_config(CONFIG, words)) == 0
    found = evaluate(folder, suite="state_tracking")["state_tracking"]
    assert [row["length"] for row in found["by_length"]] == [16, 64] and found["by_length"][0]["n"] == 8
    assert sum(row["n"] for row in found["by_position"]) == 8 * 64

    def read(out):
        (record,) = [json.loads(line) for line in next(out.rglob("state_tracking.jsonl")).read_text().splitlines()]
        return record

    record, count, original = read(folder / "evaluation"), itertools.count(), suite.save_state
    run = load_run(folder)
    ids, targets = map(np.stack, zip(*(run.task.asked(64).sample(EVALUATION_SEED, n) for n in range(8)), strict=True))
    right = run.model(torch.from_numpy(ids).long())[0].argmax(-1).numpy() == targets
    assert [row["last"] for row in record["lengths"]] == [right[:, 15].sum(), right[:, 63].sum()]

    def stops(*given):
        original(*given)
        if next(count) == 1:
            raise KeyboardInterrupt

    other = tmp_path / "other"

    def again():
        words = ["evaluation.prefill_tokens=7", "evaluation.save_every=20"]
        evaluate(folder, words, suite="state_tracking", out=other)

    monkeypatch.setattr(suite, "save_state", stops)
    with pytest.raises(KeyboardInterrupt):
        again()
    (kept,) = other.rglob("reading-*")
    content = kept.read_bytes()
    again()
    assert read(other) == record and not list(other.rglob("reading-*")) and "read again" not in caplog.text
    next(other.rglob("state_tracking.jsonl")).unlink()
    kept.write_bytes(content[:-1])
    again()
    assert read(other) == record and "; everything is read again from the first token" in caplog.text
