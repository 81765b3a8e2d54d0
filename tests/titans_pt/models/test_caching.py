"""Models with cached memories: streams, state files, tensor ranks, FLOPs, the plan, export, refused settings."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.helpers.mixers import small_config, small_model
from tests.titans_pt.parallel.test_split import built_one_by_one, check  # noqa: F401 - a fixture
from titans_pt.config import MemoryConfig
from titans_pt.config.files import load_config
from titans_pt.errors import UserError
from titans_pt.layers.memory import NeuralMemory
from titans_pt.runs.states import load_state, save_state
from titans_pt.tasks import task_of
from titans_pt.training.plan import make_plan

MIXERS = ["lmm", "mac", "mag", "mal", "mab"]
CHANGE = {"shares": "change", "fresh": True}
every_mixer = pytest.mark.parametrize("mixer", MIXERS)


def cached(**caching):
    return {"chunk_size": 4, "expansion": 2, "caching": {"segment": 4, "slots": 3, **caching}}


@every_mixer
@pytest.mark.parametrize("form", [{}, {"shares": "sparse", "top": 1, "soup": True}, CHANGE], ids=str)
def test_streams_equal_one_call_and_their_state_is_kept_in_a_file(mixer, form, tmp_path):
    model = small_model([mixer], memory=cached(**form))
    ids = torch.randint(52, (2, 40))
    reset = torch.rand(2, 40) < 0.1
    with torch.no_grad():
        whole, _ = model(ids, reset=reset)
        state, pieces = None, []
        for a, b in ((0, 1), (1, 8), (8, 21), (21, 40)):
            logits, state = model(ids[:, a:b], state, reset=reset[:, a:b])
            save_state(state, tmp_path / "state")
            state = load_state(tmp_path / "state")
            pieces.append(logits)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=0, atol=1e-9)


@every_mixer
def test_a_later_token_changes_nothing_before_it(mixer):
    model, ids = small_model([mixer], memory=cached()), torch.randint(52, (2, 30))
    with torch.no_grad():
        before, _ = model(ids)
        for place in (4, 17, 24):
            changed = ids.clone()
            changed[0, place] = (ids[0, place] + 1) % 52
            after, _ = model(changed)
            assert torch.equal(after[:, :place], before[:, :place]) and torch.equal(after[1], before[1])
            assert not torch.equal(after[0, place:], before[0, place:])


@pytest.mark.parametrize(
    ("mixer", "form"), [("lmm", {}), ("mac", {}), ("mag", {}), ("mal", {}), ("lmm", CHANGE), ("mac", CHANGE)]
)
def test_tensor_ranks_have_every_gradient_of_the_whole_model(mixer, form):
    check(small_config([mixer], memory=cached(**form)), reset=True)


@pytest.mark.parametrize("form", [{}, {"soup": True}, {"shares": "average"}, {"shares": "change"}, CHANGE], ids=str)
def test_its_products_are_counted(form):
    length, heads = 28, 2
    found = []
    for caching in (None, {"segment": 8, "slots": 2, **form}):
        # With an alpha per channel, PyTorch's operators serve every read; the counter counts only these.
        config = MemoryConfig(chunk_size=8, expansion=2, alpha="channel", caching=caching)
        memory = NeuralMemory(16, heads, 1, config, 1e-5)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            memory(torch.randn(1, length, 16))
        found.append((counter.get_total_flops(), memory.flops(length).forward * length))
    (plain, plain_counted), (seen, counted) = found
    assert seen - plain == pytest.approx(counted - plain_counted, rel=1e-12)
    # 8 tokens with no cache, 8 with one, 12 with two: 32 reads of an 8 -> 16 -> 8 network, and as many scores. With
    # shares=change, 20 tokens also read M_0.
    read = (52 if form.get("shares") == "change" else 32) * heads * 2 * (2 * 8 * 16)
    learned = 0 if form.get("shares") else length * 2 * 16 * 16 + 32 * 2 * 16
    assert counted - plain_counted == read + learned


def test_sparse_shares_count_the_caches_that_count():
    def memory(**caching):
        config = MemoryConfig(chunk_size=8, caching={"segment": 8, "slots": 8, **caching})
        return NeuralMemory(16, 2, 4, config, 1e-5)

    every, some = memory(), memory(shares="sparse", top=2)
    assert every.caching.mean_read(64) == (3.5, 3.5)
    assert some.caching.mean_read(64) == (3.5, (0 + 1 + 6 * 2) / 8)
    assert some.flops(64).total < every.flops(64).total


@pytest.mark.parametrize("gpu", [False, True])
def test_it_is_planned(gpu, tiny):
    """Activations grow with each cache, and double with twice the tokens once all slots are taken."""

    def plan(length, caching):
        model = {"d_model": 64, "mixers": ["lmm"], "memory": {"caching": caching}}
        train = {"precision": "bf16" if gpu else "fp32", "batch_tokens": length}
        config = load_config(tiny(model=model, train=train, data={"seq_len": length}))
        found = make_plan(task_of(config), 1, gpu).bytes
        return found["activations"] + found.get("memory states", 0), found["parameters"]

    none, one, two = (
        plan(256, caching) for caching in (None, {"segment": 32, "slots": 1}, {"segment": 32, "slots": 2})
    )
    assert none[0] < one[0] < two[0] and none[1] < one[1] == two[1]
    assert 1.9 < plan(512, {"segment": 32, "slots": 2})[0] / two[0] < 2.2


def test_tensor_ranks_hold_a_part_of_its_parameters(tiny):
    words = ["model.mixers=[lmm]", "model.memory.caching={segment: 4}", "model.memory.chunk_size=4"]
    one, two = (make_plan(task_of(load_config(tiny(), [*words, f"parallel.tensor={n}"])), n) for n in (1, 2))
    assert two.bytes["parameters"] < one.bytes["parameters"]


@pytest.mark.parametrize(("word", "message"), [
    ("segment=6", "model.memory.caching.segment: given 6; must be a multiple of model.memory.chunk_size=4"),
    ("segment=16", "model.memory.caching.segment: given 16; below data.seq_len=16"),
    ("soup=true", "soup: given True with shares='sum'"),
    ("slots=0", "model.memory.caching.slots: given 0"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(word, message, tiny):
    caching = {"segment": 4, "shares": "sum"}
    path = tiny(model={"mixers": ["lmm"], "memory": {"chunk_size": 4, "caching": caching}})
    load_config(path)
    with pytest.raises(UserError, match=message):
        load_config(path, [f"model.memory.caching.{word}"])
    with pytest.raises(UserError, match="model.memory.caching: given 'set'; must be null with model.memory.hierarchy"):
        load_config(path, ["model.memory.hierarchy={chunk: 4, shard: 4, locals: [4]}"])
    with pytest.raises(UserError, match="top: given 4; at most slots=2"):
        load_config(path, ["model.memory.caching.shares=sparse", "model.memory.caching.slots=2"])


def test_the_usual_segment_fits(tiny):
    path = tiny(model={"mixers": ["lmm"], "memory": {"chunk_size": 4}})
    config = load_config(path, ["model.memory.caching={}"])
    assert (config.data.seq_len, config.model.memory.caching.segment) == (16, 8)
