"""Real processes with gloo give the same losses and gradient norms under every tensor x context x data x ZeRO stage,
and after resumes."""

import pytest

from tests.helpers import matrix
from titans_pt.runs import checkpoints

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def config(tmp_path_factory, prepared):
    return matrix.write_config(tmp_path_factory.mktemp("matrix"), prepared)


def check(differences):
    assert {c: d for c, d in differences.items() if d > matrix.TOLERANCE} == {}


def test_two_tensor_ranks_two_context_ranks_and_two_resumes_train_as_one_process(config, tmp_path):
    """A small version of all tests: 20 steps under tensor parallelism, and 20 under three combinations in turn.

    The cost of writing depends on them no more than the loss does.
    """
    cost = "model.memory.write_cost=10"
    on_the_way = [
        ((2, 1, 1, 1), 7, ["train.wavefront=6"]), ((1, 1, 2, 3), 14, []),
        ((1, 2, 1, 2), 20, ["train.activation_checkpointing=true"]),
    ]  # fmt: skip
    jobs = {f"changed@{stop}": ("hybrid", c, [cost, f"train.stop_at={stop}", *more]) for c, stop, more in on_the_way}
    jobs["split"] = ("hybrid", (2, 1, 1, 3), [cost, "parallel.sequence=true", "train.micro_batch=2"])
    matrix.train(config, tmp_path, {"whole": ("hybrid", matrix.REFERENCE, [cost])} | jobs)
    check({name: matrix.difference(tmp_path / name, tmp_path / "whole") for name in ("split", "changed")})


@pytest.mark.slow  # three starts of processes; test_split.py, test_shards.py and test_transfer.py test the parts
def test_rows_that_tensor_ranks_do_not_divide(config, tmp_path):
    """A run with 289 rows for 288 tokens in one process continues at tensor=2, from whole tensors and from shards."""
    odd = ["model.vocab_multiple=17"]
    jobs = {
        "whole": ("lmm", matrix.REFERENCE, odd), "changed@8": ("lmm", matrix.REFERENCE, [*odd, "train.stop_at=8"]),
        "changed@14": ("lmm", (2, 1, 1, 1), [*odd, "train.stop_at=14", "train.checkpoint_shards=true"]),
        "changed@20": ("lmm", (2, 1, 1, 3), odd),
    }  # fmt: skip
    matrix.train(config, tmp_path, jobs)
    check({"changed": matrix.difference(tmp_path / "changed", tmp_path / "whole")})
    for run in ("whole", "changed"):
        weights = checkpoints.read_weights(checkpoints.find(tmp_path / run / "checkpoints"))
        assert weights["embedding.weight"].shape[0] == 289 and not weights["embedding.weight"][288:].any()


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("sequence", ["false", "true"])
@pytest.mark.parametrize("model", matrix.MODELS)
def test_every_combination_trains_as_one_process(config, tmp_path, model, sequence):
    split = [c for c in matrix.ALL if c[0] > 1 or sequence == "false"]
    check(matrix.equality(config, tmp_path, model, split, [f"parallel.sequence={sequence}"]))


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("model", matrix.MODELS)
def test_every_resume_into_every_combination(config, tmp_path, model):
    check(matrix.resume(config, tmp_path, model, matrix.ALL, matrix.ALL))
