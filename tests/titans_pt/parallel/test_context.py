"""Context ranks compute the same as one rank; settings that cannot be split are refused."""

import json

import pytest
import torch

from tests.conftest import prepare_corpus
from tests.helpers import matrix
from tests.helpers.mixers import NAMES
from tests.helpers.processes import curve, run_forked
from titans_pt.config.files import load_config
from titans_pt.errors import UserError
from titans_pt.kernels.memory.state import MemoryState
from titans_pt.layers.state import tensors
from titans_pt.parallel.context import _contents, _message, _parts, _places, _rebuilt

pytestmark = pytest.mark.timeout(1200)


EVERY = [*(name for name in NAMES if name != "rmt"), "lmm+caching", "lmm+omega", "lmm+muon"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("tensor", "names"),
    [
        (1, EVERY),
        (2, ["mac", "gated_deltanet"]),
        pytest.param(2, EVERY, marks=pytest.mark.slow),
    ],
    ids=["alone", "some sharing heads", "all sharing heads"],
)
def test_mixers_hand_their_states_on(tensor, names):
    """States pass along three context ranks, each of one process or of two that share the heads."""
    ranks = 3 * tensor
    result = run_forked(ranks, "tests.titans_pt.parallel.pieces", str(tensor), "3", *names, timeout=1200)
    assert result.returncode == 0, result.stderr[-4000:]
    found = json.loads(result.stdout.splitlines()[-1])
    assert list(found) == names
    assert {name: d for name, d in found.items() if not d < 1e-9} == {}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["lmm", "mac"])
def test_a_sequence_of_64k_tokens_over_four_ranks(tmp_path, model):
    config = matrix.write_config(tmp_path, prepare_corpus(tmp_path, 2400))
    long = ["data.seq_len=65536", "train.batch_tokens=65536", "train.stop_at=3", "train.eval_samples=1",
            "model.window=1024", "model.mac.segment=1024", "model.memory.chunk_size=16"]  # fmt: skip
    matrix.train(config, tmp_path, {
        "one": (model, (1, 1, 1, 1), long), "four": (model, (1, 4, 1, 1), long)
    })  # fmt: skip
    one, four = (curve(tmp_path / name, "loss", "grad_norm") for name in ("one", "four"))
    assert len(one) == 3
    for (_, *expected), (_, *found) in zip(one, four, strict=True):
        assert found == pytest.approx(expected, rel=1e-6)


def test_a_state_travels_as_one_message():
    numbers = torch.arange(6, dtype=torch.bfloat16).view(2, 3), torch.randn(2, 2, 1, dtype=torch.float64)[:, ::2]
    one_row = torch.tensor([3, 1])[1::2]  # a single entry whose stride is 2, as a hierarchy's states have
    state = [MemoryState(numbers, (), (torch.empty(2, 0),), one_row), None, 7]
    skeleton, found = _parts(state, torch.device("cpu"))
    shapes = [(t.shape, t.dtype) for t in found]
    message = _message(found)
    assert len(message) == _places(shapes)[1]
    memory, nothing, number = _rebuilt(skeleton, _contents(message, shapes))
    assert (nothing, number) == (None, 7)
    assert isinstance(memory, MemoryState)
    for a, b in zip(tensors(memory), tensors(state[0]), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["parallel.context=3"], "parallel.context: given 3; must divide data.seq_len="),
        (["parallel.context=2", "parallel.zero_stage=3"], "parallel.zero_stage: given 3; at most 2 with parallel.cont"),
        (["parallel.context=2", "parallel.reduce_bucket=100"], "parallel.reduce_bucket: given 100; must be null with"),
        (["parallel.context=2", "train.compile=true"], "train.compile: given True; not with parallel.context=2"),
        (
            ["parallel.context=2", "model.mixers=[rmt]", "model.rmt={segment: 8, memory_tokens: 2}"],
            "parallel.context: given 2; must be 1 with the mixer 'rmt'",
        ),
    ],
)
def test_what_cannot_be_shared_is_refused(tiny, settings, message):
    with pytest.raises(UserError) as error:
        load_config(tiny(), settings)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
