"""The single-token steps against PyTorch's operators, in float64, for odd sizes and several rows."""

import pytest
import torch
import torch.nn.functional as F

from titans_pt.config import MemoryConfig
from titans_pt.kernels import norm
from titans_pt.kernels.one_token import Map, Maps, Rotation, add, blend, memory_gates, unserved
from titans_pt.layers.memory_gates import STRETCH, MemoryGates
from titans_pt.layers.rotary import rotate, rotation, turns

if reason := unserved(torch.zeros(1)):
    pytest.skip(f"no C: {reason}", allow_module_level=True)


def random(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=dtype)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (7, 5), (16, 32), (33, 70), (192, 48)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_product(rows, inputs, outputs, dtype):
    x, weight, bias = random(rows, inputs), random(outputs, inputs), random(outputs)
    step = Maps(rows, Map(*(t.to(dtype) for t in (x, weight, bias))))
    step()
    exact = F.linear(x, weight, bias)
    torch.testing.assert_close(step.out[0].double(), exact, rtol=0, atol=1e-12 if dtype == torch.float64 else 1e-4)


@pytest.mark.parametrize("activation", ["identity", "silu", "sigmoid"])
@pytest.mark.parametrize("heads", [None, "unit", "norm"])
def test_what_follows_a_product(activation, heads):
    """Each token continues from the past that earlier tokens left."""
    rows, length, inputs, outputs, width = 2, 6, 9, 15, 4
    x, weight, taps = random(rows, length, inputs), random(outputs, inputs), random(outputs, width)
    factor, term, place = random(rows, outputs), random(rows, outputs, seed=1), torch.empty(rows, inputs).double()
    scale = random(5)
    options = {None: {}, "unit": {"unit": 5}, "norm": {"norm": scale, "eps": 0.1}}[heads]
    step = Maps(rows, Map(place, weight, taps=taps, activation=activation, factor=factor, term=term, **options))
    past = random(rows, width - 1, outputs)
    y = torch.cat([past, F.linear(x, weight)], 1)
    y = sum(y[:, lag : lag + length] * taps[:, lag] for lag in range(width))
    y = {"identity": y, "silu": F.silu(y), "sigmoid": torch.sigmoid(y)}[activation]
    if heads == "unit":
        y = F.normalize(y.unflatten(-1, (-1, 5)), dim=-1, eps=1e-6).flatten(-2)
    elif heads == "norm":
        y = F.rms_norm(y.unflatten(-1, (-1, 5)), (5,), scale, 0.1).flatten(-2)
    y = y * factor[:, None] + term[:, None]
    past = past.transpose(0, 1).contiguous().transpose(0, 1)  # strided like a slice of a longer sequence
    for t in range(length):
        place.copy_(x[:, t])
        past = step.follow(0, past)
        step()
        torch.testing.assert_close(step.out[0], y[:, t], rtol=0, atol=1e-12)


def test_maps_in_turn():
    """A later map takes the outputs of an earlier one."""
    x, a, b, c = random(2, 6), random(10, 6), random(10, 6, seed=1), random(6, 10)
    step = Maps(2, Map(x, a, activation="silu"), Map(x, b, factor=0), Map(1, c, term=x))
    step()
    torch.testing.assert_close(step.out[2], x + F.linear(F.silu(x @ a.T) * (x @ b.T), c), rtol=0, atol=1e-12)


@pytest.mark.parametrize("place", [0, 17, 10_000_000])
def test_a_rotation(place):
    heads, width, base = 3, 8, 10000.0
    x, weight = random(2, 5), random(heads * width, 5)
    turn = Rotation(turns(width, base), x)
    step = Maps(2, Map(x, weight, rotation=turn))
    turn.at(place)
    step()
    plain = F.linear(x, weight)
    expected = rotate(
        plain.view(2, 1, heads, width), *rotation(torch.tensor([place]), width, base, torch.float64)
    ).flatten(1)
    torch.testing.assert_close(step.out[0], expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(step.unturned[0], plain, rtol=0, atol=1e-12)


def test_sums():
    a, b, weight, share = random(2, 12), random(2, 12, seed=1), random(12), torch.rand(2, 3, dtype=torch.float64)
    for given, expected in ((weight, a + weight * b), (None, a + b)):
        out, step = add(a, given, b)
        step()
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-15)
    out, step = blend(a, b, share)
    step()
    parts = [x.view(2, 3, 4) for x in (a, b)]
    torch.testing.assert_close(out, torch.lerp(*parts, share[..., None]).flatten(1), rtol=0, atol=1e-14)
    out, step = norm.prepared(a.view(6, 4), weight[:4], 1e-3)
    step()
    torch.testing.assert_close(out, F.rms_norm(a.view(6, 4), (4,), weight[:4], 1e-3), rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    "options",
    [
        {}, {"gates": "hard", "per_layer_gates": True}, {"theta": "free"}, {"momentum": False}, {"forgetting": False},
        {"writes": False}, {"gates": "hard", "theta": "free"},
    ],
    ids=str,
)  # fmt: skip
def test_gates(options):
    """Gates equal the layer's, including clipped and large ones."""
    torch.manual_seed(0)
    config = MemoryConfig(**options)
    gates = MemoryGates(6, 2, config, channels=1).double()
    raw = 8 * random(3, gates.linear.out_features)
    raw[0, 0] = 40.0
    gates.linear.forward = lambda x: raw[:, None]
    expected = gates(torch.empty(3, 1, 6, dtype=torch.float64), torch.empty(3, 1, 2, 3))
    made, step = memory_gates(
        raw.view(3, -1, 3), hard=config.gates == "hard", free=config.theta == "free", momentum=config.momentum,
        forgetting=config.forgetting, bound=gates.bound, stretch=STRETCH,
    )  # fmt: skip
    step(config.writes)
    for ours, theirs in zip(made, expected, strict=True):
        torch.testing.assert_close(ours, theirs.reshape(ours.shape), rtol=1e-13, atol=1e-15)
    if config.gates == "hard":
        assert (made[2] == 0).any() and (made[2] == 1).any()


def test_what_a_step_refuses():
    x, weight = random(2, 6), random(4, 6)
    with pytest.raises(ValueError, match="x: given torch.float32; must be torch.float64"):
        Maps(2, Map(x.float(), weight))
    with pytest.raises(ValueError, match="must be contiguous"):
        Maps(2, Map(x, random(6, 4).T))
