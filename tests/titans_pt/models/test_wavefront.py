"""Layers side by side: order, refusals, and streams on a GPU. test_baselines checks every mixer's results."""

import pytest
import torch

from tests.helpers.mixers import small_config
from titans_pt.config.files import load_config
from titans_pt.errors import UserError
from titans_pt.models import build_model
from titans_pt.models.wavefront import wavefront


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["parallel.context=2"], "train.wavefront: given 8; must be null with parallel.context=2"),
        (["parallel.zero_stage=3"], "train.wavefront: given 8; must be null with parallel.zero_stage=3"),
        (
            ["parallel.tensor=2", "parallel.sequence=true"],
            "train.wavefront: given 8; must be null with parallel.sequence",
        ),
        (["train.compile=true"], "train.compile: given True; not with train.wavefront"),
        (["parallel.reduce_bucket=9"], "parallel.reduce_bucket: given 9; must be null with train.wavefront, whose"),
    ],
)
def test_what_does_not_go_with_it_is_refused(tiny, settings, message):
    with pytest.raises(UserError) as error:
        load_config(tiny(), ["train.wavefront=8", *settings])
    assert message in str(error.value)


def test_a_diagonal_starts_with_its_last_layer():
    """In its stream a layer then waits only for its input, the last work given to the layer before."""
    calls = []

    def run(layer, x, state, documents):
        calls.append((layer, int(x[0, 0])))
        return x, (state or 0) + x.shape[1]

    x, states = wavefront(run, ["a", "b", "c"], torch.arange(10).view(1, 10), None, None, 4)
    assert calls == [("a", 0), ("b", 0), ("a", 4), ("c", 0), ("b", 4), ("a", 8), ("c", 4), ("b", 8), ("c", 8)]
    assert states == [10, 10, 10]
    assert x.tolist() == [list(range(10))]


def test_a_state_of_another_number_of_blocks_is_refused():
    short, long = (build_model(small_config(["lmm"], n_layers=n)) for n in (2, 3))
    ids = torch.zeros(1, 20, dtype=torch.int64)
    short.blocks.set_wavefront(8)
    with pytest.raises(ValueError, match="state: given one of 3 blocks; the model has 2"):
        short(ids, long(ids)[1])


@pytest.mark.gpu
@pytest.mark.parametrize("mixer", ["lmm", "mag", "gated_deltanet"])
def test_streams_on_a_gpu(mixer):
    torch.manual_seed(0)
    memory = {"chunk_size": 16, "expansion": 2}
    config = small_config([mixer], d_model=128, n_layers=4, n_heads=2, mlp_hidden=128, window=64, memory=memory)
    model = build_model(config).cuda()
    ids = torch.randint(0, 50, (1, 2048), device="cuda")
    found = []
    for pieces in (None, 256):
        model.blocks.set_wavefront(pieces)
        model.zero_grad()
        logits, _ = model(ids)
        logits.float().square().mean().backward()
        found.append([logits.detach(), *(p.grad for p in model.parameters())])
    for a, b in zip(*found, strict=True):
        assert (a - b).norm() <= 2e-3 * b.norm() + 1e-6
