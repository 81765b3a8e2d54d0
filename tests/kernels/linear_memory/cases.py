"""Random calls of the linear memory, and the comparison of two of them."""

import torch
from torch import Tensor
from torch.nn.functional import normalize

from titans_pt.kernels.linear_memory import linear_memory

TOLERANCE = 1e-9
DECAYS = ("none", "head", "token", "channel")


def make(
    B, T, H, K, V, *, decay="token", delta=True, erase=False, steps=1, strength=1.0, seed=0, dtype=torch.float64
) -> dict[str, Tensor]:
    """Inputs by name: q, k, v, initial_state and, if asked for, decay, beta, erase. Log decays are around -strength,
    one in five of them a thousand times smaller. Keys to erase are shorter than 1. steps: keys per token."""
    draw = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    found = {"q": rand(B, T, H, K), "k": rand(B, steps * T, H, K), "v": rand(B, steps * T, H, V)}
    found["initial_state"] = rand(B, H, K, V)
    shape = {"none": None, "head": (H,), "token": (B, T, H), "channel": (B, T, H, K)}[decay]
    if shape:
        small = torch.rand(shape, generator=draw) < 0.2
        found["decay"] = -strength * rand(*shape).abs() * torch.where(small, 1e-3, 1.0)
    if delta:
        found["k"] = normalize(found["k"], dim=-1)
        found["beta"] = rand(B, steps * T, H).sigmoid()
    if erase:
        found["k"] = normalize(found["k"], dim=-1)
        found["erase"] = found["k"] * rand(B, steps * T, H, K).sigmoid() + 0.1 * rand(B, steps * T, H, K)
    return {name: x.to(dtype) for name, x in found.items()}


def run(tensors: dict[str, Tensor], backend: str, **options) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """Outputs and final state, and the gradient of a random weighting of both with respect to every input."""
    leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    results = linear_memory(**leaves, output_final_state=True, backend=backend, **options)
    draw = torch.Generator().manual_seed(99)
    total = sum((r * torch.randn(r.shape, generator=draw, dtype=torch.float64).to(r)).sum() for r in results)
    return list(results), torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)


def assert_same(ours, theirs, tolerance=TOLERANCE):
    for n, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert a.shape == b.shape and a.isfinite().all()
        error = (a.double() - b.double()).abs().max().item()
        assert error <= tolerance * max(1.0, b.abs().max().item()), f"{n}: {error:.1e}"
