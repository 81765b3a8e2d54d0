"""Random calls of the memory, run by one backend and by another."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from titans_pt.kernels.memory import MemoryState, NetworkShape, neural_memory

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Case:
    """One call; initial: from a state cut inside a chunk. extremes: a third of the gates are exactly 0 or 1."""

    T: int
    C: int = 16
    D: int = 32
    expansion: int = 2
    depth: int = 2
    B: int = 1
    H: int = 2
    per_layer: bool = False
    norm: bool = True
    residual: bool = True
    activation: str = "gelu"
    forget_to: str = "zero"
    initial: bool = False
    resets: bool = False
    extremes: bool = False
    save_every: int | None = None
    dtype: torch.dtype = torch.float32


def inputs(case: Case) -> tuple[list[Tensor], dict]:
    """Leaves (q, k, v, gates, weights, LayerNorm, state) and options for :func:`run`. Steps are small: stable."""
    draw = torch.Generator().manual_seed(0)

    def rand(*shape):
        return torch.randn(*shape, generator=draw).to(DEVICE)

    B, T, H, D, L = case.B, case.T, case.H, case.D, case.depth
    q, k = (normalize(rand(B, T, H, D), dim=-1).to(case.dtype) for _ in range(2))
    v = rand(B, T, H, D).to(case.dtype)
    shape = (B, T, H, L) if case.per_layer else (B, T, H)
    theta, eta, alpha = (torch.rand(shape, generator=draw) for _ in range(3))
    theta, alpha = 0.3 / case.C * (1 - eta) * theta, 0.1 * alpha
    if case.extremes:
        eta, alpha = (
            torch.where(torch.rand(shape, generator=draw) < 0.3, torch.randint(0, 2, shape, generator=draw).float(), g)
            for g in (eta, alpha)
        )
    network = NetworkShape(D, case.expansion * D, L, case.norm, case.residual, case.activation)
    weights = [rand(H, a, b) for a, b in network.layers]
    if not case.norm:
        weights = [w * w.shape[1] ** -0.5 for w in weights]
    leaves = [q, k, v, *(g.to(DEVICE) for g in (theta, eta, alpha)), *weights]
    if case.norm:
        leaves += [1 + 0.3 * rand(H, D), 0.3 * rand(H, D)]
    options = {"network": network, "chunk_size": case.C, "forget_to": case.forget_to}
    if case.resets:
        options["reset"] = (torch.rand(B, T, generator=draw) < 0.04).to(DEVICE)
    if case.initial:
        leaves += [scale * (w + 0.3 * rand(B, *w.shape)) for scale in (1, 0.01, 1) for w in weights]
        options["offset"] = torch.randint(1, case.C, (B,), generator=draw)
    return leaves, options


def arguments(case: Case) -> tuple[tuple, dict]:
    """Of neural_memory: positional and named."""
    leaves, options = inputs(case)
    weights, norm = tuple(leaves[6 : 6 + case.depth]), tuple(leaves[6 + case.depth : 8 + case.depth])
    return (*leaves[:6], weights), {"norm": norm, **options}


def run(case: Case, backend: str, dtype: torch.dtype | None = None) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Outputs and final state, gradients of a random weighting of all of them, final offset.

    dtype: of all inputs and the arithmetic, in place of the case's.
    """
    leaves, options = inputs(case)
    depth = case.depth
    leaves = [x.to(dtype or x.dtype).requires_grad_() for x in leaves]
    rest = leaves[6 + depth :]
    norm, rest = (tuple(rest[:2]), rest[2:]) if case.norm else (None, rest)
    offset = options.pop("offset", None)
    state = None
    if offset is not None:
        state = MemoryState(*(tuple(rest[n * depth : (n + 1) * depth]) for n in range(3)), offset)
    out, end = neural_memory(
        *leaves[:6], tuple(leaves[6 : 6 + depth]), norm=norm, initial_state=state, output_final_state=True,
        backend=backend, save_every=case.save_every, **options,
    )  # fmt: skip
    results = [out, *end.weights, *end.momentum, *end.chunk_weights]
    draw = torch.Generator().manual_seed(1)
    total = sum((r * torch.randn(r.shape, generator=draw).to(r)).sum() for r in results)
    return results, torch.autograd.grad(total, leaves, materialize_grads=True), end.offset


def error(a: Tensor, b: Tensor) -> float:
    """||a - b|| / ||b||; NaN never passes a comparison."""
    return ((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-3)).item()


def assert_equal(case: Case, tolerance: float, oracle: str = "chunked"):
    """The kernels against an oracle in float64: outputs, final state and every gradient.

    In fp16 those of momentum and forgetting may be ten times as far off: small differences of large sums, in some of
    the random cases. A single rounding of q, k, v and the weights moves the oracle's by up to 4e-3.
    """
    (out, grad, offset), (out_, grad_, offset_) = run(case, "triton"), run(case, oracle, torch.float64)
    for name, ours, theirs in (("result", out, out_), ("gradient", grad, grad_)):
        for n, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            rough = case.dtype == torch.float16 and name == "gradient" and n in (4, 5)
            assert error(a, b) < (10 if rough else 1) * tolerance, f"{name} {n}: {error(a, b):.1e}"
    assert torch.equal(offset.cpu(), offset_.cpu())
