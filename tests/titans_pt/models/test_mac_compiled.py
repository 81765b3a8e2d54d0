"""MAC's segment step, compiled as on a GPU, gives what it gives uncompiled: outputs, state, gradients."""

import pytest
import torch

from titans_pt.config import ModelConfig
from titans_pt.models.mixers import mac


def outcome(model, x, pieces):
    """Outputs of the pieces with the state passed on, and all gradients."""
    state, outputs = None, []
    for piece in x.split(pieces, 1):
        y, state = model(piece, state)
        outputs.append(y)
    total = sum(y.float().square().sum() for y in outputs)
    return [torch.cat(outputs, 1), *torch.autograd.grad(total, [*model.parameters()])]


def make(width, heads, segment, device):
    torch.manual_seed(0)
    config = ModelConfig(
        d_model=width, n_heads=heads, segment=segment, memory_tokens=4, persistent_tokens=2, window=segment,
        memory={"chunk_size": 16, "expansion": 2},
    )  # fmt: skip
    model = mac.MAC(config).to(device)
    model.memory.gates.reset_parameters()
    return model


@pytest.mark.slow
def test_the_compiled_step_is_the_step(monkeypatch):
    model, x = make(16, 2, 32, "cpu"), torch.randn(2, 80, 16)
    expected = outcome(model, x, 50)
    used = []

    def compiled(step):
        used.append(step.__name__)
        return torch.compile(step, dynamic=False, backend="aot_eager")

    monkeypatch.setattr(mac, "_worth_compiling", lambda x: True)
    monkeypatch.setattr(mac, "_compiled", compiled)
    for a, b in zip(outcome(model, x, 50), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert set(used) == {"_recall", "_write"}


@pytest.mark.gpu
def test_on_a_gpu(monkeypatch):
    model, x = make(128, 2, 512, "cuda"), torch.randn(2, 1500, 128, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        fused = outcome(model, x, 1100)
    monkeypatch.setattr(mac, "_worth_compiling", lambda x: False)
    plain = outcome(model, x, 1100)
    for a, b in zip(fused, plain, strict=True):
        assert (a - b).norm() <= 5e-2 * b.norm()
