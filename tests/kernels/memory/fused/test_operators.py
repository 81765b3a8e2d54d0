"""The operators: schemas and fake implementations, torch.compile, the choice of a backend, decoding, memory."""

import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.kernels.memory.fused import cases
from tests.kernels.memory.fused.cases import DEVICE, Case, arguments, assert_equal, error, inputs, limits, run
from titans_pt.kernels import common
from titans_pt.kernels.memory import NetworkShape, neural_memory
from titans_pt.kernels.memory.fused import layout, operators, scan
from titans_pt.kernels.memory.rules.titans import TITANS

SMALL = Case(T=20, H=1, depth=1)


@pytest.fixture
def recorded(monkeypatch):
    """Arguments that the operator gets when a call of the memory needs gradients."""
    calls = []

    def record(*given):
        calls.append(given)
        return operators.memory(*given)

    monkeypatch.setattr("titans_pt.kernels.memory.fused.memory", record)
    given, options = arguments(SMALL)
    given[0].requires_grad_()
    neural_memory(*given, **options, backend="triton")
    return calls[0]


def test_operator_is_well_formed(recorded):
    torch.library.opcheck(operators.memory, recorded, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.thorough
def test_torch_compile_takes_it_whole():
    given, options = arguments(SMALL)
    given[0].requires_grad_()

    def call(q):
        out, state = neural_memory(q, *given[1:], **options, backend="triton", output_final_state=True)
        return out.square().sum() + state.momentum[0].sum()

    plain = torch.autograd.grad(call(given[0]), given[0])[0]
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(torch.autograd.grad(compiled(given[0]), given[0])[0], plain)


@pytest.mark.parametrize("change, reason", [
    ({"chunk_size": 24}, "chunk_size 24 is neither"),
    ({"dtype": torch.float64}, "dtype torch.float64 is none"),
])  # fmt: skip
def test_asked_for_what_it_does_not_serve(change, reason):
    given, options = arguments(SMALL)
    dtype = change.pop("dtype", torch.float32)
    given = [g.to(dtype) if isinstance(g, torch.Tensor) else g for g in given]
    with pytest.raises(ValueError, match=f'backend "triton" does not serve this: {reason}'):
        neural_memory(*given, **(options | change), backend="triton")


@pytest.mark.skipif(DEVICE == "cuda", reason="there auto takes the kernels")
def test_auto_on_a_cpu_is_the_dual_form_without_a_warning(monkeypatch):
    monkeypatch.setattr("titans_pt.kernels.memory.fused.fused_memory", None)
    given, options = arguments(SMALL)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        neural_memory(*given, **options)


def test_what_falls_back_says_why_once():
    from titans_pt.kernels.memory import dispatch
    from titans_pt.kernels.memory.call import MemoryCall

    def on_gpu(width: int, **options) -> MemoryCall:
        x, gate = torch.empty(1, 16, 1, width, device="meta"), torch.empty(1, 16, 1, 1, device="meta")
        return MemoryCall(x, x, x, gate, gate, gate, (), NetworkShape(width, width, 1), None, TITANS, **options)

    common.warned_of.cache_clear()
    with pytest.warns(UserWarning, match="head width 48 is none of"):
        assert dispatch.chosen(on_gpu(48), "auto") is dispatch.CHUNKED
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dispatch.chosen(on_gpu(48), "auto") is dispatch.CHUNKED
        assert dispatch.chosen(on_gpu(32, stale=True), "auto") is dispatch.BLOCKWISE  # never for Triton: no warning
    assert dispatch.chosen(on_gpu(32), "auto") is dispatch.TRITON


def test_what_no_gpu_could_launch_is_refused(monkeypatch):
    """In fp32, two layers of width 64 or more need more shared memory than Hopper has; a smaller GPU has less."""
    from titans_pt.kernels.memory import dispatch

    def reason(dtype, width, layers=2, device="cuda"):
        return dispatch.unserved(dtype, NetworkShape(width, 2 * width, layers), 64, device=torch.device(device))

    for device in ("cuda", "meta"):
        assert reason(torch.float32, 64, device=device) == (
            "float32 at head width 64 and 2 layers needs 376,832 bytes of shared memory, this GPU has 232,448 "
            "(train.precision=bf16 needs less)")  # fmt: skip
        assert "head width 128 and 2 layers needs 737,280" in reason(torch.float32, 128, device=device)
        assert not any(reason(torch.bfloat16, width, device=device) for width in (32, 64, 128))
        assert not reason(torch.float32, 32, device=device) and not reason(torch.float32, 128, 1, device=device)
    assert not reason(torch.float32, 64, device="cpu")  # interpreted

    class Ampere:
        shared_memory_per_block_optin = 166_912

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Ampere)
    assert "bfloat16 at head width 128 and 2 layers needs 212,992 bytes of shared memory, this GPU has 166,912" in (
        reason(torch.bfloat16, 128)
    )
    assert not reason(torch.bfloat16, 64) and "head width 32" in reason(torch.float32, 32)


@pytest.mark.parametrize("case", [
    Case(T=40, H=1, B=2, per_layer=True, activation="silu"),
    Case(T=40, H=1, depth=1, norm=False, residual=False),
    Case(T=40, H=2, B=2, per_layer=True, forget_to="start"),
], ids=str)  # fmt: skip
def test_decoding_is_the_sequence(case):
    """Prefill, then pieces of 1, 3, 8 and 5 tokens across a chunk's end, agree with one call."""
    leaves, options = inputs(case)
    weights = tuple(leaves[6 : 6 + case.depth])
    norm = tuple(leaves[6 + case.depth :]) or None
    whole, end = neural_memory(*leaves[:6], weights, norm=norm, **options, backend="chunked", output_final_state=True)
    at, state, pieces = 23, None, []
    with torch.no_grad():
        for begin, stop, backend in [(0, at, "chunked"), (at, 24, "triton"), (24, 27, "triton"), (27, 35, "triton"),
                                     (35, 40, "triton")]:  # fmt: skip
            out, state = neural_memory(
                *(x[:, begin:stop] for x in leaves[:6]), weights, norm=norm, **options, backend=backend,
                initial_state=state, output_final_state=True,
            )  # fmt: skip
            pieces.append(out)
    assert error(torch.cat(pieces, 1), whole) < 1e-5
    for group in ("weights", "momentum", "chunk_weights"):
        for a, b in zip(getattr(state, group), getattr(end, group), strict=True):
            assert error(a, b) < 1e-5
    assert torch.equal(state.offset.cpu(), end.offset.cpu())


def test_few_tokens_take_one_launch(monkeypatch):
    monkeypatch.setattr("titans_pt.kernels.memory.fused.memory", None)
    given, options = arguments(Case(T=3, H=1))
    with torch.no_grad():
        neural_memory(*given, **options, backend="triton")


def test_table_of_blocks():
    """Two rows with offsets 0 and 5 in chunks of 32, blocks of 16, a reset at token 20 of the second row."""
    reset = torch.zeros(2, 40, dtype=torch.bool)
    reset[1, 20] = True
    blocks = layout.count(40, 32, 16, offset=True, resets=1)
    made = layout.table(40, 32, 16, blocks, torch.tensor([0, 5]), reset)
    assert made[0, :3].tolist() == [[0, 16, 0, 0, 3], [16, 16, 0, 0, 2], [32, 8, 2, 0, 1]]
    assert made[1, :4].tolist() == [[0, 11, -1, 0, 4], [11, 9, -1, 0, 3], [20, 16, 2, 1, 2], [36, 4, 2, 0, 1]]
    assert made[:, :, 1].sum(1).tolist() == [40, 40] and (made[0, 3:, [1, 4]] == 0).all()


def test_table_of_blocks_of_many_chunks():
    """With chunks of 4 and blocks of 16, an incomplete chunk gets its own block: the rest of a chunk, and the part
    that the row's end cuts off."""
    reset = torch.zeros(2, 40, dtype=torch.bool)
    reset[1, 21] = True
    blocks = layout.count(40, 4, 16, offset=True, resets=1)
    made = layout.table(40, 4, 16, blocks, torch.tensor([0, 3]), reset)
    assert made[0, :3].tolist() == [[0, 16, 0, 0, 3], [16, 16, 1, 0, 2], [32, 8, 2, 0, 1]]
    assert made[1, :6].tolist() == [
        [0, 1, -1, 0, 5], [1, 16, 1, 0, 4], [17, 4, 2, 0, 3], [21, 16, 3, 1, 2], [37, 3, 4, 0, 1], [40, 0, 4, 0, 0]
    ]  # fmt: skip
    assert made[:, :, 1].sum(1).tolist() == [40, 40]


@pytest.mark.parametrize("C", [16, 64])
def test_rows_behind_the_last_token_have_no_error(C, monkeypatch):
    """A LayerNorm of these rows' zeros would make their error hundreds of times as large as other rows'. Pulled back
    through a wide memory, it would be infinite in fp16, and infinity times a step of zero is NaN."""
    errors = []

    def launch(call, kernel, number, *tensors, **options):
        plain(call, kernel, number, *tensors, **options)
        if kernel is scan.scan:
            errors.append(dict(zip(kernel.arg_names, tensors, strict=False))["error"])

    plain = operators.Call.launch
    monkeypatch.setattr(operators.Call, "launch", launch)
    run(replace(SMALL, C=C, decode=True), "triton")  # 20 tokens
    rows = errors[0].flatten(0, -2).abs().sum(-1)
    assert (rows > 0).sum() == 20 and (rows == 0).sum() == len(rows) - 20 > 0


@pytest.mark.thorough
@pytest.mark.parametrize("save_every", [pytest.param(None, marks=pytest.mark.slow), 3])
def test_more_resets_allowed_than_there_are(save_every, monkeypatch):
    """Unused blocks do not change a bit of the results, though their scratch memory is full of NaN (conftest.py)."""
    case = Case(T=20, B=2, H=1, depth=1, resets=True, initial=True, save_every=save_every)
    (out, grad, _), options = run(case, "triton"), inputs(case)[1]
    monkeypatch.setattr(cases, "neural_memory", partial(neural_memory, max_resets=int(options["reset"].sum()) + 3))
    more, more_grad, _ = run(case, "triton")
    for a, b in zip((*out, *grad), (*more, *more_grad), strict=True):
        assert torch.equal(a, b)


def test_blocks_of_a_group_follow_the_budget_and_its_formula(monkeypatch):
    q, gate, network = torch.empty(2, 640, 3, 64), torch.empty(2, 640, 3, 2), NetworkShape(64, 128)

    def call(save_every=0, chunk=64):
        return operators.Call(q, gate, network, False, None, chunk, 0, save_every)

    c, D, h, L, G, b, rows = 64, 64, 128, 2, 2, 4, 6
    scratch = (2 * b * L * D * h + c * D * (12 + 2 * b) + c * h * (8 + 6 * b) + 4 * c * c * (G + L) + 24 * c * (G + L)
               + 12 * L + 8 * D)  # fmt: skip
    assert call().block_bytes() == scratch
    assert call(chunk=16).block_bytes() == scratch + 5 * b * c * c
    assert call().every == 10 and call(3).groups == 4
    monkeypatch.setattr(operators, "SCRATCH_BYTES", 4 * rows * scratch)
    assert (call().every, call().groups) == (4, 3)
    monkeypatch.setattr(operators, "SCRATCH_BYTES", 1)
    assert call().every == 1


def test_limits_follow_the_case(monkeypatch):
    """Limits are wide where rounding the inputs changes the oracle, narrow elsewhere; a diverging case is refused."""
    small = Case(T=30, H=1, depth=1, dtype=torch.bfloat16)
    steep = Case(T=30, H=1, norm=False, dtype=torch.bfloat16)  # its outputs are mostly the residual
    found = [limits(case, run(case, "chunked", torch.float64)) for case in (small, steep)]
    assert min(found[0][0]) == min(found[1][0]) == cases.FLOORS[torch.bfloat16] and len(found[0][1]) == 9
    assert found[1][0][0] > 2 * found[0][0][0]
    with pytest.raises(AssertionError, match="the case diverges"):
        long = Case(T=300, C=64, D=32, H=1, dtype=torch.bfloat16)  # forgets to zero under a LayerNorm
        limits(long, run(long, "chunked", torch.float64))


@pytest.mark.gpu
def test_peak_memory_on_a_gpu():
    """Forward and backward pass stay below the docstring's formula, without inputs, outputs and gradients."""
    B, T, H, D, h = 4, 4096, 8, 64, 128
    case = Case(T=T, C=64, D=D, B=B, H=H, dtype=torch.bfloat16)
    given, options = arguments(case)
    leaves = [t.requires_grad_() for t in (*given[:6], *given[6], *options["norm"])]

    def once():
        out, _ = neural_memory(*given, **options, backend="triton")
        return torch.autograd.grad(out.float().sum(), leaves)

    once()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    once()
    call = operators.Call(given[0], given[3].unsqueeze(-1), options["network"], False, None, 64, 0, 0)
    rows, packed = B * H, 2 * D * h
    bound = call.groups * rows * 12 * packed + call.every * rows * call.block_bytes() + rows * (12 + 2) * packed
    copies = 4 * B * T * H * (8 * D * 4 + 6 * 4)  # q, k, v, out, gates and all their gradients, at most in fp32
    assert torch.cuda.max_memory_allocated() - start < bound + copies + 5 * rows * 12 * packed


@pytest.mark.gpu
@pytest.mark.parametrize("case", [
    Case(T=1000, C=64, D=64, B=2, H=4, dtype=torch.bfloat16, forget_to="start"),
    Case(T=777, C=64, D=64, expansion=4, B=2, H=2, dtype=torch.bfloat16, initial=True, resets=True),
    Case(T=500, C=16, D=64, depth=1, B=2, H=2, dtype=torch.bfloat16, per_layer=True),
    Case(T=600, C=256, D=128, expansion=4, H=2, dtype=torch.bfloat16),
    Case(T=300, C=64, D=32, H=2, dtype=torch.bfloat16, norm=False, activation="silu"),
], ids=str)  # fmt: skip
def test_bf16_on_a_gpu(case):
    assert_equal(case)


@pytest.mark.gpu
def test_the_same_call_gives_the_same_bits():
    case = Case(T=500, C=64, D=64, B=2, H=4, dtype=torch.bfloat16, save_every=3)
    for a, b in zip(*(sum(map(list, run(case, "triton")[:2]), []) for _ in range(2)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
def test_cuda_graph_of_forward_and_decode():
    for T in (1, 256):
        given, options = arguments(Case(T=T, C=64, D=64, B=2, dtype=torch.bfloat16))
        with torch.no_grad():
            expected, _ = neural_memory(*given, **options, backend="triton")
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out, _ = neural_memory(*given, **options, backend="triton")
            graph.replay()
        assert torch.equal(out, expected)
