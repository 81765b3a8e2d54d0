"""A model split over tensor ranks is the same model: outputs, loss and every gradient, in float64.

The ranks are threads of this process. Only the collectives of torch.distributed are imitated; all else is real.
"""

import re
import threading
from copy import deepcopy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from titans_pt.config import MemoryConfig, ModelConfig
from titans_pt.errors import UserError
from titans_pt.models import build_model
from titans_pt.parallel import RankGroup, TensorParallel
from titans_pt.parallel.exchange import Exchanges
from titans_pt.parallel.layers import split_norm, vocabulary_cross_entropy
from titans_pt.tasks.next_token import NextTokenLoss

MODELS = {
    "lmm": ["lmm"], "mac": ["mac"], "mag": ["mag"], "mal": ["mal"], "attention": ["attention"],
    "hybrid": ["lmm", "swa", "mac"],
}  # fmt: skip
T = 24


class ThreadGroup(RankGroup):
    """A rank in a thread; ``shared`` is (a list with one entry per rank, a barrier)."""

    def __init__(self, rank, size, shared):
        super().__init__(rank, size)
        self.places, self.barrier = shared

    def _all(self, x):
        self.places[self.rank] = x.detach().clone()
        self.barrier.wait()
        found = list(self.places)
        self.barrier.wait()
        return found

    def all_reduce(self, x, op=dist.ReduceOp.SUM):
        stack = torch.stack(self._all(x))
        return stack.amax(0) if op == dist.ReduceOp.MAX else stack.sum(0)

    def all_gather(self, x, dim):
        return torch.cat(self._all(x), dim)

    def reduce_scatter(self, x, dim):
        assert x.shape[dim] % self.size == 0, "the real exchange needs equal parts"
        return self.part(self.all_reduce(x), dim).contiguous()


def on_ranks(size, work):
    """Return [work(group) for every rank], or raise the first exception of any rank."""
    shared, results, errors = ([None] * size, threading.Barrier(size, timeout=60)), [None] * size, []

    def rank(n):
        try:
            results[n] = work(ThreadGroup(n, size, shared))
        except BaseException as error:
            errors.append(error)
            shared[1].abort()

    threads = [threading.Thread(target=rank, args=(n,)) for n in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return results


def config(mixers, **changes):
    memory = MemoryConfig(**{"chunk_size": 4, "expansion": 2} | changes.pop("memory", {}))
    settings = dict(
        mixers=mixers, vocab_size=52, d_model=32, n_layers=len(mixers), n_heads=4, mlp_hidden=24, window=6, segment=8,
        memory_tokens=4, persistent_tokens=3, memory=memory,
    )  # fmt: skip
    return ModelConfig(**settings | changes)


@pytest.fixture(autouse=True)
def built_one_by_one(monkeypatch):
    """Build each model under a lock, from the same seed: threads share torch's generator."""
    lock = threading.Lock()

    def build(settings):
        with lock:
            torch.manual_seed(0)
            model = build_model(settings).double()
            with torch.no_grad():  # move gates and norms away from their symmetric start
                for p in model.parameters():
                    p.add_(0.05 * torch.randn_like(p))
            return model

    monkeypatch.setitem(globals(), "build", build)


class Fp64Loss(NextTokenLoss):
    """The loss without the conversion to fp32."""

    def forward(self, ids, reset):
        logits, _ = self.model(ids[:, :-1], reset=reset)
        targets, tokens = ids[:, 1:].flatten(), self.model.tokens
        return self.cross_entropy(logits.flatten(0, 1), targets, z_loss=self.z_loss, tokens=tokens)


def batch(vocabulary, reset):
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, vocabulary, (2, T + 1), generator=draw)
    starts = torch.zeros(2, T, dtype=torch.bool)
    starts[0, 5] = starts[1, 14] = True
    return ids, starts if reset else None


def check(settings, size=2, sequence=False, reset=False, checkpointing=False, z_loss=0.0):
    ids, starts = batch(settings.vocab_size, reset)
    whole = build(settings)  # noqa: F821 - the fixture's
    expected = Fp64Loss(whole, z_loss=z_loss)(ids, starts)
    expected.backward()
    gradients = {name: p.grad for name, p in whole.named_parameters()}

    def rank(group):
        model = build(settings).train()  # noqa: F821
        model.blocks.set_activation_checkpointing(checkpointing)
        split = TensorParallel(model, group, sequence)
        loss = Fp64Loss(model, partial(vocabulary_cross_entropy, group=group), z_loss)(ids, starts)
        loss.backward()
        found = {name: split.whole(name, p.grad) for name, p in model.named_parameters()}
        return loss.detach(), found, {name: p.shape for name, p in model.named_parameters()}

    results = on_ranks(size, rank)
    for loss, found, _ in results:
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-10, atol=0)
        assert found.keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert gradient.abs().max() > 0, name
            difference = (found[name] - gradient).abs().max() / gradient.abs().max()
            assert difference < 1e-8, f"{name}: {difference}"
    return results[0][2]


@pytest.mark.parametrize("sequence", [False, True], ids=["", "sequence"])
@pytest.mark.parametrize("mixers", MODELS.values(), ids=MODELS)
def test_every_gradient_is_that_of_the_whole_model(mixers, sequence):
    check(config(mixers), sequence=sequence)


@pytest.mark.parametrize("mixers", [["mac", "mag"], ["mal", "lmm"]], ids=str)
def test_four_ranks_documents_and_checkpointing(mixers):
    check(config(mixers, tie_embeddings=False), size=4, sequence=True, reset=True, checkpointing=True)


@pytest.mark.parametrize("mixers", [["attention", "mag"], ["mac"], ["mal", "swa"], ["liza"]], ids=str)
def test_shared_heads_and_biases(mixers):
    """Four query heads share two key heads: each of two ranks has one key head. Their norms' weights are shared."""
    attention = {"kv_heads": 2, "bias": True, "qk_norm": True, "sinks": 2}
    attention |= {"head_width": 10} if "mal" in mixers else {}
    shapes = check(config(mixers, attention=attention, liza={"cross_gate": True}), sequence="liza" in mixers)
    assert shapes["blocks.0.mixer.attention.k.weight"] == (attention.get("head_width", 8), 32)


@pytest.mark.parametrize("width", [8, 10])
def test_a_memory_beside_attention(width):
    linear = {"depth": 1, "norm": False, "residual": False}
    attention = {"kv_heads": 2, "bias": True, "sinks": 2, "head_width": width}
    shapes = check(config(["mab"], attention=attention, memory=linear))
    assert shapes["blocks.0.mixer.memory.k.linear.bias"] == (2 * width,)


@pytest.mark.parametrize("mixers", [["mab"], ["mac", "mag"], ["mal", "lmm"]], ids=str)
def test_adapters(mixers):
    """A layer split along its outputs has a split B; a layer split along its inputs, a split A."""
    lora = {"rank": 3, "layers": ["*.mixer.*", "*.mlp.*"]}
    shapes = check(config(mixers, lora=lora, attention={"kv_heads": 2, "bias": True}), sequence=True)
    mlp = {
        name: tuple(shapes[f"blocks.0.mlp.{name}"]) for name in ("up.lora_a", "up.lora_b", "down.lora_a", "down.lora_b")
    }
    assert mlp == {"up.lora_a": (3, 32), "up.lora_b": (12, 3), "down.lora_a": (3, 12), "down.lora_b": (32, 3)}


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("vocabulary", [
    {"vocab_multiple": 1, "vocab_size": 53}, {"vocab_multiple": 1, "vocab_size": 5}, {"vocab_multiple": 64},
    {"vocab_multiple": 3, "vocab_size": 10},
], ids=str)  # fmt: skip
def test_a_vocabulary_that_the_ranks_do_not_divide(vocabulary, tie):
    """With 5 rows on 4 ranks, the last rank has no row."""
    check(config(["swa"], tie_embeddings=tie, **vocabulary), size=4, z_loss=0.1)


@pytest.mark.parametrize("size", [2, 4])
def test_the_z_losss_gradient(size):
    check(config(["attention"]), size=size, z_loss=0.1)


@pytest.mark.parametrize("memory", [
    {"depth": 1, "norm": False, "residual": False}, {"depth": 3, "per_layer_gates": True}, {"n_heads": 2},
    {"alpha": "channel", "alpha_rank": 3},
], ids=str)  # fmt: skip
def test_kinds_of_memory(memory):
    check(config(["mag", "mac"], memory=memory))


@pytest.mark.parametrize("norm", [
    lambda: nn.RMSNorm(8), lambda: nn.RMSNorm(8, eps=0.1, elementwise_affine=False),
    lambda: nn.LayerNorm(8), lambda: nn.LayerNorm(8, bias=False), lambda: nn.LayerNorm(8, elementwise_affine=False),
])  # fmt: skip
def test_norms_of_all_heads_in_every_form(norm):
    """Mixers outside this repository may declare a norm without an eps, a weight or a bias."""
    whole, x = norm().double(), torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for p in whole.parameters():
        nn.init.normal_(p)

    def on_rank(group):
        part = deepcopy(whole)
        for p in part.parameters():
            p.data = group.part(p.data, 0)
        return split_norm(part, Exchanges(group))(group.part(x, -1))

    torch.testing.assert_close(torch.cat(on_ranks(2, on_rank), -1), whole(x))


@pytest.mark.parametrize("exchange", ["close", "reduce_close"])
def test_steps_that_ranks_cannot_share_are_refused(exchange):
    """PyTorch cuts six steps into three parts, not four: rows of one rank would become steps of another."""
    exchanges = Exchanges(RankGroup(0, 4), sequence=True)
    with pytest.raises(UserError, match="parallel.sequence: the 6 steps of a sequence do not divide among parallel.te"):
        getattr(exchanges, exchange)(torch.zeros(4, 6, 2))


def test_a_mixer_that_does_not_say_how_it_is_cut_is_refused(monkeypatch):
    settings = config(["lmm"])
    monkeypatch.setattr(type(build(settings).blocks[0].mixer), "sharding", None)  # noqa: F821
    with pytest.raises(UserError, match="parallel.tensor: the mixer 'lmm' does not say how .*; set parallel.tensor=1"):
        TensorParallel(build(settings), RankGroup(0, 2), False)  # noqa: F821


def test_nothing_of_a_head_is_left_whole():
    """The parts that stay whole on every rank are known by name; all others have half their size."""
    for mixers in MODELS.values():
        shapes = check(config(mixers))
        whole = {name: p.shape for name, p in build(config(mixers)).named_parameters()}  # noqa: F821
        kept = {re.sub(r"^blocks\.\d+\.", "", name) for name in shapes if shapes[name] == whole[name]}
        assert kept <= {
            "norm.weight", "mixer_norm.weight", "mlp_norm.weight", "mixer.persistent", "mixer.norm.weight",
            "mixer.write", "mixer.memory.output_norm.weight", "mixer.gate.norm_a.weight",
        }  # fmt: skip
        assert all(2 * shapes[n].numel() == whole[n].numel() for n in shapes if shapes[n] != whole[n])
