"""A cost of writing: the gates that it reads, the gradient that it adds, tasks without answers."""

import pytest
import torch

from titans_pt.config.files import load_config
from titans_pt.errors import UserError
from titans_pt.layers.memory_gates import MemoryGates
from titans_pt.models import build_model
from titans_pt.models.mixers.ttt import TTTMixerState
from titans_pt.parallel import RankGroup
from titans_pt.tasks import TASKS
from titans_pt.tasks.writing import with_write_cost, write_gates

MODEL = ["model.mixers=[lmm,swa]", "model.d_model=16", "model.n_layers=2", "model.vocab_size=64"]


def test_gates_are_shares_of_the_step_bound():
    torch.manual_seed(0)
    model = build_model(load_config("configs/recall.yaml", MODEL).model)
    with write_gates(model) as gates:
        model(torch.arange(30).view(3, 10))
    assert [len(gate) for gate in gates] == [3], "one memory over the rows; its persistent tokens do not count"
    for gate in gates:
        assert gate.min() > 0 and gate.max() < 1
        assert float(gate.mean()) == pytest.approx(0.5, abs=0.1), "model.memory.theta_init"
    with write_gates(model, collect=False) as none:
        model(torch.zeros(3, 10, dtype=torch.int64))
    assert none == []


@pytest.mark.parametrize("words", [
    ["model.memory.depth=3"], ["model.memory.rule=omega"], ["model.memory.rule=moneta"], ["model.memory.gates=sigmoid"],
])  # fmt: skip
def test_gates_are_what_the_token_decides_not_what_its_step_is_scaled_by(words):
    """Longer values or other gates of the rule, which lower theta, do not look like writing less."""
    torch.manual_seed(0)
    model = build_model(load_config("configs/recall.yaml", [*MODEL, *words]).model)
    memory, ids = model.blocks[0].mixer.memory, torch.arange(30).view(3, 10)
    found = []
    for longer in (1.0, 30.0):
        with torch.no_grad():
            memory.v.linear.weight.mul_(longer)
            if memory.gates.own is not None:
                memory.gates.own.bias.add_(longer)
        with write_gates(model) as gates:
            model(ids)
        found.append(gates)
    assert all(map(torch.equal, *found))


GATED = ["deltanet", "gated_deltanet", "deltaproduct", "kda", "gdn2", "ttt_linear", "ttt_mlp"]


@pytest.mark.parametrize("mixer", GATED)
def test_gates_of_other_mixers_are_the_share_that_they_write(mixer):
    """Closed gates write nothing: the state stays at its start."""
    torch.manual_seed(0)
    model = build_model(load_config("configs/recall.yaml", [f"model.mixers=[{mixer}]", *MODEL[1:]]).model)
    ids = torch.arange(30).view(3, 10)
    with write_gates(model) as gates:
        model(ids)
    assert len(gates) == 2 and all(len(gate) == 3 and gate.min() > 0 and gate.max() < 1 for gate in gates)
    block = model.blocks[0].mixer
    with torch.no_grad():
        linear = block.get_submodule(block.write_gate)
        linear.weight.zero_()
        (linear.bias if linear.bias is not None else linear.weight).fill_(-1e9)
    x = torch.rand(3, 10, 16)  # positive: without a bias the gate is sigmoid(-1e9 x)
    with write_gates(model) as gates:
        _, state = block(x)
    assert gates[0].max() == 0
    written = state.ttt.memory.sums if isinstance(state, TTTMixerState) else [state.memory]
    assert all(x.abs().max() == 0 for x in written)


def test_mixers_without_a_gate_ignore_it():
    model = build_model(load_config("configs/recall.yaml", ["model.mixers=[swa,mamba2]", *MODEL[1:]]).model)
    with write_gates(model) as gates:
        model(torch.arange(30).view(3, 10))
    assert gates == []


def test_the_gradient_is_that_of_the_weighted_mean_and_the_value_stays():
    gates = [torch.rand(2, 3, 4, requires_grad=True), torch.rand(4, 5, requires_grad=True),
             torch.rand(1, 6, requires_grad=True)]  # fmt: skip
    loss, rows = torch.tensor(1.5), torch.tensor([1.0, 0.0])
    found = with_write_cost(loss, gates, 2.0, rows)
    assert float(found) == 1.5
    found.backward()
    count = 24 + 20 + 6
    assert torch.allclose(gates[0].grad, (2.0 / count) * torch.tensor([1.0, 0.0])[:, None, None].expand(2, 3, 4))
    assert torch.allclose(gates[1].grad, (2.0 / count) * torch.tensor([1.0, 1.0, 0.0, 0.0])[:, None].expand(4, 5))
    assert torch.allclose(gates[2].grad, torch.full((1, 6), 2.0 * 0.5 / count)), "no row's own: the mean weight"
    assert with_write_cost(loss, [], 2.0) is loss and with_write_cost(loss, gates, 0.0) is loss


def test_language_pays_at_every_token():
    def gradient(cost, again=False):
        words = [*MODEL, "task=language", "train.stop_when=null", f"model.memory.write_cost={cost}"]
        task = TASKS.find("language")(load_config("configs/recall.yaml", words))
        torch.manual_seed(0)
        loss = task.objective(task.build_model(), RankGroup())
        loss.model.blocks.set_activation_checkpointing(again)
        value = loss(torch.arange(2 * 11).view(2, 11) % 64, None)
        value.backward()
        (gates,) = (module for module in loss.model.modules() if isinstance(module, MemoryGates))
        return float(value), gates.linear.bias.grad

    (free, before), (dear, after) = gradient(0), gradient(3)
    assert free == dear and float(after[0] - before[0]) > 0.01, "descent then lowers the gate"
    value, checkpointed = gradient(3, again=True)
    assert value == dear and torch.allclose(checkpointed, after, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("mixer", ["lmm", "mag", "mal", "mac", "lmm+hierarchy"])
def test_the_cost_is_the_same_in_any_micro_batches(mixer):
    """One micro-batch of four rows or two of two rows: persistent tokens are written once in each."""
    name, _, levels = mixer.partition("+")
    words = [f"model.mixers=[{name}]", *MODEL[1:], "task=language", "train.stop_when=null", "model.persistent_tokens=7",
             "model.memory.write_cost=5", *(["model.memory.hierarchy={}"] if levels else [])]  # fmt: skip
    task = TASKS.find("language")(load_config("configs/recall.yaml", words))
    torch.manual_seed(0)
    loss = task.objective(task.build_model(), RankGroup()).double()
    ids = torch.randint(64, (4, 33))

    def gradients(size):
        loss.zero_grad()
        for part in ids.split(size):
            (loss(part, None) * size / 4).backward()
        return {name: p.grad.clone() for name, p in loss.named_parameters() if p.grad is not None}

    whole, parts = gradients(4), gradients(2)
    assert whole and max(float((whole[name] - parts[name]).abs().max()) for name in whole) < 1e-9


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.memory.write_cost=0.1", "train.compile=true"], "train.compile: .*write_cost"),
        (["model.memory.write_cost=0.1", "model.memory.theta=free"], "model.memory.write_cost: .*theta=bounded"),
        (["train.stop_when=accuracy > 0.99"], "train.stop_when: given 'accuracy > 0.99'; write it as in"),
        (["train.stop_when=accuracy >= e"], "train.stop_when: given 'accuracy >= e'; write it as in"),
        (["train.stop_when=bleu >= 1"], "train.stop_when: .*figures of task=recall: loss, accuracy"),
    ],
)
def test_what_does_not_go_together_is_refused(words, message):
    with pytest.raises(UserError, match=message):
        load_config("configs/recall.yaml", [*MODEL, *words])
