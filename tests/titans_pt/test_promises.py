"""``titans check``: built-in mixers and rules keep every promise, and mixers that break one are found out."""

from pathlib import Path

import pytest
import torch
from torch import nn

from titans_pt import cli
from titans_pt.config import MemoryConfig, ModelConfig
from titans_pt.inspection.promises import LEAST, enough, promises
from titans_pt.kernels.memory.rules import RULES
from titans_pt.kernels.memory.rules.yaad import Yaad
from titans_pt.layers.flops import product
from titans_pt.models.mixers.base import MIXERS, Mixer

HERE = ".".join(Path(__file__).with_suffix("").parts[-3:])  # tests.titans_pt.test_promises
SIZE = {"vocab_size": 50, "d_model": 16, "n_heads": 2, "mlp_hidden": 24, "window": 6, "persistent_tokens": 2,
        "n_layers": 2}  # fmt: skip
OWN = {
    "mac": {"mac": {"segment": 8, "memory_tokens": 4}}, "rmt": {"rmt": {"segment": 8, "memory_tokens": 2}},
    "mamba2": {"mamba2": {"head_width": 8}}, "retnet": {"retnet": {"head_width": 8}},
    "ttt_linear": {"ttt_linear": {"head_width": 8}}, "ttt_mlp": {"ttt_mlp": {"head_width": 8}},
    "linear_attention": {"linear_attention": {"head_width": 8}},
}  # fmt: skip
PROMISES = (
    "no token sees", "a row sees", "a sequence that is cut", "rows of a state", "a document", "every parameter",
    "inputs in bf16", "its FLOPs",
)  # fmt: skip


class Broken(Mixer):
    """out(x_t + what breaks a promise)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.out = nn.Linear(config.d_model, config.d_model)

    def flops(self, length):
        return 2 * product(self.out.in_features, self.out.out_features)


@MIXERS.register
class Future(Broken):
    """The mean of the whole sequence."""

    name = "future"

    def forward(self, x, state=None, documents=None):
        return self.out(x + x.mean(1, keepdim=True)), state


@MIXERS.register
class Crowd(Broken):
    """The mean of all rows."""

    name = "crowd"

    def forward(self, x, state=None, documents=None):
        return self.out(x + x.mean(0, keepdim=True)), torch.zeros(len(x))


@MIXERS.register
class Sum(Broken):
    """The sum of all tokens, also of earlier documents; a cut forgets it."""

    name = "sum"

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.unused = nn.Parameter(torch.zeros(3))

    def forward(self, x, state=None, documents=None):
        return self.out(x.cumsum(1)), None


@MIXERS.register
class Infinite(Broken):
    """Outputs that are not finite."""

    name = "infinite"

    def forward(self, x, state=None, documents=None):
        return self.out(x / 0), None


@MIXERS.register
class Plain(Broken):
    """Outputs in fp32, and FLOPs that nobody counted."""

    name = "plain"
    flops = Mixer.flops

    def forward(self, x, state=None, documents=None):
        return self.out(x).to(torch.promote_types(x.dtype, torch.float32)), torch.zeros(len(x))


@RULES.register
class WrongFormula(Yaad):
    """The gradient's formula is that of a loss half as large."""

    name = "wrong_formula"
    compiled_loss = None

    def gradient(self, error, v, own):
        return super().gradient(error, v, own) / 2


def outcomes(mixer, tokens=29, **changes):
    memory = {"chunk_size": 4, "expansion": 2} | changes.pop("memory", {})
    config = ModelConfig(mixers=[mixer], memory=MemoryConfig(**memory), **SIZE, **OWN.get(mixer, {}), **changes)
    return list(promises(config, tokens))


@pytest.mark.parametrize("mixer", MIXERS.built_in())
def test_built_in_mixers_keep_all(mixer):
    found = outcomes(mixer)
    assert [promise.text.startswith(text) for promise, text in zip(found[:8], PROMISES, strict=True)] == [True] * 8
    assert len(found) == 8 + (mixer in ("lmm", "mac", "mag", "mal", "mab"))
    assert all(promise.kept for promise in found), [promise.line() for promise in found if not promise.kept]


@pytest.mark.parametrize("rule", RULES.built_in())
def test_built_in_rules_keep_all(rule):
    found = outcomes("lmm", memory={"rule": rule})
    assert all(promise.kept for promise in found), [promise.line() for promise in found if not promise.kept]


BREAKS = {
    "future": {0, 2, 3, 4},  # a cut changes which tokens are there
    "crowd": {1, 3, 4},  # documents are compared with rows that are alone
    "sum": {2, 3, 4, 5},
    "infinite": {0, 1, 2, 3, 4, 5, 6},
    "plain": {6, 7},
}


@pytest.mark.parametrize("mixer", BREAKS)
def test_what_breaks_a_promise_is_found(mixer):
    found = outcomes(mixer)
    assert {n for n, promise in enumerate(found) if not promise.kept} == BREAKS[mixer]
    assert ("unused" in found[5].line()) == (mixer == "sum")


def test_a_wrong_formula_of_a_rule_is_found():
    *others, definition = outcomes("lmm", memory={"rule": "wrong_formula"})
    assert all(promise.kept for promise in others)
    assert not definition.kept and 0.01 < definition.difference < 10 and "its definition" in definition.text


def test_two_tokens_are_enough():
    assert all(promise.kept for promise in outcomes("swa", tokens=2))


def test_tokens_pass_windows_and_segments():
    sizes = SIZE | {"window": 500}
    assert enough(ModelConfig(mixers=["lmm"], **sizes)) == LEAST
    assert enough(ModelConfig(mixers=["swa"], **sizes)) > 500
    assert enough(ModelConfig(mixers=["mac"], mac={"segment": 400}, **sizes)) == 801


def test_the_command(tiny, capsys):
    words = [str(tiny()), f"run.imports=[{HERE}]", "model.n_layers=2"]
    assert cli.run(["check", *words, "model.mixers=[swa,lmm]", "--tokens", "9"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 19
    assert lines[:18:9] == ["swa: 2 blocks, 9 tokens", "lmm: 2 blocks, 9 tokens, memory rule titans"]
    assert cli.run(["check", *words, "model.mixers=[swa,crowd]", "--tokens", "9"]) == 2
    out, err = capsys.readouterr()
    assert "BROKEN  a row sees no other row" in out
    assert "model.mixers=['swa', 'crowd']: 3 promises are broken; mend the mixer or rule" in err
