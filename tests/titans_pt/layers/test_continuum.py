"""The continuum memory system: its definition, cuts, resets, ranks, and its use with any mixer."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.helpers.mixers import small_config, small_model
from tests.helpers.ranks import check_ranks
from titans_pt.config.files import load_config
from titans_pt.errors import UserError
from titans_pt.layers.continuum import LevelMemory
from titans_pt.models import build_model
from titans_pt.runs.states import load_state, save_state
from titans_pt.tasks import task_of
from titans_pt.token_plans import put_on
from titans_pt.training.plan import make_plan

T, PERIODS = 23, [3, 8]


def level(rule: str, period: int) -> LevelMemory:
    torch.manual_seed(0)
    memory = {"rule": rule, "expansion": 2, "momentum": False}
    level = LevelMemory(small_config(["swa"], d_model=16, n_heads=2, memory=memory), period).double()
    with torch.no_grad():
        for parameter in level.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return level


def defined(level: LevelMemory, x: torch.Tensor, period: int, erases: bool) -> torch.Tensor:
    """Compute outputs token by token, one row and head after the other, each gradient by autograd."""
    theta, _, alpha, *_ = level.gates(x, level.value(x).unflatten(-1, (2, -1)))
    heads = []
    for h in range(2):
        pick = slice(8 * h, 8 * h + 8)
        starts = [getattr(level.network, f"weight_{n}")[h] for n in range(2)]
        gain, bias = level.network.norm_weight[h], level.network.norm_bias[h]

        def answer(k, weights, gain=gain, bias=bias):
            f = torch.nn.functional.gelu(k @ weights[0]) @ weights[1]
            return k + torch.nn.functional.layer_norm(f, (8,)) * gain + bias

        rows = []
        for row, (key, value) in enumerate(zip(level.key(x)[..., pick], level.value(x)[..., pick], strict=True)):
            running, outputs = list(starts), []
            for t, (k, v) in enumerate(zip(key / key.norm(dim=-1, keepdim=True), value, strict=True)):
                if t % period == 0:
                    frozen = [w.clone() for w in running]
                outputs.append(answer(k, frozen))
                gradients = torch.autograd.grad((answer(k, frozen) - v).square().sum(), frozen, create_graph=True)
                a, step = 1 - alpha[row, t, h], theta[row, t, h]
                inputs = [k, torch.nn.functional.gelu(k @ frozen[0])]
                for n, (w, w0, g, z) in enumerate(zip(running, starts, gradients, inputs, strict=True)):
                    own = step / (1 + step * z.square().sum()) if erases else step
                    moved = a * (w - w0)
                    moved = moved - own * torch.outer(z, z @ moved) if erases else moved
                    running[n] = w0 + moved - own * g
            rows.append(torch.stack(outputs))
        y = torch.stack(rows)
        heads.append(y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5) * level.output_norm.weight)
    return level.out(torch.cat(heads, -1))


@pytest.mark.parametrize("rule, period", [("titans", 5), ("dgd", 7)])
def test_it_equals_the_definition_by_autograd(rule, period):
    memory, x = level(rule, period), torch.randn(2, 12, 16, dtype=torch.float64, requires_grad=True)
    mine, other = memory(x)[0], defined(memory, x, period, erases=rule == "dgd")
    upstream, leaves = torch.randn_like(mine), [x, *memory.parameters()]
    torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9)
    for a, b in zip(*(torch.autograd.grad(y, leaves, upstream, allow_unused=True) for y in (mine, other)), strict=True):
        if b is not None:
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mixer", ["attention", "lmm", "mac", "mamba2"])
def test_any_mixer_streams_with_it(mixer, tmp_path):
    model = small_model([mixer], mlp_periods=PERIODS)
    put_on(model)
    ids = torch.randint(0, 50, (2, T), generator=torch.Generator().manual_seed(0))
    reset = torch.zeros(2, T, dtype=torch.bool)
    reset[1, 14] = True
    with torch.no_grad():
        whole, _ = model(ids, reset=reset)
        parts, state = [], None
        for a, b in ((0, 1), (1, 2), (2, 9), (9, T)):
            out, state = model(ids[:, a:b], state, reset=reset[:, a:b])
            save_state(state, tmp_path / "state")
            parts, state = [*parts, out], load_state(tmp_path / "state")
        alone, _ = model(ids[1:, 14:])
        changed = ids.clone()
        changed[:, 12] += 1
        after, _ = model(changed, reset=reset)
        token = [model(ids[:1, :5])]
        for t in range(5, 8):  # a token at a time, as generation does
            token.append(model(ids[:1, t : t + 1], token[-1][1]))
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(torch.cat([out for out, _ in token], 1), whole[:1, :8], rtol=1e-9, atol=1e-9)
    if mixer != "mac":  # MAC's positions continue
        torch.testing.assert_close(alone[0], whole[1, 14:], rtol=1e-9, atol=1e-9)
    assert torch.equal(after[:, :12], whole[:, :12]) and not torch.equal(after[0, 12:], whole[0, 12:])


def test_levels_move_at_their_own_pace():
    """A level uses a token's update only after its period; until then a changed token affects no later output."""
    torch.manual_seed(0)
    x = torch.randn(1, 16, 16, dtype=torch.float64)
    changed = x.clone()
    changed[0, 1] += 1
    for period in (4, 8):
        memory = level("titans", period)
        differs = (memory(x)[0] - memory(changed)[0])[0].abs().amax(-1) > 0
        assert differs.tolist() == [t == 1 or t >= period for t in range(16)]


@pytest.mark.usefixtures("without_c")
def test_its_products_are_counted():
    for rule, period in (("titans", 8), ("dgd", 8)):
        memory = level(rule, period)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            memory(torch.randn(1, 32, 16, dtype=torch.float64))
        coefficients = 2 * period * (1 + period)  # counted, unlike triangular systems
        if rule == "dgd":
            coefficients = 2 * coefficients - period * sum(d_out for _, d_out in memory.shape.layers)
        assert counter.get_total_flops() / 32 == pytest.approx(memory.flops().forward + 2 * coefficients, rel=1e-12)
    without, with_it = (build_model(small_config(["swa"], mlp_periods=periods)) for periods in ([], PERIODS))
    more = sum(each.memory.flops().forward for each in with_it.blocks[0].continuum)
    assert with_it.flops(64).forward == pytest.approx(without.flops(64).forward + 2 * more)


def test_it_is_planned(tiny):
    words = ["model.mixers=[swa]", "model.window=8"]
    periods = "model.mlp_periods=[4, 8]"
    jobs = ((1, []), (1, [periods]), (2, [periods, "parallel.tensor=2"]))
    none, one, two = (make_plan(task_of(load_config(tiny(), [*words, *more])), n).bytes for n, more in jobs)
    for kind in ("parameters", "activations"):
        assert max(none[kind], two[kind]) < one[kind]


@pytest.mark.parametrize("words, message", [
    (["model.mlp_periods=[4, 5000]"], r"model.mlp_periods: given \[4, 5000\]; each below data.seq_len="),
    (["model.mlp_periods=[64]", "data.seq_len=64"], r"model.mlp_periods: given \[64\]; each below data.seq_len=64"),
    (["model.mlp_periods=[0]"], "model.mlp_periods"),
    (["model.mixers=[rmt]", "model.mlp_periods=[4]", "model.rmt.segment=8"],
     r"model.mlp_periods: given \[4\]; must be \[\] with the mixer rmt"),
    (["model.mixers=[mamba2]", "model.mlp_periods=[4]", "model.memory.n_heads=3"],
     "model.memory.n_heads: given 3; must divide model.d_model=16"),
])  # fmt: skip
def test_what_does_not_go_together_is_refused(tiny, words, message):
    with pytest.raises(UserError, match=message):
        load_config(tiny(), words)


@pytest.mark.slow
def test_it_trains_under_tensor_and_context_ranks(tiny, tmp_path):
    """Two tensor ranks under ZeRO 2, with and without sequence parallelism, and two context ranks give one process's
    losses; a checkpoint is exported and imported."""
    memory = {"rule": "dgd", "chunk_size": 4}
    config = tiny(model={"mixers": ["swa"], "window": 8, "mlp_periods": [4, 8], "memory": memory})
    tensor = ["parallel.tensor=2", "parallel.zero_stage=2"]
    jobs = {"two": tensor, "time": [*tensor, "parallel.sequence=true"], "context": ["parallel.context=2"]}
    check_ranks(config, tmp_path, jobs)
