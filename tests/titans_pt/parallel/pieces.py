"""Models whose sequences are split over context ranks, and heads over tensor ranks, against the same models in one
process, in float64.

    torchrun --nproc_per_node 6 -m tests.titans_pt.parallel.pieces TENSOR CONTEXT MIXER ...

A mixer named NAME+CHANGE has another memory; see CHANGES.
The first rank prints {mixer: the largest difference of logits and gradients} as JSON.
"""

import json
import sys

import torch
import torch.distributed as dist

from tests.helpers.mixers import small_model
from titans_pt.parallel import Context, TensorParallel, Topology

T = 42  # three pieces of 14: cuts inside chunks of 4, segments of 8 and windows of 6
CHANGES = {
    "caching": {"caching": {"segment": 4, "slots": 2}},
    "omega": {"rule": "omega", "omega": {"window": 6}},
    "muon": {"rule": "muon"},
}
"""Settings of the memory: cached memories, a state with a window longer than a chunk, steps at chunk ends."""
STARTS = ((0, 9, 10, 30), (13, 14))


def difference(mixer: str, grid: Topology) -> float:
    """Largest difference over ranks of logits, and of gradients summed over context ranks.

    The test uses documents and activation checkpointing.
    """
    name, _, change = mixer.partition("+")
    memory = {"memory": {"chunk_size": 4, "expansion": 2} | CHANGES[change]} if change else {}
    model = small_model([name], **memory).train()
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 50, (2, T), generator=draw)
    upstream = torch.randn(2, T, 52, generator=draw, dtype=torch.float64)
    reset = torch.zeros(2, T, dtype=torch.bool)
    for row, starts in enumerate(STARTS):
        reset[row, list(starts)] = True

    def run(piece: slice, upstream: torch.Tensor):
        model.zero_grad()
        logits, _ = model(ids[:, piece], reset=reset[:, piece], output_final_state=False)
        (logits * upstream[:, piece]).sum().backward()
        return logits.detach(), {name: p.grad for name, p in model.named_parameters()}

    whole, expected = run(slice(0, T), upstream)
    split = TensorParallel(model, grid.tensor)
    model.blocks.put_on("context", Context(grid.context, grid.host_context))
    model.blocks.set_activation_checkpointing(True)
    length = T // grid.context.size
    piece = slice(grid.context.rank * length, (grid.context.rank + 1) * length)
    found, grads = run(piece, grid.tensor.part(upstream, -1))
    worst = [(found - grid.tensor.part(whole, -1)[:, piece]).abs().max()]
    for name, gradient in grads.items():
        own = split.part(name, expected[name])
        worst.append((grid.context.all_reduce(gradient) - own).abs().max() / own.abs().max().clamp(min=1))
    worst = torch.stack(worst).max()
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)


def main(tensor: str, context: str, *names: str):
    dist.init_process_group("gloo")
    grid = Topology(int(tensor), int(context), dist.get_rank(), dist.get_world_size())
    found = {name: difference(name, grid) for name in names}
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
