"""The contract of every built-in rule in each form: its definition by autograd, cuts, the gradient of its loss."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.helpers.mixers import small_config, small_model
from tests.helpers.processes import curve, run_jobs
from tests.kernels.memory.rules.cases import cut_difference, equals_the_definition
from titans_pt import cli
from titans_pt.config import MemoryConfig
from titans_pt.config.files import load_config
from titans_pt.errors import UserError
from titans_pt.kernels.memory import NetworkShape, native
from titans_pt.kernels.memory.rules import RULES, Rule
from titans_pt.layers.memory import NeuralMemory
from titans_pt.models import build_model
from titans_pt.models.mixers.common import build_memory
from titans_pt.runs.loaded import load_run
from titans_pt.runs.states import load_state, save_state
from titans_pt.tasks import task_of
from titans_pt.training.plan import make_plan

FORMS = {
    "titans": [{}],
    "yaad": [{"form": "radial"}, {"form": "switch"}],
    "moneta": [{}, {"p": 1.5, "q": 2.0}, {"p": 1.0, "q": 3.0}],
    "memora": [{}, {"scale": 2.0}],
    "dot": [{}],
    "dgd": [{}],
    "lact": [{}],
    "muon": [{}, {"form": "unit"}],
    "omega": [
        {},
        {"window": 3, "degree": 2},
        {"window": 1, "degree": 2},
        {"window": 6},
    ],
    "atlas": [{"window": 2, "degree": 2}, {}],
}
ALL = [(name, form) for name, forms in FORMS.items() for form in forms]
OTHERS = [each for each in ALL if each[0] not in ("titans", "yaad", "dot")]
"""Rules not served by Titans' own implementation, whose products tests/titans_pt/models/test_flops.py counts."""
every_form = pytest.mark.parametrize("name, form", ALL, ids=str)
every_rule = pytest.mark.parametrize("name", FORMS)


def rule_of(name: str, form: dict) -> Rule:
    found = RULES.find(name)
    return found(found.Settings(**form))


def test_no_rule_is_forgotten():
    assert set(FORMS) == set(RULES.built_in())


@every_form
@pytest.mark.parametrize("seed", range(2))
def test_it_equals_the_definition(name, form, seed):
    # Weights close to zero under a LayerNorm are chaotic by definition; so are logits forgotten to zero.
    fixed = {"forget_to": "start"} if name == "memora" else {}
    assert equals_the_definition(rule_of(name, form), seed, **fixed) < 1e-9


CHANNELWISE = [(name, form) for name, form in ALL if name not in ("dgd", "lact", "muon", "atlas")]
"""Rules that forget as Titans do; configs refuse an alpha per channel for the others."""


@pytest.mark.parametrize("name, form", CHANNELWISE, ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_with_an_alpha_per_channel_it_equals_the_definition(name, form, seed):
    fixed = {"forget_to": "start"} if name == "memora" else {}
    assert equals_the_definition(rule_of(name, form), seed, channelwise=True, **fixed) < 1e-9


COMPILED = [
    ("yaad", {"form": "radial"}), ("omega", {}), ("omega", {"window": 6}),
    ("muon", {}), ("muon", {"form": "unit"}), ("dgd", {}),
]  # fmt: skip


@pytest.mark.parametrize("name, form", COMPILED, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_in_c_it_equals_the_definition(name, form, seed):
    if missing := native.unserved(torch.zeros(1), NetworkShape(4, 4)):
        pytest.skip(f"no C: {missing}")
    assert equals_the_definition(rule_of(name, form), seed, backend="native") < 1e-9


@every_form
def test_cuts_are_invisible(name, form):
    for cuts, chunk_size in (([3, 4, 11], 4), ([5, 16], 16), ([8], 8)):
        assert cut_difference(rule_of(name, form), cuts, chunk_size) < 1e-9


@every_form
def test_its_gradient_is_that_of_its_loss(name, form):
    rule, gen = rule_of(name, form), torch.Generator().manual_seed(0)
    error = (3 * torch.randn(50, 6, generator=gen, dtype=torch.float64)).requires_grad_()
    v = torch.randn(50, 6, generator=gen, dtype=torch.float64).requires_grad_()
    own = tuple((0.5 + torch.rand(50, 1, generator=gen, dtype=torch.float64)).requires_grad_() for _ in rule.gates)
    (expected,) = torch.autograd.grad(rule.loss(error, v, own).sum(), error, create_graph=True)
    found = rule.gradient(error, v, own)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    upstream = torch.randn(50, 6, generator=gen, dtype=torch.float64)
    leaves = (error, v, *own)
    grads = [torch.zeros_like(x) for x in leaves]
    if expected.requires_grad:
        grads = torch.autograd.grad(expected, leaves, upstream, materialize_grads=True)
    d_error, d_v, d_own = rule.gradient_backward(upstream, error, v, own)
    d_v = torch.zeros_like(v) if d_v is None else d_v
    d_own = d_own or [torch.zeros_like(gate) for gate in own]
    for mine, other in zip((d_error, d_v, *d_own), grads, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-11, atol=1e-11)


# ---- in a model


FIRST = [(name, FORMS[name][0]) for name in FORMS if name not in ("titans", "yaad")]


@pytest.mark.parametrize("mixer, name, form", [
    *(("lmm", *each) for each in OTHERS), *(("mac", *each) for each in FIRST),
    ("mal", "muon", {}), ("mag", "omega", {}),
], ids=str)  # fmt: skip
def test_a_model_streams_and_its_state_is_kept_in_a_file(mixer, name, form, tmp_path):
    memory = {"chunk_size": 4, "expansion": 2, "rule": name, name: form}
    model = small_model([mixer], memory=memory, n_layers=1)
    ids = torch.randint(0, 50, (2, 23), generator=torch.Generator().manual_seed(0))
    reset = torch.zeros(2, 23, dtype=torch.bool)
    reset[1, 14] = True
    with torch.no_grad():
        whole, _ = model(ids, reset=reset)
        first, state = model(ids[:, :9], reset=reset[:, :9])
        save_state(state, tmp_path / "state")
        second, _ = model(ids[:, 9:], load_state(tmp_path / "state"), reset=reset[:, 9:])
        alone, _ = model(ids[1:, 14:])
    torch.testing.assert_close(torch.cat([first, second], 1), whole, rtol=1e-9, atol=1e-9)
    if mixer != "mac":  # MAC's positions continue
        torch.testing.assert_close(alone[0], whole[1, 14:], rtol=1e-9, atol=1e-9)
    changed = ids.clone()
    changed[:, 12] += 1
    with torch.no_grad():
        after, _ = model(changed, reset=reset)
    assert torch.equal(after[:, :12], whole[:, :12]) and not torch.equal(after[0, 12:], whole[0, 12:])


@pytest.mark.usefixtures("without_c")
@pytest.mark.parametrize("name, form", OTHERS, ids=str)
def test_its_products_are_counted(name, form):
    config, block, length, heads = MemoryConfig(rule=name, chunk_size=8, expansion=2, **{name: form}), 8, 32, 2
    memory = NeuralMemory(16, heads, 1, config, 1e-5)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        memory(torch.randn(1, length, 16))
    window = memory.gates.rule.window
    # The counter also counts the coefficients of a block of c tokens, (c x c) by (c x c + 1), and their product with
    # a window's band matrix.
    coefficients = 2 * block * (1 + block)
    if window > 1:
        keys, rows = block + window - 1, 2 if memory.gates.rule.nonlinear else 1 + block
        coefficients += config.depth * 2 * rows * keys
    if memory.gates.rule.erases:  # once more, for decays only; triangular systems are not counted
        coefficients = 2 * coefficients - sum(block * d_out for _, d_out in memory.shape.layers)
    counted = memory.flops(length).forward + heads * coefficients
    assert counter.get_total_flops() / length == pytest.approx(counted, rel=1e-12)


@every_rule
def test_it_is_planned(tiny, name):
    words = ["model.mixers=[lmm]", f"model.memory.rule={name}"]
    one, two = (make_plan(task_of(load_config(tiny(), [*words, f"parallel.tensor={n}"])), n) for n in (1, 2))
    assert two.bytes["parameters"] < one.bytes["parameters"]


@every_rule
def test_it_starts_as_a_model_of_finite_gradients(name):
    """Check the outer gradient of every parameter on 512 tokens."""
    torch.manual_seed(0)
    model = build_model(small_config(["lmm"], memory={"rule": name}))
    ids = torch.randint(0, 52, (1, 512))
    loss = torch.nn.functional.cross_entropy(model(ids[:, :-1])[0].flatten(0, 1), ids[:, 1:].flatten())
    grads = torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)
    norm = torch.stack([g.norm() for g in grads]).norm()
    assert loss < 6 and norm < 10


def test_rules_that_move_the_memory_their_own_way_have_one_alpha(tiny):
    with pytest.raises(
        UserError, match="model.memory.alpha: given 'channel'; must be head with model.memory.rule=muon"
    ):
        load_config(tiny(), ["model.mixers=[lmm]", "model.memory.rule=muon", "model.memory.alpha=channel"])
    load_config(tiny(), ["model.mixers=[lmm]", "model.memory.rule=moneta", "model.memory.alpha=channel"])


@every_rule
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_without_a_layernorm_it_is_stable_or_refused(name, depth):
    words = [f"model.memory.rule={name}", f"model.memory.depth={depth}", "model.memory.norm=false"]
    words += ["model.mixers=[lmm]", "model.d_model=32", "model.n_heads=2", "model.memory.chunk_size=16"]
    if RULES.find(name).needs_norm and depth > 1:
        refused = f"model.memory.norm: given False; must be true with model.memory.rule={name} and depth {depth}"
        with pytest.raises(UserError, match=refused):
            load_config("quickstart", words)
        return
    config = load_config("quickstart", words).model
    for seed in range(4):
        torch.manual_seed(seed)
        with torch.no_grad():
            memory = build_memory(config)
            y, state = memory(torch.randn(2, 512, 32))
        assert y.isfinite().all() and max(w.abs().max() for w in state.memory.weights) < 50


@pytest.mark.slow
@pytest.mark.parametrize("name, form", [
    ("memora", {}), ("dgd", {}), ("lact", {}), ("atlas", {"window": 2, "degree": 2}),
], ids=str)  # fmt: skip
def test_it_trains_under_tensor_parallelism_and_zero(tiny, tmp_path, name, form):
    """Two tensor ranks under ZeRO 2 give the losses of one process; their checkpoint is exported and imported."""
    config = tiny(model={"mixers": ["lmm"], "memory": {"rule": name, name: form}})
    run_jobs(1, config, tmp_path, {"one": []})
    run_jobs(2, config, tmp_path, {"two": ["parallel.tensor=2", "parallel.zero_stage=2"]})
    one, two = (curve(tmp_path / job, "loss", "grad_norm") for job in ("one", "two"))
    assert len(one) == 10 and one[-1][1] < one[0][1]
    for a, b in zip(one, two, strict=True):
        assert b == pytest.approx(a, rel=1e-4)
    assert cli.run(["export", str(tmp_path / "two"), "--out", str(tmp_path / "hub")]) == 0
    assert cli.run(["import", str(tmp_path / "hub"), "--out", str(tmp_path / "back")]) == 0
    ids = torch.zeros(1, 5, dtype=torch.int64)
    mine, back = (load_run(tmp_path / job).model(ids)[0] for job in ("two", "back"))
    torch.testing.assert_close(back, mine, rtol=0, atol=0)
