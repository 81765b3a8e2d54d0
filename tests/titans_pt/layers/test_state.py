"""Rows of states can be selected, repeated and reordered."""

import pytest
import torch

from tests.conftest import TINY, merged
from tests.helpers.mixers import own_settings
from titans_pt.config import Config
from titans_pt.layers.state import take_rows, tensors
from titans_pt.models import build_model
from titans_pt.models.mixers import MIXERS


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
