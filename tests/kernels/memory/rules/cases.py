"""Random cases of a rule's memory, computed by the definition and chunkwise."""

import random

import torch

from tests.kernels.memory.test_rule_contract import given, run
from titans_pt.kernels.memory import neural_memory

T = 17


def equals_the_definition(rule, seed: int, backend: str = "chunked", **fixed) -> float:
    """Largest difference of outputs, final state and all gradients, each relative to its largest entry (at least 1).

    Raises:
        ValueError: the backend does not serve the case.
    """
    choose = random.Random(seed)
    channelwise = fixed.pop("channelwise", False)
    depth = fixed.pop("depth", choose.choice([1, 2, 3]))
    options = {
        "chunk_size": choose.choice([1, 3, 5, 8, 32]), "forget_to": choose.choice(["start", "zero"]),
        "save_every": choose.choice([None, 1, 2]), "stale": choose.random() < 0.2,
    } | fixed  # fmt: skip
    tensors, own = given(rule, depth, seed=seed, T=T, D=6, per_layer=seed % 2 == 1, channelwise=channelwise)
    if choose.random() < 0.5:
        rows = 1 if backend == "native" and rule.window > 1 else 2  # C needs equal resets in all rows for windows
        reset = torch.rand(rows, T, generator=torch.Generator().manual_seed(seed)) < 0.15
        options["reset"] = reset.expand(2, T)
    (mine, mine_grads), (other, other_grads) = (
        run(rule, tensors, own, depth, each, **options) for each in (backend, "naive")
    )
    pairs = zip([*mine, *mine_grads], [*other, *other_grads], strict=True)
    return max(((a - b).abs().max() / b.abs().max().clamp(min=1)).item() for a, b in pairs)


def cut_difference(rule, cuts: list[int], chunk_size: int, **options) -> float:
    """Largest difference of outputs and final state between one call and the calls cut at ``cuts``."""
    tensors, own = given(rule, 2, T=T, D=6)
    weights, options = tuple(tensors[6:8]), options | {"norm": tuple(tensors[8:]), "rule": rule}
    options |= {"chunk_size": chunk_size, "output_final_state": True}
    reset = torch.rand(2, T, generator=torch.Generator().manual_seed(1)) < 0.15

    def call(part: slice, state=None):
        inputs = (x[:, part] for x in tensors[:6])
        own_here = tuple(gate[:, part] for gate in own)
        return neural_memory(*inputs, weights, own=own_here, reset=reset[:, part], initial_state=state, **options)

    whole, end = call(slice(None))
    pieces, state = [], None
    for a, b in zip([0, *cuts], [*cuts, T], strict=True):
        out, state = call(slice(a, b), state)
        pieces.append(out)
    assert torch.equal(state.offset, end.offset)
    states = ((*s.weights, *s.momentum, *s.chunk_weights) for s in (state, end))
    pairs = [(torch.cat(pieces, 1), whole), *zip(*states, strict=True)]
    return max((a - b).abs().max().item() for a, b in pairs)
