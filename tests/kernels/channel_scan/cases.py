"""Random calls of the scan, and its oracle: the linear memory with a head per channel and V = 1."""

import torch
from torch import Tensor

from titans_pt.kernels.channel_scan import channel_scan
from titans_pt.kernels.linear_memory import linear_memory


def make(B, T, D, N, *, mamba=True, strength=1.0, seed=0, dtype=torch.float64) -> dict[str, Tensor]:
    """Random inputs by name; log decays reach about -16 ``strength``. Longhorn's steps keep 1 - step k^2 above 0."""
    draw = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    found = {"x": rand(B, T, D), "step": rand(B, T, D).sigmoid(), "k": rand(B, T, N), "q": rand(B, T, N)}
    if mamba:
        found["rate"] = strength * 16 * torch.rand(D, N, generator=draw, dtype=torch.float64)
    else:
        found["step"] = found["step"] / (1 + found["step"] * found["k"].square().sum(-1, keepdim=True))
    found["initial_state"] = rand(B, D, N)
    return {name: x.to(dtype) for name, x in found.items()}


def oracle(x, step, k, q, rate=None, *, initial_state, reset=None, **_) -> tuple[Tensor, Tensor]:
    channels = x.shape[2]
    k, q = (t.unsqueeze(2).expand(-1, -1, channels, -1) for t in (k, q))
    s = step.unsqueeze(-1)
    decay = torch.log1p(-s * k.square()) if rate is None else -rate * s
    out, state = linear_memory(
        q, k, (step * x).unsqueeze(-1), decay, initial_state=initial_state.unsqueeze(-1), output_final_state=True,
        reset=reset, backend="naive",
    )  # fmt: skip
    return out.squeeze(-1), state.squeeze(-1)


def run(call, tensors: dict[str, Tensor], **options) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """Outputs and final state, and the gradient of a random weighting of both with respect to every input."""
    leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    results = call(**leaves, **options)
    draw = torch.Generator().manual_seed(99)
    total = sum((r * torch.randn(r.shape, generator=draw, dtype=torch.float64).to(r)).sum() for r in results)
    return list(results), torch.autograd.grad(total, list(leaves.values()))


def compare_cut(tensors: dict[str, Tensor], cuts, atol: float, rtol: float = 0.0, *, reset=None, **options):
    """Compare calls cut at ``cuts``, each continuing from the last one's state, with one call: outputs, final state."""
    tensors, length = dict(tensors), tensors["x"].shape[1]
    state, options = tensors.pop("initial_state"), {"rate": tensors.pop("rate", None), **options}
    edges, outputs = [0, *sorted(cuts), length], []
    whole, end = channel_scan(**tensors, initial_state=state, output_final_state=True, reset=reset, **options)
    for a, b in zip(edges[:-1], edges[1:], strict=True):
        out, state = channel_scan(
            **{name: x[:, a:b] for name, x in tensors.items()}, initial_state=state, output_final_state=True,
            reset=None if reset is None else reset[:, a:b], **options,
        )  # fmt: skip
        outputs.append(out)
    torch.testing.assert_close(torch.cat(outputs, 1), whole, rtol=rtol, atol=atol)
    torch.testing.assert_close(state, end, rtol=rtol, atol=atol)


def compare(tensors, tolerance: float, backend: str, exact=None, **options):
    """Compare a backend with the oracle, which reads ``exact`` in place of ``tensors`` if given."""
    ours = run(channel_scan, tensors, backend=backend, output_final_state=True, **options)
    theirs = run(oracle, exact or tensors, **options)
    for kind, mine, expected in zip(("result", "gradient"), ours, theirs, strict=True):
        for n, (a, b) in enumerate(zip(mine, expected, strict=True)):
            assert a.shape == b.shape and a.isfinite().all()
            error = (a.double() - b.double()).abs().max().item()
            assert error <= tolerance * max(1.0, b.abs().max().item()), f"{kind} {n}: {error:.1e}"
