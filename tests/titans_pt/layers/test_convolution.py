"""The short convolution against a loop, in pieces, with documents, and compiled."""

import pytest
import torch

from titans_pt.config.files import load_config
from titans_pt.layers.convolution import ShortConvolution
from titans_pt.layers.documents import Documents
from titans_pt.models.language_model import LanguageModel

T, CHANNELS = 11, 3


def by_hand(x, weight, reset):
    """y_t = sum_l w_l x_{t-l}, back to the start of t's document; conv1d has its last tap at the newest token."""
    y = torch.zeros_like(x)
    for row in range(len(x)):
        start = 0
        for t in range(x.shape[1]):
            start = t if reset is not None and reset[row, t] else start
            for lag in range(min(weight.shape[1], t - start + 1)):
                y[row, t] += weight[:, weight.shape[1] - 1 - lag] * x[row, t - lag]
    return y


@pytest.fixture
def case():
    torch.manual_seed(0)
    reset = torch.zeros(2, T, dtype=torch.bool)
    reset[0, [0, 4, 5]] = reset[1, 9] = True
    return ShortConvolution(CHANNELS, 4).double(), torch.randn(2, T, CHANNELS, dtype=torch.float64), reset


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("cut", [1, 2, 5, T])
def test_by_hand_in_pieces(case, documents, cut):
    conv, x, reset = case
    reset = reset if documents else None
    state, outputs = None, []
    for first in range(0, T, cut):
        piece = slice(first, first + cut)
        y, state = conv(x[:, piece], state, None if reset is None else Documents.of(reset[:, piece], x.device))
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, 1), by_hand(x, conv.weight, reset))


def test_compiled(case):
    conv, x, _ = case
    state = torch.randn(2, 3, CHANNELS, dtype=torch.float64)
    y, after = torch.compile(conv, fullgraph=True, backend="aot_eager")(x, state)
    expected, end = conv(x, state)
    torch.testing.assert_close(y, expected)
    assert torch.equal(after, end)


def test_width_one_is_nothing(case):
    _, x, _ = case
    y, state = ShortConvolution(CHANNELS, 1)(x)
    assert y is x and state.shape == (2, 0, CHANNELS)


@pytest.mark.parametrize("mixer", ["lmm", "gated_deltanet", "mamba2", "longhorn"])
def test_the_filters_of_values_begin_as_asked(mixer):
    """The setting holds for every mixer, and all other weights are unchanged."""
    words = ["model.d_model=32", "model.n_layers=1", "model.vocab_size=32", f"model.mixers=[{mixer}]"]
    models = {}
    for filters in ("own", "identity", "random"):
        torch.manual_seed(0)
        models[filters] = LanguageModel(load_config("quickstart", [*words, f"model.value_filters={filters}"]).model)
    (name,) = [name for name, module in models["own"].named_modules() if getattr(module, "of_values", False)]
    own, identity, drawn = (model.state_dict() for model in models.values())
    start = torch.eye(4)[-1].expand_as(own[f"{name}.weight"])
    assert torch.equal(identity[f"{name}.weight"], start)
    assert torch.equal(own[f"{name}.weight"], start) == (mixer == "lmm")
    assert 0.45 < drawn[f"{name}.weight"].abs().max() <= 0.5
    for other in own:
        if not other.startswith(f"{name}."):
            assert torch.equal(own[other], identity[other]) and torch.equal(own[other], drawn[other]), other


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("width", [1, 4])
def test_it_can_begin_as_the_identity(width, bias):
    conv, x = ShortConvolution(CHANNELS, width, bias), torch.randn(2, T, CHANNELS)
    conv.begin_as_identity()
    torch.testing.assert_close(conv(x)[0], x)
