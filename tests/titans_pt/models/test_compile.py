"""Training's torch.compile: a block has no graph break on a GPU, and compiling does not change results."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.titans_pt.models.test_models import MODELS
from titans_pt.config import MemoryConfig, ModelConfig
from titans_pt.kernels import attention, memory
from titans_pt.kernels.attention import providers
from titans_pt.layers.documents import Documents
from titans_pt.models import build_model
from titans_pt.models.ways import whole_sequence
from titans_pt.tasks.next_token import NextTokenLoss

pytestmark = pytest.mark.thorough


def small(mixers, n_layers=None, d_model=64):
    config = ModelConfig(
        mixers=mixers, vocab_size=50, d_model=d_model, n_layers=n_layers or len(mixers), n_heads=2, mlp_hidden=24,
        window=32, segment=32, memory_tokens=16, persistent_tokens=3, memory=MemoryConfig(expansion=2),
    )  # fmt: skip
    torch.manual_seed(0)
    return build_model(config)


@pytest.fixture
def dynamo():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def models(*quick):
    """All of MODELS, marked slow unless named in ``quick``."""
    return [pytest.param(m, id=n, marks=[] if n in quick else pytest.mark.slow) for n, m in MODELS.items()]


def breaks(call, *arguments):
    """Reasons why torch.compile would leave the graph in ``call``."""
    found = torch._dynamo.explain(call)(*arguments)
    assert found.graph_count == len(found.break_reasons) + 1
    return found.break_reasons


@pytest.fixture
def on_a_gpu(dynamo, monkeypatch):
    """``on_a_gpu(mixers)``: a bf16 model of meta tensors, which follow the GPU path: the fused memory's
    operators and FlashAttention's."""
    monkeypatch.setattr(memory.dispatch, "GPU", ("cpu",))  # the dispatcher's choice is part of the graph
    monkeypatch.setattr(providers, "flash_serves", lambda q: True)
    monkeypatch.setattr(attention.dispatch, "flash_serves", lambda q: True)

    def made(mixers):
        model = small(mixers)
        for module in model.modules():
            for name, p in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(torch.empty(p.shape, dtype=torch.bfloat16)))
        return model

    with FakeTensorMode(allow_non_fake_inputs=True):
        yield made


@pytest.mark.parametrize("mixers", models("lmm", "mac", "mag", "mal", "attention", "swa"))
def test_no_graph_break_on_the_paths_of_a_gpu(mixers, on_a_gpu):
    model, ids = on_a_gpu(mixers), torch.empty(2, 97, dtype=torch.int64)
    assert breaks(lambda ids: model(ids, output_final_state=False)[0], ids) == []


@pytest.mark.parametrize("mixer", [
    "lmm", "attention", "swa", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mag", "mal")),
])  # fmt: skip
def test_no_graph_break_with_documents(mixer, on_a_gpu):
    block, x = on_a_gpu([mixer]).blocks[0], torch.empty(2, 97, 64, dtype=torch.bfloat16)
    documents = Documents._make(torch.zeros(2, 97, dtype=torch.bool), 8)
    assert breaks(whole_sequence, block, x, documents) == []


def test_mac_is_left_alone_where_documents_cut_it(dynamo, monkeypatch):
    """MAC's segments end where a document starts, therefore each batch would need another program."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    loss = NextTokenLoss(small(["swa", "mac"])).train()
    ids, reset = torch.randint(0, 50, (2, 66)), torch.zeros(2, 65, dtype=torch.bool)
    reset[0, 5] = reset[1, 40] = True
    expected = loss(ids, reset)
    loss.model.blocks.set_compiled(True)
    torch.testing.assert_close(loss(ids, reset), expected)
    assert counters["stats"]["unique_graphs"] == 1
    reset[:, 50:55] = True
    loss(ids, reset)
    assert counters["stats"]["unique_graphs"] == 1, "the same program serves other documents"


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("mixers", models("swa"))
def test_compiled_equals_eager(mixers, checkpointing, dynamo, monkeypatch):
    # Inductor would take minutes; the traced graph and its derivative are the same without it.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    loss = NextTokenLoss(small(mixers)).train()
    ids = torch.randint(0, 50, (2, 66), generator=torch.Generator().manual_seed(1))

    def gradients():
        value = loss(ids, None)
        return torch.autograd.grad(value, list(loss.parameters())), value

    eager, expected = gradients()
    loss.model.blocks.set_compiled(True)
    loss.model.blocks.set_activation_checkpointing(checkpointing)
    compiled, value = gradients()
    torch.testing.assert_close(value, expected)
    for a, b in zip(compiled, eager, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert counters["stats"]["unique_graphs"] > 0


def test_alike_blocks_share_their_code(dynamo, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    loss = NextTokenLoss(small(["swa"], n_layers=4)).train()
    loss.model.blocks.set_compiled(True)
    ids = torch.zeros(2, 66, dtype=torch.int64)
    for _ in range(2):
        loss(ids, None).backward()
    assert counters["stats"]["unique_graphs"] == 1
    loss.eval()(ids, None)
    loss.model(ids[:, :9])
    assert counters["stats"]["unique_graphs"] == 1, "only training's calls are compiled"


def test_every_length_is_compiled(dynamo, monkeypatch):
    """Lengths that grow in stages need a program each; PyTorch alone compiles eight and runs the rest uncompiled."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    model = small(["swa"]).train()
    model.blocks.set_compiled(True)
    for length in range(8, 18):
        model(torch.zeros(1, length, dtype=torch.int64), output_final_state=False)
    assert counters["stats"]["unique_graphs"] == 10


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mixers", MODELS.values(), ids=MODELS)
def test_on_a_gpu(mixers, dynamo):
    """bf16 gradients with Inductor's code around the fused kernels and FlashAttention are about as near to float64's as
    eager ones. The call runs twice: once to compile, once compiled. A gate's bias is a sum of terms that nearly cancel;
    its gradient is several per cent off in both."""
    loss = NextTokenLoss(small(mixers, d_model=128).to("cuda", torch.bfloat16)).train()
    ids = torch.randint(0, 50, (2, 131), device="cuda")

    def gradients(loss, ids):
        value = loss(ids, None)
        return [value, *torch.autograd.grad(value, list(loss.parameters()))]

    def distance(found, exact):
        return (found.cpu().double() - exact).norm()

    exact = gradients(deepcopy(loss).cpu().double(), ids.cpu())
    eager, _ = gradients(loss, ids), loss.model.blocks.set_compiled(True)
    for found in (gradients(loss, ids), gradients(loss, ids)):
        for a, b, c in zip(found, eager, exact, strict=True):
            assert distance(b, c) <= 0.15 * c.norm() + 1e-6
            assert distance(a, c) <= 3 * distance(b, c) + 5e-2 * c.norm() + 1e-6
