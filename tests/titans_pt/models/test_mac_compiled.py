"""MAC's segment step gives the same outputs, state and gradients compiled, as on a GPU, and uncompiled."""

import pytest
import torch

from titans_pt.config import ModelConfig
from titans_pt.kernels import compiling
from titans_pt.layers.documents import Documents
from titans_pt.models.mixers.mac import MAC


def outcome(model, x, pieces, reset=None):
    """Outputs of the pieces, which pass the state on, and all gradients."""
    state, outputs = None, []
    for n, piece in enumerate(x.split(pieces, 1)):
        starts = None if reset is None else reset[:, n * pieces : (n + 1) * pieces]
        y, state = model(piece, state, None if starts is None else Documents.of(starts, x.device))
        outputs.append(y)
    total = sum(y.to(torch.promote_types(y.dtype, torch.float32)).square().sum() for y in outputs)
    return [torch.cat(outputs, 1), *torch.autograd.grad(total, [*model.parameters()])]


def make(width, heads, segment, device):
    torch.manual_seed(0)
    config = ModelConfig(
        d_model=width, n_heads=heads, segment=segment, memory_tokens=4, persistent_tokens=2, window=segment,
        memory={"chunk_size": 16, "expansion": 2},
    )  # fmt: skip
    model = MAC(config).to(device)
    model.memory.gates.own_initialisation()
    return model


@pytest.mark.slow
def test_the_compiled_step_is_the_step(monkeypatch):
    """Whole segments are compiled, four without documents and three with them; partial segments are not."""
    model, x = make(16, 2, 32, "cpu").double(), torch.randn(2, 180, 16, dtype=torch.float64)
    reset = torch.zeros(2, 180, dtype=torch.bool)
    reset[1, 32] = reset[0, 150] = True
    expected = [outcome(model, x, 90), outcome(model, x, 90, reset)]
    used = []

    def compiled(step):
        used.append(step.__name__)
        return torch.compile(step, dynamic=False, backend="aot_eager")

    model.compiled = True
    monkeypatch.setattr(compiling, "compiled", compiled)
    found = [outcome(model, x, 90), outcome(model, x, 90, reset)]
    for a, b in zip(sum(found, []), sum(expected, []), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)
    assert used == 7 * ["_recall", "_write"]


@pytest.mark.gpu
def test_on_a_gpu():
    model, x = make(128, 2, 512, "cuda").to(torch.bfloat16), torch.randn(2, 3000, 128, device="cuda").bfloat16()
    plain = outcome(model, x, 1100)
    model.compiled = True
    for a, b in zip(outcome(model, x, 1100), plain, strict=True):
        assert (a - b).float().norm() <= 5e-2 * b.float().norm()
