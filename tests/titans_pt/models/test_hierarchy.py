"""Models with a hierarchy of memories: tensor ranks, streaming, the plan, refused settings."""

import pytest
import torch

from tests.helpers.mixers import small_config
from tests.titans_pt.parallel.test_split import built_one_by_one, check  # noqa: F401 - a fixture
from titans_pt import cli
from titans_pt.config import HierarchyConfig
from titans_pt.config.files import load_config
from titans_pt.errors import UserError
from titans_pt.models import build_model
from titans_pt.runs.loaded import load_run
from titans_pt.tasks import task_of
from titans_pt.training.plan import make_plan

MIXERS = ["lmm", "mag", "mal"]


def config(mixer, **changes):
    base = small_config([mixer], **changes)
    levels = HierarchyConfig(chunk=4, shard=8, locals=[2, 4])
    return base.model_copy(update={"memory": base.memory.model_copy(update={"hierarchy": levels})})


@pytest.mark.parametrize("mixer", MIXERS)
def test_tensor_ranks_have_every_gradient_of_the_whole_model(mixer):
    check(config(mixer), reset=True)


def test_mac_is_not_built_around_a_hierarchy():
    with pytest.raises(ValueError, match="memory.hierarchy: given one; must be None for mac"):
        build_model(config("mac"))


@pytest.mark.parametrize("mixer", MIXERS)
def test_streams_equal_one_call(mixer):
    torch.manual_seed(0)
    model = build_model(config(mixer)).double().eval()
    ids = torch.randint(52, (2, 40))
    reset = torch.rand(2, 40) < 0.1
    with torch.no_grad():
        whole, _ = model(ids, reset=reset)
        state, pieces = None, []
        for a, b in ((0, 1), (1, 8), (8, 21), (21, 40)):
            logits, state = model(ids[:, a:b], state, reset=reset[:, a:b])
            pieces.append(logits)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=0, atol=1e-9)


@pytest.mark.parametrize("gpu", [False, True])
def test_it_is_planned(gpu, tiny):
    model = {"d_model": 64, "mixers": ["lmm"], "memory": {"hierarchy": {"chunk": 64, "shard": 128, "locals": [16]}}}

    def plan(length):
        train = {"precision": "bf16" if gpu else "fp32", "batch_tokens": length}
        return make_plan(task_of(load_config(tiny(model=model, train=train, data={"seq_len": length}))), 1, gpu).bytes

    short, long = plan(256), plan(512)
    assert 1.8 < long["activations"] / short["activations"] < 2.2
    if not gpu:  # on a GPU the local memories' kernels recompute states
        assert 1.9 < long["memory states"] / short["memory states"] < 2.1


@pytest.mark.parametrize(("word", "message"), [
    ("model.mixers=[mac]", "model.memory.hierarchy: given 'set'; must be null for mac"),
    ("model.memory.hierarchy.shard=12", "model.memory.hierarchy.shard: given 12; must be a multiple of"),
    ("model.memory.hierarchy.chunk=16", "model.memory.hierarchy.chunk: given 16; below data.seq_len=16"),
    ("model.memory.hierarchy.locals=[4,32]", "each at most model.memory.hierarchy.shard=8"),
    ("model.memory.hierarchy.final_locals=[8]", r"final_locals: given [8]; one for each of .*locals=[4], none larger"),
    ("model.memory.hierarchy.final_locals=[2,2]", "final_locals: given [2, 2]; one for each of"),
    ("model.memory.alpha=channel", "model.memory.alpha: given 'channel'; must be head with model.memory.hierarchy"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(word, message, tiny):
    path = tiny(model={"mixers": ["lmm"], "memory": {"hierarchy": {"chunk": 8, "shard": 8, "locals": [4]}}})
    load_config(path)
    with pytest.raises(UserError, match=message.replace("[", r"\[")):
        load_config(path, [word])


@pytest.mark.thorough
@pytest.mark.usefixtures("one_group")
def test_a_run_changes_its_chunks_once_and_is_read_with_the_last_ones(tiny, tmp_path):
    levels = {"chunk": 4, "shard": 8, "locals": [4], "final_locals": [1], "final_share": 0.3}
    words = ["wandb.mode=disabled", "train.max_steps=10", "train.checkpoint_every=5", f"run.dir={tmp_path / 'run'}"]
    path = tiny(model={"mixers": ["lmm"], "memory": {"hierarchy": levels, "expansion": 2}})
    assert cli.run(["train", str(path), *words, "train.stop_at=5"]) == 0
    assert chunks(load_run(tmp_path / "run").model) == [4]
    assert cli.run(["train", str(path), *words]) == 0
    run = load_run(tmp_path / "run")
    assert run.step == 10 and chunks(run.model) == [1]
    whole = [*words[:-1], f"run.dir={tmp_path / 'whole'}"]
    assert cli.run(["train", str(path), *whole]) == 0
    other = load_run(tmp_path / "whole").model.state_dict()
    assert all(torch.equal(p, other[name]) for name, p in run.model.state_dict().items())


def chunks(model):
    return [memory.chunk for memory in model.blocks[0].mixer.memory.memories[1:]]
