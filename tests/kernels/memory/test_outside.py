"""The memory against other projects' code, if it is installed (the extra ``dev``) and runs on a CPU."""

import importlib

import pytest
import torch

from titans_pt.kernels.memory import NetworkShape, neural_memory

D, HEADS, CHUNK, CHUNKS = 8, 2, 4, 5


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_titans_pytorch_end_state(depth):
    """titans_pytorch's recurrence takes one step per chunk: alpha is pooled over the chunk, the loss a MEAN over D.

    These settings make it equal to ours: batch_size = chunk_size (weights of each chunk's start), no residual norm, no
    momentum. We then use theta / D, eta = 0, and a chunk's forgetting on its first token. With momentum the two differ
    by definition: theirs adds S once a chunk, ours once a token.
    """
    titans_pytorch = pytest.importorskip("titans_pytorch", reason="pip install titans-pytorch==0.5.5")
    torch.manual_seed(depth)
    other = titans_pytorch.NeuralMemory(
        dim=16, heads=HEADS, dim_head=D, chunk_size=CHUNK, batch_size=CHUNK, momentum=False,
        model=titans_pytorch.MemoryMLP(D, depth=depth, expansion_factor=2.0), mem_model_norm_add_residual=False,
    ).double()  # fmt: skip
    x = torch.randn(1, CHUNK * CHUNKS, 16, dtype=torch.float64)
    with torch.no_grad():
        _, state = other(x)
        seen = other.store_norm(x)
        k, v = (part(seen).unflatten(-1, (HEADS, D)) for part in (other.to_keys, other.to_values))
        theta = other.adaptive_step_transform(other.to_adaptive_step(seen)).unflatten(0, (1, HEADS)).transpose(1, 2) / D
        forget = other.to_decay_factor(other.reduce_to_chunk_rep(seen)).sigmoid().squeeze(-1)  # (H, chunks)
        alpha = torch.zeros_like(theta)
        alpha[0, ::CHUNK] = forget.T
        _, ours = neural_memory(
            k, k, v, theta, torch.zeros_like(theta), alpha, tuple(other.memory_model_parameters),
            network=NetworkShape(D, 2 * D, depth, norm=False, residual=False), chunk_size=CHUNK,
            output_final_state=True,
        )  # fmt: skip
        theirs, _ = state.states
    for mine, name in zip(ours.weights, other.memory_model_parameter_names, strict=True):
        torch.testing.assert_close(mine[0], theirs[name].reshape(mine[0].shape), rtol=0, atol=1e-9)


def reference(module: str, function: str):
    """Return a plain PyTorch function of flash-linear-attention. The module imports triton; the function needs none."""
    pytest.importorskip("triton", reason="pip install triton, which flash-linear-attention imports")
    pytest.importorskip("fla", reason="pip install fla-core==0.6.0")
    return getattr(importlib.import_module(f"fla.ops.{module}.naive"), function)


@pytest.fixture
def linear():
    """q, k, v (B, T, H, D), beta and log decay (B, T, H), and neural_memory as a matrix that starts at zero.

    All of flash-linear-attention's functions compute in fp32, and scale queries by 1 / sqrt(D) by default. Theta is
    beta / 2, because their loss is 1/2 ||S k - v||^2.
    """
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 37, HEADS, D, generator=gen) for _ in range(3))
    k = torch.nn.functional.normalize(k, dim=-1)
    beta, decay = (torch.rand(2, 37, HEADS, generator=gen) for _ in range(2))

    def ours(q, k, v, theta, alpha, chunk_size=1):
        out, state = neural_memory(
            q, k, v, theta, torch.zeros_like(theta), alpha, (torch.zeros(HEADS, D, D),),
            network=NetworkShape(D, D, 1, norm=False, residual=False), chunk_size=chunk_size,
            output_final_state=True,
        )  # fmt: skip
        return out, state.weights[0]

    return q, k, v, beta, (0.2 + 0.8 * decay).log(), ours


def close(ours, theirs):
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


def test_fla_delta_net(linear):
    q, k, v, beta, _, ours = linear
    out, state = reference("delta_rule", "delta_rule_recurrence")(*(x.transpose(1, 2) for x in (q, k, v, beta)))
    close(ours(q * D**-0.5, k, v, beta / 2, torch.zeros_like(beta)), (out.transpose(1, 2), state))


def test_fla_gated_delta_net(linear):
    """Gated DeltaNet decays before the delta step: theta = a beta / 2, v / a, 1 - alpha = a."""
    q, k, v, beta, g, ours = linear
    theirs = reference("gated_delta_rule", "naive_recurrent_gated_delta_rule")(
        q, k, v, beta=beta, g=g, scale=1.0, output_final_state=True
    )
    decay = g.exp()
    close(ours(q, k, v / decay.unsqueeze(-1), decay * beta / 2, 1 - decay), theirs)


def test_fla_linear_attention(linear):
    """One chunk spans the sequence: all gradients are taken at M_0 = 0, so the error is -v and the write v k^T."""
    q, k, v, beta, _, ours = linear
    theirs = reference("linear_attn", "naive_recurrent_linear_attn")(q, k, v, scale=1.0, output_final_state=True)
    half = torch.full_like(beta, 0.5)
    close(ours(q, k, v, half, torch.zeros_like(beta), chunk_size=q.shape[1]), theirs)
