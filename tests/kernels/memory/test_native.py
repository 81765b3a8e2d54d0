"""The dual form in C: properties that the exactness tests of test_chunked.py do not cover."""

import os
import subprocess
import sys

import pytest
import torch

import titans_pt.kernels.native
from titans_pt.kernels.memory import NetworkShape, memory_read, native, neural_memory
from titans_pt.kernels.memory.native import token

MISSING = native.unserved(torch.zeros(1), NetworkShape(4, 4))
if MISSING:
    pytest.skip(f"no C: {MISSING}", allow_module_level=True)


def inputs(B, T, H, D, hidden, depth, dtype=torch.float32, seed=0):
    gen = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, T, H, D, generator=gen, dtype=dtype) for _ in range(3))
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    theta, eta, alpha = (torch.rand(B, T, H, generator=gen, dtype=dtype) for _ in range(3))
    widths = [D, *[hidden] * (depth - 1), D]
    shapes = zip(widths[:-1], widths[1:], strict=True)
    weights = [0.5 * torch.randn(H, a, b, generator=gen, dtype=dtype) for a, b in shapes]
    norm = [torch.ones(H, D, dtype=dtype), torch.zeros(H, D, dtype=dtype)]
    return [q, k, v, 0.02 * theta, eta, 0.02 * alpha, *weights, *norm]


def run(tensors, depth, backend, **options):
    leaves = [x.clone().requires_grad_() for x in tensors]
    out, state = neural_memory(
        *leaves[:6], tuple(leaves[6 : 6 + depth]), norm=tuple(leaves[6 + depth :]), backend=backend,
        output_final_state=True, **options,
    )  # fmt: skip
    return [out, *state.weights, *torch.autograd.grad(out.square().sum(), leaves)]


@pytest.mark.parametrize("activation", ["gelu", "silu", "relu"])
@pytest.mark.parametrize("shape", [(2, 70, 3, 48, 96, 2, 32), (1, 65, 2, 20, 40, 3, 16), (2, 33, 1, 33, 7, 1, 64)])
def test_in_fp32_it_is_as_near_to_float64_as_pytorch_is(shape, activation):
    """Compare relative errors of outputs, state and gradients, for odd widths and lengths and every tile size."""
    *sizes, chunk = shape
    depth = sizes[-1]
    options = dict(chunk_size=chunk, forget_to="start", network=NetworkShape(*sizes[3:], activation=activation))
    given = inputs(*sizes, dtype=torch.float64)
    exact = run(given, depth, "chunked", **options)

    def errors(backend):
        found = run([x.float() for x in given], depth, backend, **options)
        return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True)]

    for ours, theirs in zip(errors("native"), errors("chunked"), strict=True):
        assert ours <= max(2e-6, 4 * theirs)


def test_threads_and_kept_states_change_nothing(monkeypatch):
    monkeypatch.setattr(titans_pt.kernels.native, "WORTH_A_THREAD", 1)
    given, threads = inputs(3, 100, 2, 16, 32, 2), torch.get_num_threads()
    expected = run(given, 2, "native", chunk_size=16, save_every=1)
    try:
        torch.set_num_threads(4)
        for save_every in (None, 3, 100):
            for a, b in zip(run(given, 2, "native", chunk_size=16, save_every=save_every), expected, strict=True):
                assert torch.equal(a, b)
    finally:
        torch.set_num_threads(threads)


def test_what_it_does_not_serve():
    given = inputs(1, 4, 1, 4, 8, 2)
    with pytest.raises(ValueError, match='backend "native" does not serve this: memories of more than 8 layers'):
        run(inputs(1, 4, 1, 4, 4, 9), 9, "native")
    with pytest.raises(ValueError, match="tensors are on meta"):
        neural_memory(*(x.to("meta") for x in given[:6]), tuple(w.to("meta") for w in given[6:8]), backend="native")


CALL = """
import torch, warnings
import titans_pt.kernels.native
from titans_pt.kernels.memory import NetworkShape, native, neural_memory
x = torch.nn.functional.normalize(torch.ones(1, 3, 1, 4), dim=-1)
gate = torch.full((1, 3, 1), 0.1)
out, _ = neural_memory(x, x, x, gate, gate, gate, (torch.eye(4)[None],), chunk_size=2)
print(native.unserved(x, NetworkShape(4, 4)), out.sum().item())
"""


def call(tmp_path, **environment):
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)} | environment
    done = subprocess.run([sys.executable, "-c", CALL], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.split(), done.stderr


@pytest.mark.thorough
def test_without_a_compiler_pytorch_serves(tmp_path):
    """Disabling C is silent, a compiler that fails gives one warning, and the results agree."""
    (*_, ours), warned = call(tmp_path)
    assert "UserWarning" not in warned and len(list((tmp_path / "titans-pt" / "native").glob("*.so"))) == 1
    (reason, off), warned = call(tmp_path, TITANS_NATIVE="0")
    assert reason == "TITANS_NATIVE=0" and "UserWarning" not in warned
    (*_, failed), warned = call(tmp_path, CC="false")
    assert "does not compile scan.c" in warned
    assert float(ours) == pytest.approx(float(off), abs=1e-6) == pytest.approx(float(failed), abs=1e-6)


@pytest.mark.parametrize("forget_to", ["start", "zero"])
@pytest.mark.parametrize("per_layer", [False, True])
def test_token_by_token_as_in_one_call(forget_to, per_layer):
    """Token by token, as in generation, agrees with one call; rows are at different offsets in their chunks."""
    *tensors, gain, shift = inputs(2, 11, 3, 8, 12, 2, dtype=torch.float64)
    sequence, weights = tensors[:6], tuple(tensors[6:])
    if per_layer:
        sequence[3:] = [torch.stack([g, 0.5 * g], -1) for g in sequence[3:]]
    reset = torch.zeros(2, 11, dtype=torch.bool)
    reset[1, 2] = True
    options = dict(norm=(gain, shift), chunk_size=4, forget_to=forget_to, output_final_state=True)
    expected, end = neural_memory(*sequence, weights, reset=reset, **options)
    out, state = neural_memory(*(x[:, :3] for x in sequence), weights, reset=reset[:, :3], **options)
    outputs = [out]
    with torch.no_grad():
        for t in range(3, 11):
            out, state = neural_memory(*(x[:, t : t + 1] for x in sequence), weights, initial_state=state, **options)
            outputs.append(out)
    torch.testing.assert_close(torch.cat(outputs, 1), expected, rtol=0, atol=1e-12)
    for group in ("weights", "momentum", "chunk_weights"):
        for a, b in zip(getattr(state, group), getattr(end, group), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    assert torch.equal(state.offset, end.offset)


@pytest.mark.parametrize("shape", [(2, 3, 8, 12, 2), (1, 2, 33, 40, 3), (3, 1, 7, 7, 1)])
def test_reading_alone(shape):
    """Read one query per row and head with the row's weights."""
    B, H, D, hidden, depth = shape
    q, *_, gain, shift = inputs(B, 1, H, D, hidden, depth, dtype=torch.float64)
    gen = torch.Generator().manual_seed(1)
    network = NetworkShape(D, hidden, depth)
    weights = tuple(torch.randn(B, H, a, b, generator=gen, dtype=torch.float64) for a, b in network.layers)
    gain, shift = gain + 0.1, shift + 0.2
    recall = token.MemoryRecall(q, H, network=network, norm=(gain, shift))
    recall(weights)
    expected = memory_read(q, weights, network=network, norm=(gain, shift))
    torch.testing.assert_close(recall.out, expected, rtol=0, atol=1e-12)
