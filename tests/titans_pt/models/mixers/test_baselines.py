"""Properties that every mixer of the package has, in float64."""

from functools import partial

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.helpers.mixers import BASELINES, NAMES, OWN, small_config, small_model
from tests.titans_pt.parallel.test_split import built_one_by_one, check  # noqa: F401 - a fixture
from titans_pt.config.files import load_config
from titans_pt.errors import UserError
from titans_pt.kernels import linear_memory as linear_memory_package
from titans_pt.layers.state import map_tensors, state_bytes
from titans_pt.models import build_model
from titans_pt.models.backbone import exempt_from_decay
from titans_pt.models.mixers import MIXERS
from titans_pt.runs.states import load_state, save_state
from titans_pt.tasks import task_of
from titans_pt.training.plan import make_plan

T = 41  # ragged for chunk 4, segment 8, window 6 and mini-batches of 4
same = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-11)


@pytest.fixture(scope="module", params=NAMES)
def model(request):
    return small_model([request.param])


def tokens(rows=2, length=T, seed=0):
    return torch.randint(0, 50, (rows, length), generator=torch.Generator().manual_seed(seed))


def streamed(model, ids, cuts, state=None, reset=None):
    parts, bounds = [], [0, *cuts, ids.shape[1]]
    for a, b in zip(bounds[:-1], bounds[1:], strict=True):
        logits, state = model(ids[:, a:b], state, reset=None if reset is None else reset[:, a:b])
        parts.append(logits)
    return torch.cat(parts, 1), state


def test_they_are_all_here():
    assert set(BASELINES) < set(NAMES)
    found = set(NAMES) - set(BASELINES)
    assert found == {"attention", "swa", "liza", "lmm", "mab", "mac", "mag", "mal", "rmt", "hope"}


@torch.no_grad()
@pytest.mark.parametrize("place", [0, 8, 21, 40])
def test_causal_and_rows_independent(model, place):
    ids = tokens()
    before, _ = model(ids)
    changed = ids.clone()
    changed[0, place] = (changed[0, place] + 1) % 50
    after, _ = model(changed)
    same(after[0, :place], before[0, :place])
    same(after[1], before[1])
    assert (after[0, place : place + 6] - before[0, place : place + 6]).abs().amax(-1).gt(1e-9).all()


@torch.no_grad()
def test_streaming_in_any_cuts(model):
    whole, end = model(tokens())
    draw = torch.Generator().manual_seed(0)
    for cuts in ([5, 6, 20], range(1, T), *(torch.randperm(T - 1, generator=draw)[:4].add(1).sort()[0] for _ in "12")):
        found, state = streamed(model, tokens(), [int(c) for c in cuts])
        same(found, whole)
        for a, b in zip(_tensors(state), _tensors(end), strict=True):
            same(a, b)


@pytest.mark.parametrize("documents", [False, True])
def test_layers_side_by_side(model, documents):
    """In pieces of 9 tokens, with layer l next to layer l + 1, outputs, state and gradients equal one whole call's."""
    reset = torch.zeros(2, T, dtype=torch.bool)
    reset[0, [9, 10, 30]] = documents
    upstream = torch.randn(2, T, 52, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = []
    for pieces in (None, 9):
        model.blocks.set_wavefront(pieces)
        model.zero_grad()
        _, before = model(tokens(length=5, seed=1))
        logits, state = model(tokens(), before, reset=reset if documents else None)
        (logits * upstream).sum().backward()
        grads = [p.grad for p in model.parameters()]
        found.append((logits.detach(), grads, _tensors(map_tensors(state, torch.detach))))
    model.blocks.set_wavefront(None)
    model.zero_grad()
    for a, b in zip(*found, strict=True):
        for x, y in zip(a, b, strict=True) if isinstance(a, list) else [(a, b)]:
            same(x, y, atol=1e-9)


def _tensors(state):
    found = []
    map_tensors(state, found.append)
    return found


@torch.no_grad()
def test_documents_are_apart(model):
    ids, starts = tokens(), [(0, 9, 10, 30), (13,)]
    reset = torch.zeros(2, T, dtype=torch.bool)
    for row, places in enumerate(starts):
        reset[row, list(places)] = True
    before = tokens(length=7, seed=1)
    _, past = model(before)
    found, _ = model(ids, past, reset=reset)
    pieces, _ = streamed(model, ids, [3, 10, 11, 25], past, reset)
    same(pieces, found)
    for row, places in enumerate(starts):
        _, one = model(before[row : row + 1])
        bounds = [0, *(p for p in places if p), T]
        for a, b in zip(bounds[:-1], bounds[1:], strict=True):
            alone, _ = model(ids[row : row + 1, a:b], one if a == 0 and not reset[row, 0] else None)
            same(found[row : row + 1, a:b], alone)


def test_every_parameter_learns(model):
    logits, _ = model(tokens())
    gradients = torch.autograd.grad(logits.square().sum(), list(model.parameters()))
    for (name, _), gradient in zip(model.named_parameters(), gradients, strict=True):
        assert gradient.isfinite().all() and gradient.abs().max() > 0, name


@pytest.mark.thorough
@pytest.mark.parametrize("mixer", [*BASELINES, "rmt"])
def test_training_learns(mixer):
    """From its own initialisation, in fp32, every mixer memorises a few rows."""
    torch.manual_seed(0)
    model, ids = build_model(small_config([mixer])), tokens(4, 25)
    optimiser = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for _ in range(30):
        logits, _ = model(ids[:, :-1], output_final_state=False)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.25 * losses[0]


def test_a_state_kept_in_a_file_goes_on(model, tmp_path):
    with torch.no_grad():
        _, state = model(tokens(length=13))
        save_state(state, tmp_path / "state")
        loaded = load_state(tmp_path / "state")
        for a, b in zip(_tensors(loaded), _tensors(state), strict=True):
            assert torch.equal(a, b) and a.dtype == b.dtype
        assert torch.equal(model(tokens(seed=2), loaded)[0], model(tokens(seed=2), state)[0])


@pytest.mark.parametrize("mixer", BASELINES)
def test_states_are_of_constant_size_and_fp32(mixer):
    model = small_model([mixer]).to(torch.bfloat16)
    with torch.no_grad():
        logits, state = model(tokens(length=9))
        longer, later = model(tokens(length=64))
    assert logits.dtype == longer.dtype == torch.bfloat16
    assert state_bytes(state) == state_bytes(later)
    memories = [x for x in _tensors(state) if x.is_floating_point() and x.dim() == 4 or x.dtype == torch.float32]
    assert memories and all(x.dtype == torch.float32 for x in memories)


@pytest.mark.parametrize("sequence", [False, True], ids=["", "sequence"])
@pytest.mark.parametrize("mixer", BASELINES)
def test_tensor_ranks_have_every_gradient_of_the_whole_model(mixer, sequence):
    check(small_config([mixer]), sequence=sequence, reset=True)


@pytest.mark.parametrize("mixer", ["hgrn2", "ttt_mlp"])
def test_four_tensor_ranks_with_checkpointing(mixer):
    """Parameters that layers share, and parameters that belong to no head."""
    check(small_config([mixer, "swa"], n_layers=4), size=4, sequence=True, checkpointing=True)


@pytest.mark.parametrize("mixer", BASELINES)
def test_heads_are_shared_out_or_refused(mixer, tiny):
    path = tiny(model={"d_model": 32, "mixers": [mixer], mixer: OWN[mixer], "vocab_size": 300, "mlp_hidden": 96})
    config = load_config(path, ["parallel.tensor=2"])
    one, two = make_plan(task_of(load_config(path)), 1), make_plan(task_of(config), 2)
    assert two.bytes["parameters"] < 0.75 * one.bytes["parameters"]
    with pytest.raises(UserError, match=f"parallel.tensor: given 3; must divide .*model.{mixer}"):
        load_config(path, ["parallel.tensor=3"])


@pytest.mark.parametrize("mixer", [name for name in BASELINES if name not in ("mamba", "longhorn")])  # without heads
def test_heads_that_do_not_divide_the_width_are_refused(mixer, tiny):
    setting = {"gla": "n_heads", "gated_deltanet": "n_heads", "deltaproduct": "n_heads"}.get(mixer, "head_width")
    with pytest.raises(UserError, match=f"model.{mixer}.{setting}: given 14; must divide model.d_model"):
        load_config(tiny(model={"d_model": 32, "mixers": [mixer]}), [f"model.{mixer}.{setting}=14"])


# ---- the plan


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("mixer", BASELINES)
def test_it_is_planned(mixer, gpu, tiny):
    """Activations grow in proportion to tokens; the GPU path is planned without computing anything."""

    def plan(length):
        model = {"d_model": 32, "n_layers": 2, "mixers": [mixer], mixer: OWN[mixer]}
        train = {"precision": "bf16" if gpu else "fp32", "batch_tokens": length}
        return make_plan(task_of(load_config(tiny(model=model, train=train, data={"seq_len": length}))), 1, gpu).bytes

    short, long = plan(256), plan(512)
    assert 1.9 < long["activations"] / short["activations"] < 2.1
    assert ("memory states" in long) == mixer.startswith("ttt")


def test_what_is_needed_on_a_gpu():
    needs = {name: set(small_model([name]).blocks[0].mixer.needs()) for name in BASELINES}
    selective, ttt = {"mamba", "longhorn"}, {"ttt_linear", "ttt_mlp"}
    assert needs == {n: {"triton"} if n in selective else set() if n in ttt else {"fla"} for n in BASELINES}
    for name in BASELINES:
        mixer = build_model(small_config([name])).blocks[0].mixer
        assert (mixer.unserved(torch.bfloat16) is not None) == (name in ttt)
        assert mixer.unserved(torch.float64) is not None


# ---- FLOPs


def _by_definition(q, k, v, decay, beta, erase, state, reset):
    """The recurrence in matrix products only, which PyTorch counts; products with zeros in a sub-step are left out."""
    outputs, state = [], state.requires_grad_()
    if erase is None and beta is not None:
        erase = k
    for t in range(q.shape[1]):
        write = v[:, t]
        if decay is not None:
            state = decay[:, t].exp().reshape(*decay.shape[::2][:1], decay.shape[2], -1, 1) * state
        if erase is not None and erase[:, t].any():
            write = write - (erase[:, t].unsqueeze(-2) @ state).squeeze(-2)
        if beta is not None:
            write = beta[:, t].unsqueeze(-1) * write
        state = state + k[:, t].unsqueeze(-1) @ write.unsqueeze(-2)
        outputs.append((q[:, t].unsqueeze(-2) @ state).squeeze(-2) if q[:, t].any() else torch.zeros_like(v[:, t]))
    return torch.stack(outputs, 1), state


def _scan_by_definition(x, step, k, q, rate, state, reset):
    outputs, state = [], state.requires_grad_()
    for t in range(x.shape[1]):
        pace = step[:, t, :, None]
        decay = 1 - pace * k[:, t, None].square() if rate is None else torch.exp(-rate * pace)
        state = decay * state + (step[:, t] * x[:, t]).unsqueeze(-1) @ k[:, t].unsqueeze(-2)
        outputs.append((state @ q[:, t].unsqueeze(-1)).squeeze(-1))
    return torch.stack(outputs, 1), state


@pytest.mark.parametrize("mixer", BASELINES)
def test_flops_are_those_of_the_definition(mixer, monkeypatch):
    from titans_pt.kernels.channel_scan import dispatch as scan

    monkeypatch.setattr(linear_memory_package.dispatch, "chunked_linear_memory", _by_definition)
    monkeypatch.setattr(scan.native, "cpu_scan", _scan_by_definition)
    model, length = small_model([mixer], conv_width=1), 16
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        model(tokens(length=length))
    with FlopCounterMode(display=False) as both:
        model(tokens(length=length))[0].sum().backward()
    forward, both = (counter.get_total_flops() / (2 * length) for counter in (forward, both))
    flops = model.flops(length)
    if not mixer.startswith("ttt"):
        assert forward == pytest.approx(flops.forward, rel=1e-12)
        assert both == pytest.approx(flops.total, rel=1e-12)
        return
    # The dual form also multiplies every token with all tokens of its mini-batch, and its backward pass recomputes the
    # forward pass. The model's FLOPs include neither.
    ttt = model.blocks[0].mixer.ttt
    pairs = 2 * ttt.n_heads * sum(2 * ttt.mini_batch * (a + b) for a, b in ttt.network.layers)
    assert forward == pytest.approx(flops.forward + pairs, rel=1e-12)
    inner = ttt.flops().forward - sum(2 * m.weight.numel() for m in ttt.modules() if isinstance(m, torch.nn.Linear))
    assert both == pytest.approx(flops.total + 3 * pairs + 2 * inner + pairs, rel=0.05)


# ---- starts


def test_what_weight_decay_leaves_alone():
    exempt = {"mamba": {"A_log", "D", "inputs.step.bias", "conv.bias"}, "longhorn": {"D"},
              "mamba2": {"decays.A_log", "decays.dt_bias", "D"},
              "gated_deltanet": {"decays.A_log", "decays.dt_bias"}, "kda": {"decays.A_log", "decays.dt_bias"},
              "deltaproduct": {"decays.A_log", "decays.dt_bias"}, "hgrn2": {"bounds.logits"},
              "ttt_linear": {"ttt.network.weight_0", "ttt.network.bias_0", "ttt.network.norm_weight", "ttt.tau"},
              "ttt_mlp": {"ttt.network.weight_1", "ttt.network.bias_1"}}  # fmt: skip
    for mixer, names in exempt.items():
        model = build_model(small_config([mixer]))
        found = exempt_from_decay(model)
        assert {f"blocks.0.mixer.{name}" for name in names} <= found
        assert not any(name.endswith(("out.weight", "x.weight", "q.weight")) for name in found)


def test_starts_are_those_of_the_references():
    from torch.nn.functional import softplus

    def mixer(name, **own):
        torch.manual_seed(0)
        return build_model(small_config([name], **own)).blocks[0].mixer

    wide = {"n_heads": 4, "d_model": 1024}
    mamba = mixer("mamba", d_model=1024)
    assert torch.allclose(mamba.A_log[7].exp(), torch.arange(1.0, 5)) and (mamba.D == 1).all()
    bound = mamba.inputs.step.in_features**-0.5
    assert mamba.inputs.step.in_features == 64 and 0.9 * bound < mamba.inputs.step.weight.abs().max() <= bound
    for steps in (softplus(mamba.inputs.step.bias), softplus(mixer("mamba2", d_model=1024).decays.dt_bias)):
        assert 0.001 * 0.99 <= steps.min() < 0.002 and 0.05 < steps.max() <= 0.1 * 1.01
        assert 0.3 < (steps < 0.01).float().mean() < 0.7, "uniform in the logarithm"
    A = mixer("mamba2", d_model=1024).decays.A_log.exp()
    assert 1 <= A.min() < 2 and 15 < A.max() <= 16
    many = mixer("gated_deltanet", **wide | {"gated_deltanet": {"n_heads": 256}}).decays.A_log.exp()
    assert 0 <= many.min() < 0.5 and 15 < many.max() <= 16
    assert torch.equal(mixer("longhorn").inputs.step.bias, torch.zeros(64))
    gla = mixer("gla")
    assert (gla.decay_out.bias == 0).all(), "a decay of 0.5 ** (1 / 16) = 0.958"
    bounds = build_model(small_config(["hgrn2", "swa"], n_layers=8)).blocks[0].mixer.bounds()
    same(bounds, torch.arange(4.0).div(4).expand(32, 4), rtol=0, atol=1e-6)
    ttt = mixer("ttt_mlp").ttt.network
    assert ttt.weight_0.std().item() == pytest.approx(0.02, rel=0.1) and (ttt.bias_1 == 0).all()


def test_the_inner_learning_rate_of_ttt_mlp_rises_over_a_tenth_of_the_training():
    """It rises from 0.01 to 0.1, as in the authors' code; TTT-Linear's is constant. A token's write is linear in it."""
    x = torch.randn(1, 2, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def written(name: str, done: float | None):
        torch.manual_seed(0)
        model = small_model([name])
        if done is not None:
            model.blocks.set_progress(done)
        return model.blocks[0].mixer(x)[1].ttt.memory.sums[0].detach()

    for done, factor in ((0.0, 0.1), (0.05, 0.55), (0.1, 1.0), (0.5, 1.0), (None, 1.0)):
        same(written("ttt_mlp", done), factor * written("ttt_mlp", 1.0))
        same(written("ttt_linear", done), written("ttt_linear", 1.0))


def test_hgrn2_layers_share_one_parameter():
    model = small_model(["swa", "hgrn2", "swa"], n_layers=6)
    mine = [block.mixer for block in model.blocks if block.mixer.name == "hgrn2"]
    assert [name for name, _ in model.named_parameters() if "logits" in name] == ["blocks.1.mixer.bounds.logits"]
    assert mine[0]._bounds[0] is mine[1]._bounds[0] and [m._layer.item() for m in mine] == [0, 1]


def test_retnet_heads_decay_by_their_number():
    decays = small_model(["retnet"]).blocks[0].mixer.decays(torch.zeros(1, dtype=torch.float64))
    same(decays.exp(), 1 - 2.0 ** -torch.arange(5, 9, dtype=torch.float64))


def test_settings_of_every_mixer_have_docs():
    for name in BASELINES:
        assert all(field.description for field in MIXERS.find(name).Settings.model_fields.values()), name
