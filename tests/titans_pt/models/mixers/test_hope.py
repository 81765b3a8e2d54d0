"""The mixer hope in models: settings, the continuum memory system, ranks and training."""

import numpy as np
import pytest
import torch

from tests.helpers.mixers import small_config, small_model
from tests.helpers.ranks import check_ranks
from tests.titans_pt.parallel.test_split import built_one_by_one, check  # noqa: F401 - a fixture
from titans_pt.config.files import load_config
from titans_pt.errors import UserError
from titans_pt.inspection import inspector
from titans_pt.layers.state import take_rows
from titans_pt.models import build_model
from titans_pt.runs.states import load_state, save_state
from titans_pt.tasks import task_of
from titans_pt.token_plans import put_on
from titans_pt.training.plan import make_plan
from titans_pt.training.probes import memory_probe

MEMORY = {"chunk_size": 4, "expansion": 2, "save_every": 2, "rule": "dgd", "momentum": False}
T = 19


def model(**changes):
    return small_model(["hope"], **{"memory": MEMORY, "mlp_periods": [6], "n_layers": 1} | changes)


def tokens(rows=2, length=T):
    return torch.randint(0, 50, (rows, length), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_it_streams_with_its_continuum_memory_system(tmp_path):
    hope, ids = model(), tokens()
    put_on(hope)
    reset = torch.zeros(2, T, dtype=torch.bool)
    reset[1, 11] = True
    whole, _ = hope(ids, reset=reset)
    parts, state = [], None
    for a, b in ((0, 1), (1, 3), (3, 10), (10, T)):
        out, state = hope(ids[:, a:b], state, reset=reset[:, a:b])
        save_state(state, tmp_path / "state")
        parts, state = [*parts, out], load_state(tmp_path / "state")
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(hope(ids[1:, 11:])[0][0], whole[1, 11:], rtol=1e-9, atol=1e-9)
    alone, one = hope(ids[1:, :2], take_rows(state, torch.tensor([1])))
    both, _ = hope(ids[:, :2], state)
    torch.testing.assert_close(alone[0], both[1], rtol=1e-9, atol=1e-9)
    for t in range(2, 5):  # a token at a time, as generation does
        out, one = hope(ids[1:, t : t + 1], one)
    torch.testing.assert_close(out, hope(ids[:, :5], state)[0][1:, -1:], rtol=1e-9, atol=1e-9)


def test_its_rule_is_the_papers_unless_another_is_given(tiny):
    found = load_config(tiny(), ["model.mixers=[hope]"]).model.memory
    assert (found.rule, found.momentum, found.theta_init) == ("dgd", False, 0.05)
    found = load_config(tiny(), ["model.mixers=[hope]", "model.memory.rule=yaad", "model.memory.momentum=true"])
    assert (found.model.memory.rule, found.model.memory.momentum) == ("yaad", True)
    found = load_config(tiny(), ["model.mixers=[lmm]"]).model.memory
    assert (found.rule, found.momentum, found.theta_init) == ("titans", True, 0.5)


@pytest.mark.parametrize("words, message", [
    (["model.memory.hierarchy={locals: []}"], "model.memory.hierarchy: given 'set'; must be null with the mixer hope"),
    (["model.memory.caching={segment: 8}"], "model.memory.caching: given 'set'; must be null with the mixer hope"),
    (["model.memory.alpha=channel", "model.memory.rule=titans"], "model.memory.alpha: given 'channel'; must be head"),
    (["model.hope.output_gate=relu"], "model.hope.output_gate: given 'relu'"),
    (["model.memory.write_cost=1"], "model.memory.write_cost: given 1.0; must be 0 with the mixer hope"),
    (["parallel.tensor=3"], "parallel.tensor: given 3; must divide"),
])  # fmt: skip
def test_what_does_not_go_together_is_refused(tiny, words, message):
    with pytest.raises(UserError, match=message):
        load_config(tiny(), ["model.mixers=[hope]", *words])


def test_it_is_planned(tiny):
    one, two = (
        make_plan(task_of(load_config(tiny(), ["model.mixers=[hope]", f"parallel.tensor={n}"])), n) for n in (1, 2)
    )
    for kind in ("parameters", "activations"):
        assert two.bytes[kind] < one.bytes[kind]


@pytest.mark.parametrize("sequence", [False, True], ids=["", "sequence"])
def test_tensor_ranks_have_every_gradient_of_the_whole_model(sequence):
    check(small_config(["hope"], memory=MEMORY, n_layers=1), sequence=sequence, reset=True)


def test_training_learns():
    """From its own initialisation, in fp32, it memorises a few rows by steps of constant length."""
    torch.manual_seed(0)
    hope, ids, losses = build_model(small_config(["hope"], memory=MEMORY, n_layers=1)), tokens(4, 13), []
    for _ in range(25):
        logits, _ = hope(ids[:, :-1], output_final_state=False)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        gradients = torch.autograd.grad(loss, list(hope.parameters()))
        norm = torch.stack([g.norm() for g in gradients]).norm()
        with torch.no_grad():
            for p, g in zip(hope.parameters(), gradients, strict=True):
                p.sub_(0.5 * g / norm)
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


@torch.no_grad()
def test_training_logs_its_gates_and_states():
    hope = model(mlp_periods=[])
    with memory_probe(hope) as means:
        hope(tokens())
        found = means()
    assert found["eta"] == 0.0
    assert all(found[name] > 0 for name in ("theta", "alpha", "memory_norm", "surprise"))


@torch.no_grad()
@pytest.mark.parametrize("piece", [512, 5])
def test_inspection_shows_the_main_memories(piece, monkeypatch):
    """The figures agree with the states that the model returns and with its gates."""
    hope, ids = model(mlp_periods=[]), tokens(1)
    monkeypatch.setattr(inspector, "PIECE", piece)
    result = inspector.read(hope, ids[0], ["x"] * T)
    assert list(result.memories) == ["blocks.0.mixer.memory"] and result.surprise.shape == (1, T, 4)
    memory, made, state = hope.blocks[0].mixer.memory, [], None
    memory.gates.register_forward_hook(lambda _module, _given, gates: made.append(gates))
    for t in range(T):
        _, state = hope(ids[:, t : t + 1], state)
        weights = state.blocks[0].memory.weights
        norm = torch.stack([w[0, memory.main].flatten(1).norm(dim=-1) for w in weights]).norm(dim=0)
        np.testing.assert_allclose(result.weight_norm[0, t], norm, rtol=1e-5)
        for name, gate in zip(("theta", "eta", "alpha"), made[-1], strict=True):
            np.testing.assert_allclose(getattr(result, name)[0, t], gate[0].flatten(), rtol=1e-5)
    assert (result.surprise > 0).all()


@pytest.mark.slow
def test_it_trains_under_ranks_and_zero(tiny, tmp_path):
    """Two tensor ranks under ZeRO 2, two ranks under ZeRO 3 and two context ranks give one process's losses; a
    checkpoint is exported and imported."""
    config = tiny(model={"mixers": ["hope"], "mlp_periods": [8], "memory": {"chunk_size": 4}})
    jobs = {
        "two": ["parallel.tensor=2", "parallel.zero_stage=2"], "zero": ["parallel.zero_stage=3"],
        "context": ["parallel.context=2"],
    }  # fmt: skip
    check_ranks(config, tmp_path, jobs)
