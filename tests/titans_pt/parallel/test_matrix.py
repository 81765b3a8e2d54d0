"""Real processes, gloo: the same losses and gradient norms under every tensor x context x data x ZeRO stage, and after
resumes."""

import pytest

from tests import matrix


@pytest.fixture(scope="module")
def config(tmp_path_factory, prepared):
    return matrix.write_config(tmp_path_factory.mktemp("matrix"), prepared)


def check(differences):
    assert {c: d for c, d in differences.items() if d > matrix.TOLERANCE} == {}


def test_two_tensor_ranks_two_context_ranks_and_two_resumes_train_as_one_process(config, tmp_path):
    """All of it in little: 20 steps under tensor parallelism, and 20 under three combinations in turn."""
    on_the_way = [
        ((2, 1, 1, 1), 7, ["train.wavefront=6"]), ((1, 1, 2, 3), 14, []),
        ((1, 2, 1, 2), 20, ["train.activation_checkpointing=true"]),
    ]  # fmt: skip
    jobs = {f"changed@{stop}": ("hybrid", c, [f"train.stop_at={stop}", *more]) for c, stop, more in on_the_way}
    jobs["split"] = ("hybrid", (2, 1, 1, 3), ["parallel.sequence=true"])
    matrix.train(config, tmp_path, {"whole": ("hybrid", matrix.REFERENCE, [])} | jobs)
    check({name: matrix.difference(tmp_path / name, tmp_path / "whole") for name in ("split", "changed")})


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
