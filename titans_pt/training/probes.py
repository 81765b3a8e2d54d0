"""Statistics of the memory on logged steps, collected with hooks that leave the model's code unchanged."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from titans_pt.kernels.memory import MemoryState
from titans_pt.layers.memory_gates import Gates
from titans_pt.layers.memory_observer import observe_memories, without_prefixes
from titans_pt.layers.state import find
from titans_pt.parallel import RankGroup
from titans_pt.tasks.base import backbone_of

SURPRISE_TOKENS = 16
ALONE = RankGroup()
AT_THE_END = ("memory_norm", "momentum_norm", "surprise")
"""Figures of a sequence's end, which the last context rank reads."""


@contextmanager
def memory_probe(
    model: nn.Module, tensor: RankGroup = ALONE, context: RankGroup = ALONE
) -> Iterator[Callable[[], dict[str, float]]]:
    """Observes the forward passes inside the ``with``; yields a function that returns the means over these passes.

    - theta, eta, alpha, and the memory rule's own gates: means over layers, heads and tokens, without persistent
      tokens.
    - memory_norm, momentum_norm: mean Frobenius norm of a head's weight matrix M_t and of its momentum S_t after the
      last token.
    - surprise: mean norm of a head's inner gradient over the last SURPRISE_TOKENS tokens of the first sample, or over
      the last piece if that is shorter (parallel.context, train.wavefront). It needs a second computation, which only
      the first forward pass gets.

    Without memory layers the result is empty.

    Args:
        tensor, context: ranks that share the model's heads, and the sequences. The function is collective among them,
            and its means are over the heads and tokens of all.
    """
    seen: list[tuple[str, Tensor, int]] = []

    def note(name: str, value: Tensor):
        seen.append((name, value.detach().double().sum(), value.numel()))

    def gates(module, _args, output):
        for name, value in zip(("theta", "eta", "alpha", *module.rule.gates), output, strict=True):
            note(name, value)

    def states(_module, _args, output):
        for state in find(output[1], MemoryState):
            for name, matrices in (("memory_norm", state.weights), ("momentum_norm", state.momentum)):
                for matrix in matrices:
                    note(name, matrix.detach().float().norm(dim=(-2, -1)))

    def surprise(_module, _args, _output):
        for observer in observers.values():
            note("surprise", observer.sample(SURPRISE_TOKENS).surprise.mean((0, 1)))
        observing.close()
        first.remove()

    def means() -> dict[str, float]:
        if not seen:
            return {}
        names = list(dict.fromkeys(name for name, _, _ in seen))
        device = seen[0][1].device  # surprise is on the CPU
        table = torch.zeros(len(names), 2, dtype=torch.float64, device=device)
        for name, total, count in seen:
            table[names.index(name)] += torch.stack([total.to(device), total.new_tensor(count, device=device)])
        if context.rank + 1 < context.size:
            table[[name in AT_THE_END for name in names]] = 0
        table = context.all_reduce(tensor.all_reduce(table))
        return {name: total / count for name, (total, count) in zip(names, table.tolist(), strict=True)}

    observing = ExitStack()
    observers = observing.enter_context(observe_memories(model, newest=True))
    first = model.register_forward_hook(surprise)
    handles = [m.register_forward_hook(gates) for m in model.modules() if isinstance(m, Gates)]
    handles.append(backbone_of(model).register_forward_hook(states))
    try:
        with without_prefixes(model, seen):
            yield means
    finally:
        observing.close()
        for handle in (first, *handles):
            handle.remove()
