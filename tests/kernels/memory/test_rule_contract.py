"""A memory rule is one file: the rules defined here do all that built-in rules do, without changes elsewhere."""

from pathlib import Path
from typing import Annotated

import pytest
import torch
from pydantic import Field

from tests.helpers.processes import curve, run_jobs
from tests.kernels.memory.calls import TOLERANCE, assert_same, make
from titans_pt import cli
from titans_pt.config import MemoryConfig, ModelConfig, Section
from titans_pt.config.files import load_config
from titans_pt.errors import UserError
from titans_pt.kernels.memory import NetworkShape, memory_trace, neural_memory
from titans_pt.kernels.memory.rules import RULES, TITANS, OwnGate, Rule
from titans_pt.kernels.memory.rules.omega import Omega
from titans_pt.kernels.memory.rules.titans import Titans
from titans_pt.kernels.memory.rules.yaad import Yaad
from titans_pt.layers.memory import NeuralMemory
from titans_pt.models import build_model
from titans_pt.runs.loaded import load_run
from titans_pt.runs.states import load_state, save_state
from titans_pt.tasks import task_of
from titans_pt.training.plan import make_plan

HERE = ".".join(Path(__file__).with_suffix("").parts[-4:])  # tests.kernels.memory.test_rule_contract
T = 23


@RULES.register
class PseudoHuber(Rule):
    """2 d^2 (sqrt(1 + ||e||^2 / d^2) - 1): ||e||^2 for small errors, 2 d ||e|| for large ones; d is read off the token.

    The class adds a loss and a gate; all the rest is inherited.
    """

    name = "pseudo_huber"
    gates = {"threshold": OwnGate(start=1.0)}
    step = 2.0

    class Settings(Section):
        scale: Annotated[float, Field(gt=0.0)] = 1.0
        """Factor of the threshold."""

    def loss(self, error, v, own):
        d = self.settings.scale * own[0].squeeze(-1)
        return 2 * d.square() * (torch.sqrt(1 + error.square().sum(-1) / d.square()) - 1)


@RULES.register
class Aligned(Rule):
    """-2 <M(k), v>: a loss without curvature that needs more than the error, and a step equal to the momentum's change.

    M_t = (1 - alpha_t) M_{t-1} + S_t - eta_t S_{t-1}: an update of its own, as a step and as coefficients.
    """

    name = "aligned"

    def loss(self, error, v, own):
        return -2 * ((v + error) * v).sum(-1)

    def update(self, weights, momentum, gradient, theta, eta, alpha, own):
        step = theta * gradient
        return (1 - alpha) * weights - step, eta * momentum - step

    def coefficients(self, theta, eta, alpha, own, valid):
        keep = 1 - alpha
        if valid is not None:
            theta, eta, keep = (torch.where(valid, g, float(fill)) for g, fill in ((theta, 0), (eta, 1), (keep, 1)))
        decay, momentum = ((torch.cumsum(g.log(), -1)) for g in (keep, eta))  # its gates are never 0 in these tests
        below = torch.ones(theta.shape[-1], theta.shape[-1], dtype=torch.bool).tril()
        mix = torch.where(below, torch.exp(decay.unsqueeze(-1) - decay.unsqueeze(-2)), 0.0) * theta.unsqueeze(-2)
        e = torch.exp(momentum[..., -1:] - momentum) * theta
        A = decay.exp().unsqueeze(-1)
        return A, torch.zeros_like(A), mix, momentum[..., -1:].exp().unsqueeze(-1), e.unsqueeze(-1)


class Tenth(Titans):
    """A rule that overrides the loss but inherits the formulas for its parent's loss."""

    name = "tenth"

    def loss(self, error, v, own):
        return 0.1 * error.square().sum(-1)


class TenthByFormula(Tenth):
    name = "tenth_by_formula"

    def gradient(self, error, v, own):
        return 0.2 * error


class SmallYaad(Yaad):
    name = "small_yaad"

    def loss(self, error, v, own):
        return 0.1 * super().loss(error, v, own)


class Absolute(Rule):
    """The l1 norm: its second derivative is zero everywhere, for which PyTorch has tensors that cannot be written."""

    name = "absolute"
    gates = {"scale": OwnGate(start=1.0)}

    def loss(self, error, v, own):
        return (own[0] * error.abs()).sum(-1)


def given(rule, depth, seed=0, T=T, D=8, per_layer=False, channelwise=False):
    """Inputs and the rule's own gates, which are about as large as the errors: there a loss has most curvature.
    channelwise: every channel has an alpha."""
    gen = torch.Generator().manual_seed(seed)
    tensors = make(2, T, 2, D, 6, depth, seed=seed, per_layer=per_layer)
    tensors[4], tensors[5] = (0.05 + 0.9 * gate for gate in tensors[4:6])
    own = [0.5 + torch.rand(2, T, 2, generator=gen, dtype=torch.float64) for _ in rule.gates]
    if (inputs := rule.width(D)) != D:
        tensors[6] = torch.randn(2, inputs, tensors[6].shape[2], generator=gen, dtype=torch.float64)
    if channelwise:
        channels = sum(weights.shape[1] for weights in tensors[6 : 6 + depth])
        tensors[5] = 0.05 + 0.9 * torch.rand(2, T, 2, channels, generator=gen, dtype=torch.float64)
    return tensors, own


def run(rule, tensors, own, depth, backend, initial=None, **options):
    """Flat outputs and final state, and the gradients of a random weighting of all of them."""
    leaves = [t.clone().requires_grad_() for t in (*tensors, *own)]
    count = len(tensors)
    out, state = neural_memory(
        *leaves[:6], tuple(leaves[6 : 6 + depth]), norm=tuple(leaves[6 + depth : count]), own=tuple(leaves[count:]),
        rule=rule, backend=backend, initial_state=initial, output_final_state=True, **options,
    )  # fmt: skip
    results = [out, *state.weights, *state.momentum, *state.chunk_weights]
    gen = torch.Generator().manual_seed(9)
    total = sum((r * torch.randn(r.shape, generator=gen, dtype=r.dtype)).sum() for r in results)
    return results, torch.autograd.grad(total, leaves, materialize_grads=True)


@pytest.mark.parametrize("rule", [Tenth(), TenthByFormula(), SmallYaad()], ids=lambda rule: rule.name)
@pytest.mark.parametrize("backend", ["auto", "chunked"])
def test_a_loss_of_its_own_is_not_given_the_formulas_of_its_parent(rule, backend):
    tensors, own = given(rule, 2)
    for a, b in zip(*(run(rule, tensors, own, 2, each, chunk_size=5) for each in (backend, "naive")), strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("rule", [TITANS, PseudoHuber(), Omega()], ids=lambda rule: rule.name)
@pytest.mark.parametrize("backend", ["auto", "chunked", "naive"])
def test_inference_mode_changes_nothing(rule, backend):
    """Inference tensors cannot be part of a graph, but gradients by autograd need one."""
    tensors, own = given(rule, 2)

    def outputs():
        copies, state, found = [t.clone() for t in (*tensors, *own)], None, []
        count = len(tensors)
        for part in (slice(None, 7), slice(7, None)):
            out, state = neural_memory(
                *(x[:, part] for x in copies[:6]), tuple(copies[6:8]), norm=tuple(copies[8:count]),
                own=tuple(x[:, part] for x in copies[count:]), rule=rule, backend=backend, initial_state=state,
                output_final_state=True, chunk_size=5,
            )  # fmt: skip
            found += [out, *state.weights]
        return found

    with torch.no_grad():
        expected = outputs()
    with torch.inference_mode():
        assert_same(outputs(), expected)


def test_an_update_without_its_coefficients_is_refused():
    with pytest.raises(TypeError, match="Half: update without coefficients"):
        type("Half", (Titans,), {"update": Aligned.update})


def test_gates_that_are_numbers_are_refused():
    with pytest.raises(TypeError, match=r"Half.gates: given {'threshold': 1.0}; allowed: name -> OwnGate"):
        type("Half", (Titans,), {"gates": {"threshold": 1.0}})


@pytest.mark.parametrize("rule", [TITANS, PseudoHuber(), Aligned(), Absolute()], ids=lambda rule: rule.name)
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("options", [
    {"chunk_size": 5}, {"chunk_size": 16, "forget_to": "start", "save_every": 2}, {"chunk_size": 7, "stale": True},
    {"chunk_size": 1, "reset": True}, {"chunk_size": 100, "reset": True, "forget_to": "start"},
], ids=str)  # fmt: skip
def test_it_equals_the_definition_by_autograd(rule, depth, options):
    tensors, own = given(rule, depth, seed=depth)
    options = dict(options)
    if options.get("reset"):
        options["reset"] = torch.rand(2, T, generator=torch.Generator().manual_seed(1)) < 0.15
    expected, chunkwise = (run(rule, tensors, own, depth, backend, **options) for backend in ("naive", "chunked"))
    for a, b in zip(chunkwise, expected, strict=True):
        assert_same(a, b)


def test_with_an_alpha_for_each_channel():
    rule, depth = PseudoHuber(), 2
    tensors, own = given(rule, depth)
    tensors[5] = torch.rand(2, T, 2, 8 + 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for stale in (False, True):
        options = {"chunk_size": 8, "stale": stale}
        expected, chunkwise = (run(rule, tensors, own, depth, backend, **options) for backend in ("naive", "chunked"))
        for a, b in zip(chunkwise, expected, strict=True):
            assert_same(a, b)
    with pytest.raises(ValueError, match="the rule aligned moves M its own way; use .naive."):
        run(Aligned(), tensors, [], depth, "auto")


def test_cuts_are_invisible():
    rule, depth = PseudoHuber(), 2
    tensors, own = given(rule, depth)
    weights, norm = tuple(tensors[6 : 6 + depth]), tuple(tensors[6 + depth :])
    options = {"norm": norm, "rule": rule, "chunk_size": 4, "output_final_state": True}
    whole, end = neural_memory(*tensors[:6], weights, own=tuple(own), **options)
    pieces, state = [], None
    for a, b in ((0, 3), (3, 4), (4, 17), (17, T)):
        part = [x[:, a:b] for x in tensors[:6]]
        out, state = neural_memory(*part, weights, own=tuple(x[:, a:b] for x in own), initial_state=state, **options)
        pieces.append(out)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=0, atol=TOLERANCE)
    for mine, other in zip(state.weights, end.weights, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=TOLERANCE)


def test_it_is_observed():
    """The trace shows ||grad|| of the rule's own loss: at depth 1 without a norm, from M = 0, the gradient is k g^T."""
    rule, gen = PseudoHuber(), torch.Generator().manual_seed(0)
    k, v = (torch.randn(1, 1, 1, 4, generator=gen, dtype=torch.float64) for _ in range(2))
    gate, d = torch.full((1, 1, 1), 0.1, dtype=torch.float64), torch.full((1, 1, 1), 0.7, dtype=torch.float64)
    trace = memory_trace(k, v, gate, gate, gate, [torch.zeros(1, 4, 4).double()], rule=rule, own=(d,),
                         network=NetworkShape(4, 4, 1, norm=False, residual=False))  # fmt: skip
    size = v.norm()
    expected = k.norm() * 2 * size / torch.sqrt(1 + size**2 / 0.49)
    torch.testing.assert_close(trace.surprise.squeeze(), expected)


@pytest.mark.parametrize("backend, device", [("triton", "meta"), ("native", "cpu")])
def test_kernels_that_do_not_know_it_say_so(backend, device):
    tensors, own = given(PseudoHuber(), 2, D=32)
    tensors = [x.float().to(device) for x in tensors]
    with pytest.raises(ValueError, match=f'"{backend}" does not serve this: the memory rule is pseudo_huber'):
        neural_memory(*tensors[:6], tuple(tensors[6:8]), norm=tuple(tensors[8:]), backend=backend, rule=PseudoHuber(),
                      own=tuple(x.float().to(device) for x in own))  # fmt: skip


def test_its_gates_must_be_given():
    tensors, _ = given(PseudoHuber(), 2)
    with pytest.raises(ValueError, match="own must have .* for each gate of the rule pseudo_huber, threshold; got"):
        neural_memory(*tensors[:6], tuple(tensors[6:8]), norm=tuple(tensors[8:]), rule=PseudoHuber())


# ---- as a layer, in a model


def test_its_own_settings(tiny):
    config = load_config(tiny(), ["model.memory.rule=pseudo_huber", "model.memory.pseudo_huber.scale=2.0"])
    assert config.model.memory.section("pseudo_huber") == {"scale": 2.0}
    assert Rule.of(config.model.memory) == PseudoHuber(PseudoHuber.Settings(scale=2.0)) != PseudoHuber()
    assert load_config(tiny(), ["model.memory.pseudo_huber.scale=2.0"]).model.memory.section("pseudo_huber") == {}
    for override, message in {
        "model.memory.rule=huuber": "model.memory.rule: given 'huuber'; allowed: .*titans",
        "model.memory.pseudo_huber.scale=0.0": "model.memory.pseudo_huber.scale: given 0.0; allowed: greater than 0",
        "model.memory.pseudo_huber.skale=1.0": "unknown key .*; nearest known key: model.memory.pseudo_huber.scale",
        "model.memory.chunk_sise=16": "unknown key .*; nearest known key: model.memory.chunk_size",
    }.items():
        with pytest.raises(UserError, match=message):
            load_config(tiny(), [override])


def layer(**settings) -> NeuralMemory:
    torch.manual_seed(0)
    config = MemoryConfig(rule="pseudo_huber", chunk_size=4, **settings)
    memory = NeuralMemory(16, 2, 4, config, 1e-5)
    memory.gates.own_initialisation()
    return memory.double()


def test_the_layer_starts_where_it_says():
    memory, x = layer(), torch.randn(2, T, 16, dtype=torch.float64)
    with torch.no_grad():
        memory.gates.own.weight.zero_()
    *_, threshold = memory.gates(x, torch.ones(2, T, 2, 8, dtype=torch.float64))
    torch.testing.assert_close(threshold, torch.ones(2, T, 2, dtype=torch.float64))
    assert memory.gates.bound == pytest.approx(2 * 0.1), "step, and the bound of the squared loss"
    linear = memory.gates.own
    assert memory.gates.flops().forward == 2 * 16 * (memory.gates.linear.out_features + linear.out_features)


def test_the_model_streams_and_its_state_is_kept_in_a_file(tmp_path):
    torch.manual_seed(0)
    memory = {"rule": "pseudo_huber", "chunk_size": 4}
    size = {"vocab_size": 50, "d_model": 16, "n_layers": 2, "n_heads": 2, "mlp_hidden": 24, "persistent_tokens": 2}
    model = build_model(ModelConfig(mixers=["lmm"], memory=memory, **size)).double().eval()
    ids = torch.randint(0, 50, (2, T), generator=torch.Generator().manual_seed(0))
    whole, _ = model(ids)
    first, state = model(ids[:, :9])
    save_state(state, tmp_path / "state")
    second, _ = model(ids[:, 9:], load_state(tmp_path / "state"))
    torch.testing.assert_close(torch.cat([first, second], 1), whole, rtol=1e-10, atol=1e-10)


def test_it_is_planned(tiny):
    words = ["model.mixers=[lmm]", "model.memory.rule=pseudo_huber"]
    one, two = (make_plan(task_of(load_config(tiny(), [*words, f"parallel.tensor={n}"])), n) for n in (1, 2))
    assert two.bytes["parameters"] < one.bytes["parameters"]


def test_it_trains_under_tensor_parallelism_and_zero(tiny, tmp_path):
    """Two tensor ranks under ZeRO 2 give the losses of one process; their checkpoint is evaluated and exported."""
    model = {"mixers": ["lmm"], "memory": {"rule": "pseudo_huber"}}
    config = tiny(model=model, run={"imports": [HERE]})
    run_jobs(1, config, tmp_path, {"one": []})
    run_jobs(2, config, tmp_path, {"two": ["parallel.tensor=2", "parallel.zero_stage=2"]})
    one, two = (curve(tmp_path / name, "loss", "grad_norm") for name in ("one", "two"))
    assert len(one) == 10 and one[-1][1] < one[0][1]
    for a, b in zip(one, two, strict=True):
        assert b == pytest.approx(a, rel=1e-5)
    ids = torch.zeros(1, 5, dtype=torch.int64)
    run = load_run(tmp_path / "two")
    assert cli.run(["export", str(tmp_path / "two"), "--out", str(tmp_path / "hub")]) == 0
    assert any("test_rule_contract" in path.name for path in (tmp_path / "hub").glob("*.py"))
    assert cli.run(["import", str(tmp_path / "hub"), "--out", str(tmp_path / "back")]) == 0
    torch.testing.assert_close(load_run(tmp_path / "back").model(ids)[0], run.model(ids)[0], rtol=0, atol=0)


class Squares(Titans):
    """Features as wide as keys, so that only their values show that they are used."""

    name = "squares"

    def features(self, x):
        return x * x.abs()


class Wider(Titans):
    name = "wider"

    def features(self, x):
        return torch.cat([x, x * x], -1)


class Windowed(Titans):
    name = "windowed"
    window = 2


def test_features_of_a_derived_rule_are_used():
    """C does not implement features: it would silently write and read plain keys."""
    tensors, own = given(Squares(), 2)
    found, defined = (run(Squares(), tensors, own, 2, backend, chunk_size=4) for backend in ("auto", "naive"))
    for mine, theirs in zip(found, defined, strict=True):
        assert_same(mine, theirs)
    plain, _ = run(TITANS, tensors, own, 2, "auto", chunk_size=4)
    assert (found[0][0] - plain[0]).abs().max() > 1e-3


class Unsummed(Rule):
    name = "unsummed"

    def loss(self, error, v, own):
        return error.square()


class Turned(Titans):
    name = "turned"

    def closed(self, weights, momentum, own):
        return weights.mT


class Clipped(Titans):
    name = "clipped"

    def closed(self, weights, momentum, own):
        weights.clamp(-1, 1)


@pytest.mark.parametrize("rule, message", [
    (Unsummed, r"Unsummed.loss: returned \(.*, 8\) for errors \(.*, 8\); must be \(.*\): summed"),
    (Turned, r"Turned.closed: returned torch.Size\(.*\) for weights .*; must be a new tensor of their shape"),
    (Clipped, "Clipped.closed: returned None for weights"),
    (Wider, "Wider: its features of a head of 8 have a width of 16, but width says 8"),
    (Windowed, "Windowed: a window of 2 needs as many gates of its own, or shares; it has 0"),
], ids=["loss", "closed", "nothing", "features", "window"])  # fmt: skip
def test_what_a_rule_forgets_is_said(rule, message, monkeypatch):
    monkeypatch.setattr(Rule, "of", lambda config: rule())
    with pytest.raises(TypeError, match=message):
        NeuralMemory(16, 2, 4, MemoryConfig(), 1e-5)(torch.randn(1, T, 16))
