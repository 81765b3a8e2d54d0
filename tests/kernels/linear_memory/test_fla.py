"""The arguments we pass to flash-linear-attention's operators, and the use of their results.

Its kernels need a GPU. On other machines the definition stands in for them, with the same arguments and results.
"""

import pytest
import torch

from tests.kernels.linear_memory.cases import DECAYS, assert_same, make, run
from titans_pt.kernels import common
from titans_pt.kernels.linear_memory import dispatch, fla, linear_memory
from titans_pt.kernels.linear_memory.naive import naive_linear_memory

CASES = [(decay, delta, erase) for decay in DECAYS for delta in (False, True) for erase in (False, True)]


def stand_in(name: str):
    """An operator with the documented signature: sequences of different lengths end to end, each with its state."""

    def chunk(q, k, v, *, scale, initial_state, output_final_state, cu_seqlens=None, cu_seqlens_cpu=None, **gates):
        def sequences(function, *tensors):
            if cu_seqlens is None:
                return function(*tensors, initial_state)
            assert len(q) == 1 and len(initial_state) == len(cu_seqlens) - 1
            assert torch.equal(cu_seqlens, cu_seqlens_cpu)
            outputs, states = [], []
            for n, (a, b) in enumerate(zip(cu_seqlens_cpu[:-1], cu_seqlens_cpu[1:], strict=True)):
                part = (None if x is None else x[:, a:b] for x in tensors)
                out, state = function(*part, initial_state[n : n + 1])
                outputs.append(out)
                states.append(state)
            return torch.cat(outputs, 1), torch.cat(states)

        expected = {"simple_gla": (set(), {"g"}, {"g_gamma"}), "gla": ({"g"},), "delta_rule": ({"beta"},),
                    "gated_delta_rule": ({"beta", "g"},), "kda": ({"beta", "g"},),
                    "dplr_delta_rule": ({"a", "b", "gk"},)}  # fmt: skip
        assert set(gates) in expected[name] and scale == 1.0 and output_final_state
        if name == "dplr_delta_rule":
            return sequences(dplr, q, k, v, *gates.values())
        decay, beta = gates.get("g", gates.get("g_gamma")), gates.get("beta")
        if "g_gamma" in gates:
            assert decay.shape == (q.shape[2],)
            decay = decay.detach().expand(q.shape[:3])
        if "g" in gates:
            assert decay.dim() == (4 if name in ("gla", "kda") else 3)
        return sequences(by_definition, q, k, v, decay, beta)

    return chunk


def by_definition(q, k, v, decay, beta, state):
    return naive_linear_memory(q, k, v, decay, beta, None, state, None)


def dplr(q, k, v, a, b, gk, state):
    """S <- diag(exp(gk)) S + b (a^T S)^T + k v^T, as the operator's documentation has it."""
    outputs = []
    for t in range(q.shape[1]):
        read = torch.einsum("bhk,bhkv->bhv", a[:, t], state)
        state = gk[:, t].exp().unsqueeze(-1) * state + torch.einsum("bhk,bhv->bhkv", b[:, t], read)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(outputs, 1), state


@pytest.fixture
def served(monkeypatch):
    """Pretend that flash-linear-attention serves every call."""
    monkeypatch.setattr(fla, "_chunk", stand_in)
    monkeypatch.setattr(dispatch, "unsupported", lambda *_: None)


@pytest.fixture
def resets():
    """Resets (3, 30): the first row inherits its state and loses it, the second keeps it, the third never has it."""
    found = torch.rand(3, 30, generator=torch.Generator().manual_seed(3)) < 0.15
    found[0, 0], found[0, 10] = False, True
    found[1] = False
    found[2, 0] = found[2, 29] = True
    return found


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("decay, delta, erase", CASES)
def test_equals_the_definition(served, resets, decay, delta, erase, documents, steps):
    tensors = make(3, 30, 2, 4, 6, decay=decay, delta=delta, erase=erase, steps=steps)
    reset = resets if documents else None
    for ours, theirs in zip(*(run(tensors, backend, reset=reset) for backend in ("fla", "naive")), strict=True):
        assert_same(ours, theirs)


@pytest.mark.parametrize("decay, delta, erase, steps", [
    ("head", False, False, 1), ("token", True, False, 1), ("channel", False, False, 1), ("channel", True, True, 2),
])  # fmt: skip
def test_torch_compile_takes_it_whole(served, resets, decay, delta, erase, steps):
    torch._dynamo.reset()  # else it makes shapes dynamic that differ from another case's
    tensors = make(3, 30, 2, 4, 6, decay=decay, delta=delta, erase=erase, steps=steps)
    # A decay per head is a constant, as in RetNet.
    leaves = [x.requires_grad_() for name, x in tensors.items() if (name, decay) != ("decay", "head")]

    def call(backend):
        out, state = linear_memory(**tensors, reset=resets, output_final_state=True, backend=backend)
        return out.square().sum() + state.sum()

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert_same(torch.autograd.grad(compiled("fla"), leaves), torch.autograd.grad(call("naive"), leaves))


@pytest.mark.parametrize("erase", [False, True])
def test_operator_is_well_formed(served, resets, erase):
    tensors = make(3, 30, 2, 4, 6, erase=erase)
    names = ("q", "k", "v", "decay", "beta", "erase", "initial_state")
    given = *(tensors[n].requires_grad_() if n in tensors else None for n in names), resets
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(fla._operator, given, test_utils=checks)


def test_documents_are_worked_out_once_for_all_layers(monkeypatch, resets):
    first = fla._documents(resets, resets.device)
    assert first[0].tolist()[0] == 0 and first[0].tolist()[-1] == 90
    assert fla._documents(resets, resets.device) is first
    resets[1, 7] = True
    again = fla._documents(resets, resets.device)
    assert len(again[0]) == len(first[0]) + 1
    assert fla._documents(resets.clone(), resets.device) is not again


def test_documents_in_inference_mode(resets):
    """Inference tensors have no version counter, so their contents are read at every call."""
    with torch.inference_mode():
        own = resets.clone()
        first = fla._documents(own, own.device)
        own[1, 7] = True
        assert len(fla._documents(own, own.device)[0]) == len(first[0]) + 1


def test_each_stream_has_its_own_copy_of_the_documents(monkeypatch, resets):
    """Two streams do not wait for each other: one must not read the other's copy. The host computes bounds once."""
    asked = []
    plain = fla._bounds
    monkeypatch.setattr(fla, "_bounds", lambda reset: asked.append(reset) or plain(reset))
    found = []
    for stream in (1, 2, 1, 2):
        monkeypatch.setattr(fla, "_stream", lambda _, number=stream: number)
        found.append(fla._documents(resets, resets.device))
    assert len(asked) == 1 and found[0] is found[2] and found[1] is found[3]
    for a, b in zip(found[0][1:], found[1][1:], strict=True):
        assert torch.equal(a, b) and a.data_ptr() != b.data_ptr()


@pytest.fixture
def installed(monkeypatch):
    """``installed(triton=..., fla_core=..., generation=...)`` pretends to be a machine with these versions."""

    def pretend(triton="3.7.1", fla_core="0.6.0", generation=9, has_fla=True):
        versions = {"triton": triton, "fla-core": fla_core}
        monkeypatch.setattr(fla, "HAS_FLA", has_fla)
        monkeypatch.setattr(fla.metadata, "version", versions.__getitem__)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (generation, 0))

    return pretend


class OnGPU:
    """The attributes of a tensor that the dispatcher reads."""

    device, dtype, is_meta, requires_grad = torch.device("cuda"), torch.bfloat16, False, False

    def __init__(self, *shape):
        self.shape = shape

    def dim(self):
        return len(self.shape)


Q, TOKEN, HEAD, CHANNEL = OnGPU(1, 8, 2, 64), OnGPU(1, 8, 2), OnGPU(2), OnGPU(1, 8, 2, 64)


@pytest.mark.parametrize("decay, beta", [(None, None), (HEAD, None), (TOKEN, None), (CHANNEL, None), (None, TOKEN),
                                         (HEAD, TOKEN), (TOKEN, TOKEN), (CHANNEL, TOKEN)])  # fmt: skip
def test_serves(installed, decay, beta):
    installed()
    assert fla.unsupported(Q, Q, decay, beta) is None
    assert fla.unsupported(Q, Q, decay, beta, CHANNEL) is None


@pytest.mark.parametrize("machine, decay, beta, reason", [
    ({"has_fla": False}, None, None, "flash-linear-attention is not installed"),
    ({"fla_core": "0.5.1"}, None, None, "fla-core 0.5.1 is older than 0.6"),
    ({"triton": "3.6.0"}, TOKEN, None, "triton 3.6.0 gives wrong gradients"),
    ({"triton": "3.4.0"}, TOKEN, TOKEN, "triton 3.4.0 gives wrong gradients"),
    ({"triton": "3.7.0+git1"}, HEAD, TOKEN, "triton 3.7.0"),
])  # fmt: skip
def test_refuses(installed, machine, decay, beta, reason):
    installed(**machine)
    assert reason in fla.unsupported(Q, Q, decay, beta)


def test_refuses_by_shape_and_dtype(installed, monkeypatch):
    installed()
    assert "even widths" in fla.unsupported(OnGPU(1, 8, 2, 63), Q, None, None)
    assert "at most 256" in fla.unsupported(OnGPU(1, 8, 2, 512), Q, None, TOKEN)
    monkeypatch.setattr(OnGPU, "dtype", torch.float32)
    assert "neither float16 nor bfloat16" in fla.unsupported(Q, Q, None, None)


def test_a_broken_compiler_matters_where_it_is_met(installed):
    """Forward passes, other decays and other GPUs are not affected."""
    installed(triton="3.6.0")
    with torch.no_grad():
        assert fla.unsupported(Q, Q, TOKEN, None) is None
    assert fla.unsupported(Q, Q, HEAD, None) is None and fla.unsupported(Q, Q, CHANNEL, None) is None
    installed(triton="3.6.0", generation=8)
    assert fla.unsupported(Q, Q, TOKEN, None) is None


def test_what_falls_back_says_why_once(installed, recwarn):
    common.warned_of.cache_clear()
    installed(triton="3.6.0")
    for _ in range(2):
        assert not dispatch._takes_fla(Q, Q, TOKEN, TOKEN, None, "auto")
    assert len(recwarn) == 1 and "install" not in str(recwarn[0].message) and "triton 3.6.0" in str(recwarn[0].message)


@pytest.mark.gpu
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("decay, delta, erase", CASES)
def test_its_kernels_on_a_gpu(decay, delta, erase, documents):
    """bf16 against float64: outputs and states within 1 % of their norm, gradients within 2 %."""
    pytest.importorskip("fla", reason="pip install fla-core")
    made = make(2, 300, 2, 64, 64, decay=decay, delta=delta, erase=erase, strength=0.1)
    tensors = {n: x.cuda() for n, x in made.items()}
    half = {n: x.bfloat16() if n in "qkv" else x.float() for n, x in tensors.items()}
    half = {n: x.requires_grad_() for n, x in half.items()}
    if reason := fla.unsupported(half["q"], half["v"], half.get("decay"), half.get("beta"), half.get("erase")):
        pytest.skip(reason)
    exact = {n: x.detach().double() for n, x in half.items()}
    reset = torch.rand(2, 300, generator=torch.Generator().manual_seed(0)).cuda() < 0.02 if documents else None
    (out, grad), (out_, grad_) = run(half, "fla", reset=reset), run(exact, "naive", reset=reset)
    for ours, theirs, limit in ((out, out_, 1e-2), (grad, grad_, 2e-2)):
        for a, b in zip(ours, theirs, strict=True):
            assert (a.double() - b).norm() < limit * b.norm()
