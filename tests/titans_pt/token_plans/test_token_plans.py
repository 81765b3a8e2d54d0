"""Generation's prepared fast path through a block: it is taken if it serves, and gives the ordinary path's results."""

import copy
import gc
import importlib
import threading
import weakref

import pytest
import torch

from tests.helpers.packed import Packed
from titans_pt.config import MemoryConfig, ModelConfig
from titans_pt.huggingface.modeling import MODELING
from titans_pt.huggingface.source import source_files
from titans_pt.kernels.one_token import unserved
from titans_pt.layers.mlp import SwiGLU
from titans_pt.layers.norm import RMSNorm
from titans_pt.layers.state import map_tensors, take_rows
from titans_pt.models import build_model
from titans_pt.models.backbone import Block
from titans_pt.models.mixers.lmm import LMM
from titans_pt.streaming import greedy
from titans_pt.token_plans import plan as token_plan
from titans_pt.token_plans import plans, put_on
from titans_pt.token_plans.lmm import lmm_plan
from titans_pt.token_plans.mixers import planner_of

if reason := unserved(torch.zeros(1)):
    pytest.skip(f"no C: {reason}", allow_module_level=True)

SHARED = {"kv_heads": 1, "bias": True, "qk_norm": True, "rope_scaling": {"kind": "linear", "factor": 2.0}}
FORMS = {
    "attention": ("attention", {}, {}),
    "swa": ("swa", {}, {}),
    "attention-shared": ("attention", {"attention": SHARED}, {}),
    "swa-wide": ("swa", {"attention": SHARED | {"head_width": 6}}, {}),
    "mag-shared": ("mag", {"attention": SHARED | {"sinks": 3}}, {}),
    "swa-sinks": ("swa", {"attention": {"sinks": 3}}, {}),
    "mal-wide": ("mal", {"attention": SHARED | {"head_width": 6}}, {}),
    "mac-shared": ("mac", {"mac": {"segment": 8, "memory_tokens": 4}, "attention": SHARED}, {}),
    "lmm": ("lmm", {}, {}),
    "mag": ("mag", {}, {}),
    "mab": ("mab", {"attention": SHARED | {"sinks": 2}}, {}),
    "mab-wide": ("mab", {"attention": {"head_width": 12}}, {"depth": 1}),
    "mab-as-converted": ("mab", {"conv_width": 1}, {"depth": 1, "norm": False, "residual": False}),
    "mal": ("mal", {}, {}),
    "mac": ("mac", {"mac": {"segment": 8, "memory_tokens": 4}}, {}),
    "rmt": ("rmt", {"rmt": {"segment": 8, "memory_tokens": 2}}, {}),
    "lmm-silu-hard-deep": ("lmm", {"lmm": {"output_gate": "silu"}}, {"gates": "hard", "depth": 3, "alpha_init": 0.2}),
    "lmm-deep-long-values": ("lmm", {"init_std": 0.5}, {"depth": 4, "per_layer_gates": True}),
    "lmm-zero-free-plain": ("lmm", {"conv_width": 1}, {"forget_to": "zero", "theta": "free", "per_layer_gates": True}),
    "mag-bare": ("mag", {"persistent_tokens": 0}, {"norm": False, "residual": False, "activation": "silu"}),
    "mal-paper": ("mal", {"mal": {"residual": False}}, {"depth": 1, "activation": "relu"}),
    "mac-paper": ("mac", {"mac": {"segment": 8, "memory_tokens": 8, "write": "attention"}, "persistent_tokens": 0}, {}),
    "lmm-frozen": ("lmm", {}, {"writes": False, "n_heads": 4}),
}
T = 29


def small(mixer, settings=(), memory=(), seed=0, layers=2):
    config = ModelConfig(
        **{"mixers": [mixer], "vocab_size": 50, "d_model": 16, "n_layers": layers, "n_heads": 2, "mlp_hidden": 24,
           "window": 6, "persistent_tokens": 3} | dict(settings),
        memory=MemoryConfig(**{"chunk_size": 4, "expansion": 2} | dict(memory)),
    )  # fmt: skip
    torch.manual_seed(seed)
    model = build_model(config).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    put_on(model)
    return model


def ids(rows=2, seed=0):
    return torch.randint(0, 50, (rows, T), generator=torch.Generator().manual_seed(seed))


def token_by_token(model, begin=5, rows=2):
    """Logits of the tokens from ``begin`` on, each read in a separate call, and the last state."""
    tokens = ids(rows)
    _, state = model(tokens[:, :begin])
    made = []
    for t in range(begin, T):
        logits, state = model(tokens[:, t : t + 1], state)
        made.append(logits)
    return torch.cat(made, 1), state


@pytest.fixture
def taken(monkeypatch):
    """List of single-token calls of a block's halves: (name of the half, whether a plan served it)."""
    calls, ordinary = [], token_plan.through_plan

    def watched(owner, parts, make, x, state):
        found = ordinary(owner, parts, make, x, state)
        if x.shape[1] == 1:
            calls.append((make.__name__, found is not None))
        return found

    monkeypatch.setattr("titans_pt.token_plans.block.through_plan", watched)
    return calls


@torch.no_grad()
@pytest.mark.parametrize("form", FORMS)
def test_it_is_the_ordinary_way(form, taken):
    model = small(*FORMS[form])
    ours, end = token_by_token(model)
    alone = T - 5 - 6 * (form == "rmt")  # a segment's first and last token come with memory tokens
    assert len(taken) == 2 * 2 * alone and all(served for _, served in taken)
    for block in model.blocks:
        block.mixer.register_forward_hook(lambda *_: None)
        block.mlp.register_forward_hook(lambda *_: None)
    taken.clear()
    theirs, expected = token_by_token(model)
    assert taken and not any(served for _, served in taken)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)
    torch.testing.assert_close(ours, model(ids())[0][:, 5:], rtol=0, atol=1e-9)
    a, b = [], []
    map_tensors(end, a.append)
    map_tensors(expected, b.append)
    assert len(a) == len(b) > 0
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-11)


@torch.no_grad()
def test_rows_at_different_places(taken):
    """A document begins inside one row's prompt: the rows' chunks begin at different tokens, and their windows have
    different lengths. If attention must mask keys, or segments differ, the ordinary path is taken."""
    for name, halves in (("lmm", {True}), ("mag", {False}), ("mac", {False})):
        model, reset = small(*FORMS[name]), torch.zeros(2, T, dtype=torch.bool)
        reset[1, 3] = True
        whole, _ = model(ids(), reset=reset)
        _, state = model(ids()[:, :5], reset=reset[:, :5])
        taken.clear()
        for t in range(5, T):
            logits, state = model(ids()[:, t : t + 1], state)
            torch.testing.assert_close(logits[:, 0], whole[:, t], rtol=0, atol=1e-9)
        assert {served for half, served in taken[:4] if half == "mixing_plan"} == halves


@torch.no_grad()
@pytest.mark.parametrize("name", ["lmm", "mag", "mac", "swa"])
@pytest.mark.parametrize("row", [0, 1])
def test_a_row_taken_from_rows_at_different_places(name, row):
    """The row continues as in the batch, without anything that only the other rows saw."""
    model, reset = small(*FORMS[name]), torch.zeros(2, T, dtype=torch.bool)
    reset[1, 3] = True
    whole, _ = model(ids(), reset=reset)
    _, state = model(ids()[:, :5], reset=reset[:, :5])
    state = take_rows(state, torch.tensor([row]))
    for t in range(5, T):
        logits, state = model(ids()[row : row + 1, t : t + 1], state)
        torch.testing.assert_close(logits[0, 0], whole[row, t], rtol=0, atol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("name", ["lmm", "mac"])
def test_a_state_is_left_as_it_is(name):
    model = small(*FORMS[name])
    _, state = model(ids()[:, :9])
    for t in range(9, 14):
        kept = copy.deepcopy(state)
        first, after = model(ids()[:, t : t + 1], state)
        second, _ = model(ids()[:, t : t + 1], state)
        assert torch.equal(first, second)
        before, now = [], []
        map_tensors(kept, before.append)
        map_tensors(state, now.append)
        assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True))
        state = after


@torch.no_grad()
def test_it_follows_the_weights(taken):
    """Weights are changed in place, by .data, by another Parameter and by a copy of the model."""
    model, other = small(*FORMS["mac"]), small(*FORMS["mac"], seed=1)
    token_by_token(model)
    expected, _ = token_by_token(other)
    twin = copy.deepcopy(model)
    model.load_state_dict(other.state_dict())
    assert torch.equal(token_by_token(model)[0], expected)
    twin.load_state_dict(copy.deepcopy(other.state_dict()), assign=True)
    assert torch.equal(token_by_token(twin)[0], expected)
    third = small(*FORMS["mac"])
    token_by_token(third)
    for p, q in zip(third.parameters(), other.parameters(), strict=True):
        p.data = q.data.clone()
    assert torch.equal(token_by_token(third)[0], expected)
    fourth = small(*FORMS["mac"])
    token_by_token(fourth)
    fourth.blocks = other.blocks
    fourth.embedding, fourth.norm, fourth.head = other.embedding, other.norm, other.head
    assert torch.equal(token_by_token(fourth)[0], expected)
    assert all(served for _, served in taken)


@torch.no_grad()
def test_in_and_out_of_inference_mode():
    model = small(*FORMS["mag"])
    with torch.inference_mode():
        first, _ = token_by_token(model)
    assert torch.equal(token_by_token(model)[0], first)


def test_threads_share_a_model():
    model, found = small(*FORMS["mac"]), {}
    with torch.no_grad():
        expected, _ = token_by_token(model)

    def work(place):
        with torch.no_grad():
            found[place] = [torch.equal(token_by_token(model)[0], expected) for _ in range(3)]

    threads = [threading.Thread(target=work, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {place: [True] * 3 for place in range(4)}


class Louder(LMM):
    """A mixer whose forward pass differs from the plan that it inherits."""

    def forward(self, x, state=None, documents=None):
        y, state = super().forward(x, state, documents)
        return 2 * y, state


class Wider(RMSNorm):
    pass


class Plain(torch.nn.Module):
    """A module that flips the sign of the values."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x, state=None, documents=None):
        y, state = self.inner(x, state, documents)
        return -y, state


@torch.no_grad()
@pytest.mark.parametrize(
    "change", ["mixer", "norm", "linear", "bias", "mlp", "projection", "forward", "adapter", "layout", "kind"]
)
def test_what_stands_in_another_place_is_not_passed_by(change, taken):
    model = small(*FORMS["lmm"], layers=1)
    token_by_token(model)
    block = model.blocks[0]
    if change == "mixer":
        louder = Louder(model.config).double()
        louder.load_state_dict(block.mixer.state_dict())
        block.mixer = louder
    elif change == "norm":
        block.mixer_norm = Wider(16, eps=1e-5).double()
    elif change == "linear":
        block.mixer.out = torch.nn.Sequential(block.mixer.out, torch.nn.Tanh())
    elif change == "bias":
        block.mixer.out = torch.nn.Linear(16, 16).double()
    elif change == "projection":
        block.mixer.memory.v = Plain(block.mixer.memory.v)
    elif change == "forward":
        block.mixer.out.forward = lambda x: torch.tanh(x)
    elif change == "adapter":
        torch.nn.utils.parametrizations.weight_norm(block.mixer.gate)
        block.mixer.gate.parametrizations.weight.original0.data *= 2
    elif change == "layout":
        block.mixer.memory.q.conv.weight.data = block.mixer.memory.q.conv.weight.data.t().contiguous().t()
    elif change == "kind":
        block.mixer.out.weight = torch.nn.Parameter(Packed(block.mixer.out.weight.detach()), requires_grad=False)
    else:
        block.mlp = type("Own", (SwiGLU,), {"forward": lambda self, x: self.down(self.up(x))})(16, 24).double()
    taken.clear()
    ours, _ = token_by_token(model)
    torch.testing.assert_close(ours, model(ids())[0][:, 5:], rtol=0, atol=1e-9)
    half = "feeding_plan" if change == "mlp" else "mixing_plan"
    assert {served for name, served in taken if name == half} == {False}
    assert {served for name, served in taken if name != half} == {True}


@torch.no_grad()
def test_large_halves_are_left_to_pytorchs_threads(monkeypatch, taken):
    model, threads = small(*FORMS["lmm"]), torch.get_num_threads()
    expected = model(ids())[0][:, 5:]
    few = sum(p.numel() for p in model.blocks[0].mlp.parameters()) + 16  # 16 of the norm
    monkeypatch.setattr(token_plan, "MOST_FOR_ONE_THREAD", 2 * few)
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            taken.clear()
            torch.testing.assert_close(token_by_token(model)[0], expected, rtol=0, atol=1e-9)
            assert {served for half, served in taken if half == "mixing_plan"} == {count == 1}
            assert {served for half, served in taken if half == "feeding_plan"} == {True}
    finally:
        torch.set_num_threads(threads)


@torch.no_grad()
def test_a_foreign_state_is_the_ordinary_ways_error(taken):
    """C would read invalid memory."""
    for name in ("lmm", "mac", "swa"):
        model, other = small(*FORMS[name]), small(name, dict(FORMS[name][1]) | {"d_model": 32})
        _, state = other(ids()[:, :5])
        with pytest.raises((RuntimeError, ValueError)):
            model(ids()[:, 5:6], state)
    assert not any(served for half, served in taken if half == "mixing_plan")


@torch.no_grad()
def test_a_state_of_longer_chunks_is_the_ordinary_ways_error(taken):
    model, other = small("lmm"), small("lmm", memory={"chunk_size": 64})
    _, state = other(ids()[:, :5])
    with pytest.raises(ValueError, match="initial_state has read 5 tokens of a chunk, chunk_size is 4"):
        model(ids()[:, 5:6], state)


def test_training_and_many_rows_go_the_ordinary_way(taken):
    model = small(*FORMS["lmm"])
    _, state = model(ids()[:, :5])
    logits, _ = model(ids()[:, 5:6], state)
    logits.sum().backward()
    with torch.no_grad():
        token_by_token(model, rows=token_plan.MOST_ROWS + 1)
    assert taken and not any(served for _, served in taken)


@torch.no_grad()
def test_plans_go_with_their_model():
    gc.collect()
    before = len(token_plan._plans)
    model = small(*FORMS["mac"])
    token_by_token(model)
    gone = weakref.ref(model.blocks[0])
    assert len(token_plan._plans) == before + 2
    del model
    gc.collect()
    assert gone() is None and len(token_plan._plans) == before


@torch.no_grad()
def test_who_generates_puts_them_on(taken):
    model = small(*FORMS["lmm"])
    for block in model.blocks:
        block.__class__ = Block
    expected, _ = token_by_token(model)
    assert taken == []
    logits, state = model(ids()[:1, :5], last_only=True)
    tokens = list(greedy(model, logits[:, -1], state, 4))
    assert len(tokens) == 4 and len(taken) == 3 * 2 * 2 and all(served for _, served in taken)
    torch.testing.assert_close(token_by_token(model)[0], expected, rtol=0, atol=1e-11)


@torch.no_grad()
def test_a_mixer_from_elsewhere_brings_its_own(taken):
    """A plan is found by the mixer's class, and by derived classes with the same forward pass."""

    class Strange(LMM):
        name = "strange"

        def forward(self, x, state=None, documents=None):
            return super().forward(x, state, documents)

    model = small(*FORMS["lmm"], layers=1)
    model.blocks[0].mixer = Strange(model.config).double()
    expected, _ = token_by_token(model)
    assert {served for half, served in taken if half == "mixing_plan"} == {False}
    assert planner_of(Strange) is None
    planner = plans(Strange)(lambda mixer, x, term: lmm_plan(mixer, x, term))
    assert planner_of(type("Derived", (Strange,), {})) is planner
    model.blocks[0].mixer = copy.deepcopy(model.blocks[0].mixer)  # another module: its plan is looked up again
    taken.clear()
    torch.testing.assert_close(token_by_token(model)[0], expected, rtol=0, atol=1e-11)
    assert {served for _, served in taken} == {True}


@torch.no_grad()
@pytest.mark.parametrize(("mixer", "others"), [("mac", {"lmm", "mal"}), ("swa", {"memory", "mac"})])
def test_exported_files_have_the_plans_of_their_mixers(mixer, others, tmp_path, monkeypatch):
    """Exported files have no other mixers' plans, and the plans serve there as they do here."""
    files = source_files(small(*FORMS[mixer]).config)
    plan = {"mac": "mac", "swa": "attention"}[mixer]
    assert f"titans_pt_token_plans_{plan}.py" in files
    assert not {f"titans_pt_token_plans_{other}.py" for other in others} & files.keys()
    folder = tmp_path / f"exported_{mixer}"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    carried = importlib.import_module(f"{folder.name}.{MODELING}")
    model, served = small(*FORMS[mixer]), []
    theirs = carried.build_model(carried.ModelConfig(**model.config.model_dump())).double().eval()
    theirs.load_state_dict(model.state_dict())
    carried.put_on(theirs)
    blocks = importlib.import_module(f"{folder.name}.titans_pt_token_plans_block")
    ordinary = blocks.through_plan
    monkeypatch.setattr(blocks, "through_plan", lambda *given: served.append(ordinary(*given)) or served[-1])
    torch.testing.assert_close(token_by_token(theirs)[0], token_by_token(model)[0], rtol=0, atol=1e-11)
    alone = served[2:]  # without the prompt's calls
    assert len(alone) == 2 * 2 * (T - 5) and all(found is not None for found in alone)


@torch.no_grad()
def test_hooks_of_all_modules_are_called(taken):
    """torch.nn.modules.module.register_module_forward_hook does not put its hook on the modules."""
    model = small(*FORMS["lmm"])
    expected, _ = token_by_token(model)
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, given, y: 2 * y if isinstance(module, torch.nn.Linear) else None
    )
    try:
        taken.clear()
        changed, _ = token_by_token(model)
        torch.testing.assert_close(changed, model(ids())[0][:, 5:], rtol=0, atol=1e-9)
    finally:
        handle.remove()
    assert taken and not any(served for _, served in taken) and not torch.allclose(changed, expected)
