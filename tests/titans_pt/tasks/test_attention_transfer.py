"""Attention transfer: converted layers learn from full attention, each by itself."""

import pytest
import torch

from tests.helpers.processes import curve, run_jobs
from tests.helpers.untrained import untrained_run
from titans_pt import cli
from titans_pt.config.files import load_config
from titans_pt.errors import UserError
from titans_pt.parallel import RankGroup
from titans_pt.runs import checkpoints
from titans_pt.runs.conversion import convert_run
from titans_pt.runs.loaded import load_run
from titans_pt.runs.metrics import read_metrics
from titans_pt.tasks import task_of
from titans_pt.tasks.attention_transfer import AttentionTransferLoss
from titans_pt.training import loop
from titans_pt.training.freezing import freeze

ADDED = 'train.trainable=["*.memory*"]'


@pytest.fixture(scope="module")
def source(tmp_path_factory, prepared):
    attention = {"kv_heads": 2, "bias": True}
    return untrained_run(tmp_path_factory.mktemp("transfer") / "source", prepared, mixers=["attention"], n_layers=3,
                         d_model=32, n_heads=4, init_std=0.3, attention=attention)  # fmt: skip


@pytest.fixture(scope="module")
def converted(source):
    return convert_run(source, source.parent / "titans", "titans", 5, 2, [0, 2])


@pytest.fixture
def ids():
    return torch.randint(3, 280, (2, 41), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
@pytest.mark.parametrize("cut", [False, True])
def test_layers_are_given_what_the_source_gives_them(source, converted, ids, cut):
    reset = torch.zeros(2, 40, dtype=torch.bool)
    reset[0, 17] = reset[1, 3] = True
    reset = reset if cut else None
    model, teacher, given = load_run(converted).model, load_run(source).model, []
    for block in model.blocks:
        block.mixer.register_forward_pre_hook(lambda _mixer, x: given.append(x[0]))
    wanted = []
    for block in teacher.blocks:
        block.mixer.register_forward_pre_hook(lambda _mixer, x, _: wanted.append(x[0]), with_kwargs=True)
    teacher(ids[:, :-1], reset=reset)
    weight = torch.tensor([1.0, 0.0])
    found = AttentionTransferLoss(model)(ids, reset, weight)
    assert found.keys() == {"loss", "layer_0", "layer_2"} and {float(value) for value in found.values()} == {1.0}
    for n, x in zip((0, 2), given, strict=True):
        torch.testing.assert_close(x, wanted[n], rtol=1e-4, atol=1e-5)


def test_a_layers_loss_is_its_own(converted, ids):
    model = load_run(converted).model.train()
    torch.manual_seed(0)
    for n in (0, 2):
        torch.nn.init.normal_(model.blocks[n].mixer.memory_share.weight, std=0.1)
    loss = AttentionTransferLoss(model)
    alone = {}
    for n in (0, 2):
        loss.learn = [n]
        value = loss(ids, None)
        names, given = zip(*((name, p) for name, p in model.named_parameters()), strict=True)
        found = torch.autograd.grad(value, given, allow_unused=True)
        grads = {name: g for name, g in zip(names, found, strict=True) if g is not None}
        assert all(name.startswith(f"blocks.{n}.mixer.") for name in grads)
        assert all(grads[f"blocks.{n}.mixer.{name}"].abs().max() > 0 for name in ("memory.k.linear.weight",
                                                                               "memory_share.weight"))  # fmt: skip
        alone[n] = value.item()
    loss.learn = [0, 2]
    assert loss(ids, None).item() == pytest.approx((alone[0] + alone[2]) / 2)


def test_a_memory_learns_what_the_window_lacks(converted, ids):
    """Train on one batch repeatedly: with random attention, other text does not show what the window lacks."""
    model = load_run(converted).model.train()
    for name, p in model.named_parameters():
        p.requires_grad_(".memory" in name)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    loss = AttentionTransferLoss(model)
    for _ in range(30):
        optimizer.zero_grad()
        found = loss(ids[:, :33], None)
        found.backward()
        optimizer.step()
    assert found.item() < 0.9


def test_a_row_of_short_documents_does_not_outweigh_the_others(converted, ids):
    """The window covers short documents completely: little is left to learn, and the loss is small."""
    model = load_run(converted).model.train()
    for n in (0, 2):
        torch.nn.init.normal_(model.blocks[n].mixer.memory_share.weight, std=1e-3)
    reset = torch.zeros(2, 40, dtype=torch.bool)
    loss = AttentionTransferLoss(model)
    usual = loss(ids, reset)
    reset[0, ::3] = True
    found = loss(ids, reset)
    assert found < 2 * usual + 1
    weights = [p for name, p in model.named_parameters() if "memory" in name]
    gradients = torch.autograd.grad(found, weights, allow_unused=True)
    assert all(g is None or g.isfinite().all() for g in gradients)


@pytest.mark.usefixtures("one_group")
def test_it_trains_what_was_added_and_the_run_is_a_language_model(tiny, converted, tmp_path, capsys):
    words = ["task=attention_transfer", f"train.init_from={converted}", ADDED, "train.max_steps=4", "data.seq_len=32",
             "train.weight_decay=0", "train.activation_checkpointing=true"]  # fmt: skip
    model = load_run(converted).config.model.model_dump(mode="json")
    assert loop.train(load_config(tiny(model=model), words)) == 0
    records = read_metrics(tmp_path / "run/metrics.jsonl")
    losses = [r["loss"] for r in records if r["kind"] == "train"]
    assert losses[0] == 1.0 and len(set(losses)) == len(losses)
    (validation,) = (r for r in records if r["kind"] == "validation")
    assert validation["validation_layer_2"] != 1.0
    before, after = (
        checkpoints.read_weights(checkpoints.find(f / "checkpoints")) for f in (converted, tmp_path / "run")
    )
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all(".memory" in name for name in changed)
    assert cli.run(["evaluate", str(tmp_path / "run"), "--suite", "perplexity", "evaluation.perplexity.tokens=64"]) == 0
    words = [f"train.init_from={tmp_path / 'run'}", f"run.dir={tmp_path / 'two'}", "train.max_steps=3", ADDED]
    assert loop.train(load_config(tiny(model=model), words)) == 0


@pytest.mark.slow
def test_ranks_agree(tiny, converted, tmp_path):
    """A source with two key heads: on two tensor ranks, on two data ranks, and under ZeRO 3."""
    model = load_run(converted).config.model.model_dump(mode="json")
    train = {"max_steps": 4, "init_from": str(converted), "trainable": ["*.memory*"]}
    config = tiny(model=model, task="attention_transfer", train=train, data={"seq_len": 32})
    ways = {"tensor": ["parallel.tensor=2"], "data": [], "sharded": ["parallel.zero_stage=3"]}
    run_jobs(2, config, tmp_path, ways)
    tensor, data, sharded = (curve(tmp_path / way, "loss", "grad_norm") for way in ways)
    assert tensor[0][1] == pytest.approx(1.0, abs=1e-6)
    for other in (tensor, sharded):
        for one, two in zip(other, data, strict=True):
            assert one == pytest.approx(two, rel=2e-4)


@pytest.mark.parametrize(("words", "message"), [
    ([ADDED, "model.mixers=[swa]"], r"task: given 'attention_transfer'; only with mab in model.mixers=\['swa'\]"),
    (["model.mixers=[mab]"], r"train.trainable: given \[\]; must name what the layers add to attention"),
    ([ADDED, "model.mixers=[mab,swa]", "parallel.context=2"], "parallel.context: given 2; not with task="),
    ([ADDED, "model.mixers=[mab,swa]", "train.z_loss=0.1"], "train.z_loss: given 0.1; not with task="),
    ([ADDED, "model.mixers=[mab,swa]", "model.memory.write_cost=0.1"], "model.memory.write_cost: given 0.1; not with"),
    ([ADDED, "model.mixers=[mab,swa]", "model.window=16"], "data.seq_len: given 16; above 16, model.window and"),
    ([ADDED, "model.mixers=[mab,swa]", "model.mlp_periods=[8]"], r"model.mlp_periods: given \[8\]; not with task="),
    ([ADDED, "model.mixers=[mab,swa]", "train.wavefront=8"], "train.wavefront: given 8; not with task="),
])  # fmt: skip
def test_what_it_cannot_do_is_refused(tiny, words, message):
    with pytest.raises(UserError, match=message):
        load_config(tiny(), ["task=attention_transfer", *words])


@pytest.mark.parametrize(("pattern", "named"), [("*.mlp.*", "and 8 more"), ("blocks.1.mixer.out.*", "names b")])
def test_parameters_that_the_loss_does_not_reach_are_refused(tiny, converted, pattern, named):
    """Under ZeRO these parameters have gradients of zero, and weight decay would shrink them."""
    words = ["task=attention_transfer", f'train.trainable=["{pattern}", "*.memory*"]', "model.mixers=[mab,swa]"]
    task = task_of(load_config(tiny(), words))
    model = load_run(converted).model
    freeze(model, task.config.train.trainable)
    with pytest.raises(UserError, match=f"train.trainable: given .*{named}.*, but task=.* teaches mixers"):
        task.objective(model, RankGroup(0, 1))
    freeze(model, ["*.memory*"])
    task.objective(model, RankGroup(0, 1))
