"""The baselines under torch.compile: on the GPU path a block has no graph break."""

from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.helpers.mixers import BASELINES, small_config
from titans_pt.config import ModelConfig
from titans_pt.kernels import compiling
from titans_pt.kernels.channel_scan import dispatch as scan
from titans_pt.kernels.linear_memory import dispatch as linear
from titans_pt.layers.documents import Documents
from titans_pt.models import build_model
from titans_pt.models.ways import whole_sequence
from titans_pt.tasks.next_token import NextTokenLoss

pytestmark = pytest.mark.thorough


@pytest.fixture(autouse=True)
def dynamo():
    torch._dynamo.reset()
    counters.clear()
    compiling.compiled.cache_clear()  # a test's backend is no other test's
    yield
    torch._dynamo.reset()
    compiling.compiled.cache_clear()


@pytest.fixture
def on_a_gpu(monkeypatch):
    """``on_a_gpu(mixer)``: a bf16 block of fake tensors on the GPU path."""
    pytest.importorskip("triton", reason="the fused scan is made of its kernels")
    from titans_pt.kernels.channel_scan.fused import fused_scan

    monkeypatch.setattr(linear, "_takes_fla", lambda *_: True)
    monkeypatch.setattr(scan, "_fused", lambda *_: fused_scan)

    def made(mixer):
        block = build_model(small_config([mixer])).blocks[0]
        for module in block.modules():
            for name, p in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(torch.empty(p.shape, dtype=torch.bfloat16)))
        return block

    with FakeTensorMode(allow_non_fake_inputs=True):
        yield made


FORMS = ("gla", "gated_deltanet", "mamba", "mamba2", "rwkv7")
"""One mixer for each form: decay, delta rule, two scans, separate erase and write keys. All others are slow tests."""


@pytest.mark.parametrize("documents", [False, True], ids=["", "documents"])
@pytest.mark.parametrize(
    "mixer",
    [pytest.param(n, marks=() if n in FORMS else pytest.mark.slow) for n in BASELINES if not n.startswith("ttt")],
)
def test_no_graph_break_on_the_paths_of_a_gpu(mixer, documents, on_a_gpu):
    block, x = on_a_gpu(mixer), torch.empty(2, 97, 32, dtype=torch.bfloat16)
    given = Documents._make(torch.zeros(2, 97, dtype=torch.bool), 8) if documents else None
    found = torch._dynamo.explain(whole_sequence)(block, x, given)
    assert (found.graph_count, found.break_reasons) == (1, [])


@pytest.mark.parametrize("mixer", ["ttt_mlp", pytest.param("ttt_linear", marks=pytest.mark.slow)])
def test_of_ttt_the_memory_alone_is_outside(mixer, monkeypatch):
    """Compiling would unroll TTT's loop over mini-batches, for minutes: only a mini-batch is compiled."""
    monkeypatch.setattr(compiling, "compiled", lambda step: step)
    block = build_model(small_config([mixer])).blocks[0]
    found = torch._dynamo.explain(whole_sequence)(block, torch.randn(2, 33, 32), None)
    assert found.break_reasons and all("looped_ttt_memory" in reason.reason for reason in found.break_reasons)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mixer", ["ttt_mlp", "liza"])
def test_a_warm_up_compiles_nothing_again(mixer, monkeypatch):
    """A number that rises from step to step is an input of the compiled block, not a constant."""
    made = []

    def backend(graph, _inputs):
        made.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch.manual_seed(0)
    model, ids = build_model(small_config([mixer])), torch.randint(0, 50, (1, 20))
    found, counts = [], []
    for step in range(4):
        model.blocks.set_progress(step / 100)
        model.blocks.set_compiled(False)
        expected, _ = model(ids, output_final_state=False)
        model.blocks.set_compiled(True)
        found.append(model(ids, output_final_state=False)[0])
        counts.append(len(made))
        torch.testing.assert_close(found[-1], expected)
    assert counts == 4 * [counts[0]] and counts[0] > 0
    assert mixer == "ttt_mlp" or not torch.allclose(found[0], found[3], atol=1e-4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "mixer", [pytest.param(n, marks=() if n in ("gated_deltanet", "ttt_mlp") else pytest.mark.slow) for n in BASELINES]
)
def test_compiled_equals_eager(mixer, monkeypatch):
    # Inductor would take minutes; the traced graph and its derivative are the same without it.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch.manual_seed(0)
    loss = NextTokenLoss(build_model(small_config([mixer], n_layers=3))).train()
    ids = torch.randint(0, 50, (2, 34), generator=torch.Generator().manual_seed(1))

    def gradients():
        value = loss(ids, None)
        return torch.autograd.grad(value, list(loss.parameters())), value

    eager, expected = gradients()
    loss.model.blocks.set_compiled(True)
    compiled, value = gradients()
    torch.testing.assert_close(value, expected)
    for a, b in zip(compiled, eager, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    if not mixer.startswith(("ttt", "mamba", "longhorn")) or mixer == "mamba2":
        assert counters["stats"]["unique_graphs"] == 1, "layers share their code"


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mixer", BASELINES)
def test_on_a_gpu(mixer):
    """bf16 gradients from the GPU's kernels, eager and compiled, equal float64's on the CPU within bf16's noise."""
    torch.manual_seed(0)
    config = ModelConfig(mixers=[mixer], vocab_size=50, d_model=256, n_layers=2, n_heads=4, mlp_hidden=64)
    model = build_model(config).to(torch.bfloat16)
    ids = torch.randint(0, 50, (2, 131))

    def gradients(model, ids):
        logits, _ = model(ids, output_final_state=False)
        value = torch.nn.functional.cross_entropy(logits.flatten(0, 1).double(), ids.flatten())
        return torch.autograd.grad(value, list(model.parameters()))

    exact = gradients(model.double().train(), ids)
    model = model.to("cuda", torch.bfloat16)
    for compiled in (False, True):
        model.blocks.set_compiled(compiled)
        for found, expected in zip(gradients(model, ids.cuda()), exact, strict=True):
            difference = (found.cpu().double() - expected).norm()
            assert difference <= 0.1 * expected.norm() + 1e-4, f"{difference:.2g} of {expected.norm():.2g}"
