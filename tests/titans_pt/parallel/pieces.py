"""Models over sequences that the ranks of a context group share, against the same models in one process, in float64.

    torchrun --nproc_per_node 3 -m tests.titans_pt.parallel.pieces MIXER ...

The first rank prints {mixer: the largest difference of its logits and gradients} as JSON.
"""

import json
import sys

import torch
import torch.distributed as dist

from tests.mixers import small_model
from titans_pt.parallel import Context, RankGroup

T = 42  # three pieces of 14: cuts inside chunks of 4, segments of 8 and windows of 6
STARTS = ((0, 9, 10, 30), (13, 14))


def difference(mixer: str, group: RankGroup, documents: bool, recomputed: bool) -> float:
    """Of this rank's logits, and of the gradients summed over ranks."""
    model = small_model([mixer]).train()
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 50, (2, T), generator=draw)
    upstream = torch.randn(2, T, 52, generator=draw, dtype=torch.float64)
    reset = torch.zeros(2, T, dtype=torch.bool)
    for row, starts in enumerate(STARTS):
        reset[row, list(starts)] = True

    def run(piece: slice):
        model.zero_grad()
        logits, _ = model(
            ids[:, piece], reset=reset[:, piece] if documents else None, output_final_state=False
        )
        (logits * upstream[:, piece]).sum().backward()
        return logits.detach(), {name: p.grad for name, p in model.named_parameters()}

    whole, expected = run(slice(0, T))
    model.blocks.set_neighbours(Context(group, group.group))
    model.blocks.set_activation_checkpointing(recomputed)
    length = T // group.size
    piece = slice(group.rank * length, (group.rank + 1) * length)
    found, grads = run(piece)
    worst = [(found - whole[:, piece]).abs().max()]
    for name, p in expected.items():
        p = torch.zeros_like(found) if p is None else p
        total = group.all_reduce(torch.zeros_like(p) if grads[name] is None else grads[name])
        worst.append((total - p).abs().max() / p.abs().max().clamp(min=1))
    return float(group.all_reduce(torch.stack(worst).max(), dist.ReduceOp.MAX))


def main(names: list[str]):
    dist.init_process_group("gloo")
    group = RankGroup(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
    found = {
        name: max(difference(name, group, False, True), difference(name, group, True, False)) for name in names
    }
    if group.rank == 0:
        print(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
