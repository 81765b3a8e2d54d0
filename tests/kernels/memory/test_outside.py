"""Against other people's code, where it is installed and runs on a CPU: pip install titans-pytorch==0.5.5"""

import pytest
import torch

from kernels.memory import neural_memory

titans_pytorch = pytest.importorskip("titans_pytorch", reason="pip install titans-pytorch==0.5.5 to compare with it")

D, HEADS, CHUNK, CHUNKS = 8, 2, 4, 5


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_titans_pytorch_end_state(depth):
    """Its recurrence is chunk-gated: one step a chunk, with alpha pooled over the chunk and the loss a MEAN over D.

    Settings that make it ours: batch_size = chunk_size (weights of each chunk's start), no residual norm, no momentum;
    here then theta / D, eta = 0, and a chunk's forgetting on its first token. With momentum the two differ by
    definition: there S is added once a chunk, here once a token.
    """
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
            residual=False, chunk_size=CHUNK, output_final_state=True,
        )  # fmt: skip
        theirs, _ = state.states
    for mine, name in zip(ours.weights, other.memory_model_parameter_names, strict=True):
        torch.testing.assert_close(mine[0], theirs[name].reshape(mine[0].shape), rtol=0, atol=1e-9)
