"""Random calls of the memory, and the comparison of two backends on them."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from titans_pt.kernels.memory import MemoryState, NetworkShape, neural_memory
from titans_pt.kernels.memory.dispatch import unserved

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Case:
    """One call of the memory.

    initial: start from a state cut inside a chunk. extremes: a third of the gates are exactly 0 or 1. decode: no
    gradients; then few tokens use the kernel of step.py.
    """

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
    decode: bool = False
    dtype: torch.dtype = torch.float32


def inputs(case: Case) -> tuple[list[Tensor], dict]:
    """Leaves (q, k, v, gates, weights, LayerNorm, state) and options for :func:`run`. Small steps keep it stable."""
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
    """Arguments of neural_memory: positional and named."""
    leaves, options = inputs(case)
    weights, norm = tuple(leaves[6 : 6 + case.depth]), tuple(leaves[6 + case.depth : 8 + case.depth])
    return (*leaves[:6], weights), {"norm": norm, **options}


def run(
    case: Case, backend: str, dtype: torch.dtype | None = None, rounded: int | None = None
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Outputs without the residual and final state, gradients of a random weighting of all of them (a single zero if
    the case decodes), final offset.

    dtype: dtype of all inputs and the arithmetic, in place of the case's. rounded: seed of :func:`rounding`.
    """
    leaves, options = inputs(case)
    depth = case.depth
    leaves = [x.to(dtype or x.dtype) for x in leaves]
    if rounded is not None:
        leaves = rounding(case, leaves, rounded)
    leaves = [x.requires_grad_() for x in leaves]
    rest = leaves[6 + depth :]
    norm, rest = (tuple(rest[:2]), rest[2:]) if case.norm else (None, rest)
    offset = options.pop("offset", None)
    state = None
    if offset is not None:
        state = MemoryState(*(tuple(rest[n * depth : (n + 1) * depth]) for n in range(3)), offset)
    with torch.set_grad_enabled(not case.decode):
        out, end = neural_memory(
            *leaves[:6], tuple(leaves[6 : 6 + depth]), norm=norm, initial_state=state, output_final_state=True,
            backend=backend, save_every=case.save_every, **options,
        )  # fmt: skip
    results = [out, *end.weights, *end.momentum, *end.chunk_weights]
    if case.decode:
        gradients = [torch.zeros(1)]
    else:
        draw = torch.Generator().manual_seed(1)
        total = sum((r * torch.randn(r.shape, generator=draw).to(r)).sum() for r in results)
        gradients = list(torch.autograd.grad(total, leaves, materialize_grads=True))
    if rounded is not None:  # what the kernels return in the case's dtype
        results[0], gradients[:3] = results[0].to(case.dtype), [g.to(case.dtype) for g in gradients[:3]]
    if case.residual:
        results[0] = results[0].double() - leaves[0].detach().double()
    return results, gradients, end.offset


def rounding(case: Case, leaves: list[Tensor], seed: int) -> list[Tensor]:
    """Change all leaves at random by at most the case dtype's rounding, except the gates (fp32 in the kernels)."""
    draw = torch.Generator().manual_seed(100 + seed)
    half = torch.finfo(case.dtype).eps / 2
    changed = []
    for n, x in enumerate(leaves):
        noise = half * (2 * torch.rand(x.shape, generator=draw, dtype=torch.float64) - 1).to(x.device)
        changed.append(x if n in (3, 4, 5) else x * (1 + noise))
    return changed


def error(a: Tensor, b: Tensor) -> float:
    """||a - b|| / ||b||; NaN never passes a comparison."""
    return ((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-3)).item()


FLOORS = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Smallest limit by dtype: the kernels round more than their inputs, above all activations. :func:`limits` doubles it
for the gradients of eta and alpha, which are small differences of large sums. In half precision it takes ten times the
floor for alpha's gradient where alpha scales the last matrix under a LayerNorm, which hardly depends on the scale."""
DRAWS = {torch.float32: 1, torch.float16: 3, torch.bfloat16: 3}
"""Number of draws of rounding errors; in fp32 they only tell whether a case diverges."""


def limits(case: Case, exact: tuple[list[Tensor], list[Tensor], Tensor]) -> tuple[list[float], list[float]]:
    """Largest allowed errors of results and gradients, relative to their norm.

    A limit is three times the change of ``exact``, the oracle's results in float64, when inputs, weights and returned
    values are rounded to the case's dtype (the largest change over some draws).

    Raises:
        AssertionError: they change by more than a tenth: such a case cannot tell right kernels from wrong ones.
    """
    found = []
    for part, name in enumerate(("result", "gradient")):
        most = [0.0] * len(exact[part])
        for draw in range(DRAWS[case.dtype]):
            near = run(case, "chunked", torch.float64, rounded=draw)[part]
            most = [max(m, error(a, b)) for m, a, b in zip(most, near, exact[part], strict=True)]
        assert max(most) <= 0.1, f"{name} {most.index(max(most))} moves by {max(most):.1e}: the case diverges"
        floors = [FLOORS[case.dtype]] * len(most)
        if part == 1:
            cancels = case.norm and case.forget_to == "zero" and case.dtype != torch.float32
            floors[4:6] = [2 * floors[4], (10 if cancels else 2) * floors[5]]
        found.append([max(floor, 3 * m) for floor, m in zip(floors, most, strict=True)])
    return found[0], found[1]


def assert_equal(case: Case, oracle: str = "chunked"):
    """Compare the kernels with an oracle in float64: outputs, final state, all gradients within :func:`limits`."""
    reason = unserved(case.dtype, inputs(case)[1]["network"], case.C, device=torch.device(DEVICE))
    if reason is not None:
        pytest.skip(reason)
    ours, exact = run(case, "triton"), run(case, oracle, torch.float64)
    for name, mine, theirs, allowed in zip(("result", "gradient"), ours, exact, limits(case, exact), strict=False):
        for n, (a, b, limit) in enumerate(zip(mine, theirs, allowed, strict=True)):
            assert error(a, b) < limit, f"{name} {n}: {error(a, b):.1e} of {limit:.1e}"
    assert torch.equal(ours[2].cpu(), exact[2].cpu())
