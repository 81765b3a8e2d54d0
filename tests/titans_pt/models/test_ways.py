"""Ways are put on a backbone from outside, in a fixed order, and removed again."""

import copy

import pytest
import torch

from tests.helpers.mixers import small_model


def watched(name, seen, takes=False):
    def way(backbone, blocks, states, x, state, documents):
        seen.append((name, states, x.shape[1]))
        return (x, state) if takes else blocks(x, state, documents)

    return way


@torch.no_grad()
@pytest.mark.parametrize("mixer", ["lmm", "rmt"])
def test_ways_lie_in_each_other_in_one_order(mixer):
    """RMT's own way is outside all others, which get segments of 8 tokens with 3 memory tokens on either side."""
    model, seen = small_model([mixer]), []
    ids = torch.randint(0, 50, (2, 16))
    expected, _ = model(ids)
    for name in ("context", "compiled", "wavefront"):  # the order of these calls has no effect
        model.blocks.put_on(name, watched(name, seen))
    found, _ = copy.deepcopy(model)(ids)
    assert torch.equal(found, expected)
    lengths = [14, 14] if mixer == "rmt" else [16]
    assert seen == [(name, True, n) for n in lengths for name in ("context", "wavefront", "compiled")]
    seen.clear()
    model.blocks.put_on("wavefront", watched("wavefront", seen, takes=True))
    model(ids, output_final_state=False)
    assert seen == [(name, False, n) for n in lengths for name in ("context", "wavefront")]
    seen.clear()
    for name in ("context", "compiled", "wavefront"):
        model.blocks.put_on(name, None)
    assert torch.equal(model(ids)[0], expected) and seen == []


def test_a_way_of_another_name_is_refused():
    with pytest.raises(ValueError, match="name: given 'sideways'; allowed: compiled, wavefront, context, around"):
        small_model(["lmm"]).blocks.put_on("sideways", None)
