"""Rows of states can be selected, repeated and reordered."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.conftest import TINY, merged
from tests.helpers.mixers import form, own_settings, small_model
from titans_pt.config import Config
from titans_pt.errors import UserError
from titans_pt.layers.state import declared_states, join_rows, moved, take_rows, tensors
from titans_pt.models import build_model
from titans_pt.models.mixers import MIXERS
from titans_pt.token_plans import put_on


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("mixer", MIXERS.built_in())
def test_rows_that_were_taken_go_on_as_they_would_have(mixer, cut):
    """Every mixer's state continues after a selection of rows, whether or not the rows began together."""
    torch.manual_seed(0)
    settings = own_settings([mixer]) | {"mixers": [mixer], "n_layers": 2}
    model = build_model(Config.model_validate(merged(TINY, {"model": settings})).model)
    ids = torch.randint(3, 280, (5, 17))
    reset = torch.arange(17) == torch.tensor([[0], [3], [9], [5], [16]]) if cut else None
    index = torch.tensor([4, 1, 1, 3, 0, 2, 4])
    with torch.no_grad():
        _, state = model(ids, reset=reset)
        more = torch.randint(3, 280, (5, 6))
        expected, _ = model(more, state)
        taken = take_rows(state, index)
        found, _ = model(more[index], taken)
    torch.testing.assert_close(found, expected[index])
    places = {tensor.untyped_storage().data_ptr() for tensor in tensors(state) if tensor.numel()}
    assert not any(tensor.untyped_storage().data_ptr() in places for tensor in tensors(taken) if tensor.numel())


VARIANTS = [
    {"mixers": ["swa", "mac"], "attention": {"sinks": 2}},
    {"mixers": ["mag", "mac"], "persistent_tokens": 0},
    {"mixers": ["hope", "lmm"], "mlp_periods": [4, 8]},
    {"mixers": ["lmm", "mag"], "memory": {"hierarchy": {"chunk": 8, "shard": 16, "locals": [2, 4]}}},
    {"mixers": ["lmm", "mal"], "memory": {"chunk_size": 4, "rule": "atlas", "atlas": {"window": 3}}},
    {"mixers": ["lmm", "mac"], "memory": {"chunk_size": 4, "caching": {"segment": 4, "slots": 3}}},
    {"mixers": ["lmm", "mag"], "memory": {"caching": {"segment": 16, "shares": "change", "fresh": True}}},
    {"mixers": ["lmm"], "memory": {"chunk_size": 4, "caching": {"segment": 4, "shares": "sparse", "top": 1}}},
]


@torch.no_grad()
def _join_and_go_on(model, reads: tuple[int, int]):
    """Join three rows that documents have cut, after ``reads[0]`` tokens, with two that have read ``reads[1]``; each
    must go on as it would have alone, over many tokens at once and token by token."""
    first, second, more = (torch.randint(3, 50, shape) for shape in ((3, reads[0]), (2, reads[1]), (5, 13)))
    reset = torch.arange(reads[0]) == torch.tensor([[0], [3], [reads[0] - 2]])
    states = [model(first, reset=reset)[1], model(second)[1]]
    put_on(model.blocks)
    expected = torch.cat([model(rows, state)[0] for rows, state in zip(more.split([3, 2]), states, strict=True)])
    joined = join_rows(states)
    torch.testing.assert_close(model(more, joined)[0], expected)
    found, state = [], joined
    for token in more.split(1, 1):
        logits, state = model(token, state)
        found.append(logits)
    torch.testing.assert_close(torch.cat(found, 1), expected)
    begins = torch.arange(13) == torch.tensor([[20], [5], [20], [0], [20]])
    cut = [y.split([3, 2]) for y in (more, begins)]
    separate = [model(ids, state, reset)[0] for ids, reset, state in zip(*cut, states, strict=True)]
    torch.testing.assert_close(model(more, joined, begins)[0], torch.cat(separate))
    back = join_rows([take_rows(joined, torch.tensor([row])) for row in range(5)])
    torch.testing.assert_close(model(more, back)[0], expected)
    places = {tensor.untyped_storage().data_ptr() for one in states for tensor in tensors(one) if tensor.numel()}
    assert not any(tensor.untyped_storage().data_ptr() in places for tensor in tensors(joined) if tensor.numel())


@pytest.mark.parametrize("mixer", MIXERS.built_in())
def test_joined_rows_go_on_as_they_would_have(mixer):
    """Streams may be in different places of their chunks and segments, and have read unequally many tokens."""
    model = small_model([mixer])
    for reads in ((18, 18), (18, 7), (7, 18)):
        _join_and_go_on(model, reads)


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_joined_rows_of_other_forms_of_state(settings):
    model = small_model(**{"mixers": ["lmm"], **settings})
    for reads in ((18, 18), (18, 7), (7, 18)):
        _join_and_go_on(model, reads)


@torch.no_grad()
@pytest.mark.parametrize("mixer", ["attention", "swa", "mag", "mal", "retnet", "lmm"])
def test_a_stream_leaves_as_it_came(mixer):
    """Nothing of the streams that it was joined with stays in its state."""
    model = small_model([mixer])
    long, short = (model(torch.randint(3, 50, (2, tokens)))[1] for tokens in (18, 3))
    more = torch.randint(3, 50, (4, 4))
    joined = model(more, join_rows([long, short]))[1]
    alone = model(more[2:], short)[1]
    back = take_rows(joined, torch.tensor([2, 3]))
    assert form(back) == form(alone)
    for found, expected in zip(tensors(back), tensors(alone), strict=True):
        torch.testing.assert_close(found, expected)


def test_what_is_not_joined():
    def state(seed=0, tokens=5, dtype=torch.float64, **settings):
        model = small_model(["mag"], **settings).to(dtype)
        if seed:
            model.embedding.weight.data.add_(1), model.blocks[0].mixer.persistent.data.add_(1)
        return model(torch.arange(tokens)[None] + 3)[1]

    for others, words in (
        ([], "states: given none"),
        ([state(), state(window=4, tokens=9)], r"blocks.0.attention.k is torch.float64 \(5, 4, 8\) on cpu"),
        ([state(), state(window=4)], r"blocks.0.attention.k is torch.float64 \(5, 4, 8\) on cpu"),
        ([state(), state(dtype=torch.float32)], "one and torch.float32"),
        ([state(), state().blocks], "the whole is LanguageModelState of 1 in one and list of 2"),
        ([state(), state(seed=1)], "blocks.0.memory.start differs; .* with the same weights"),
    ):
        with pytest.raises(UserError, match=words):
            join_rows(others)


def test_a_state_says_both_how_rows_are_taken_and_joined():
    class Half:
        def take_rows(self, index):
            return self

    with pytest.raises(TypeError, match="Half: has a method take_rows, but no static method join_rows"):
        join_rows([Half()])


def test_a_forward_may_declare_its_state_for_type_checkers_alone():
    def named(x, state: "dict | None" = None): ...

    def unknown(x, state: "Nowhere" = None): ...  # noqa: F821

    assert declared_states(named) == (dict,) and declared_states(unknown) == (object,)


def test_gradients_flow_through_joined_rows():
    model = small_model(["mac", "lmm"])
    first, second, more = (torch.randint(3, 50, shape) for shape in ((2, 9), (1, 9), (3, 6)))
    states = [model(ids)[1] for ids in (first, second)]
    parameters = list(model.parameters())
    together = torch.autograd.grad(model(more, join_rows(states))[0].square().sum(), parameters, retain_graph=True)
    separate = sum(model(ids, state)[0].square().sum() for ids, state in zip(more.split([2, 1]), states, strict=True))
    torch.testing.assert_close(together, torch.autograd.grad(separate, parameters))


def test_integers_of_a_state_come_back_to_the_host():
    """Kernels of a GPU leave the offset there; a state that was loaded has it on the host."""
    with FakeTensorMode():
        host, gpu = (torch.zeros(2, dtype=torch.int64, device=device) for device in ("cpu", "cuda"))
        assert moved(gpu, "cpu").device == moved(gpu, "cuda").device == host.device
        assert join_rows([host, gpu]).shape == (4,)
