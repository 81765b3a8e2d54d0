"""Statistics of the memory on logged steps, collected with hooks that leave the model's code unchanged."""

from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from titans_pt.kernels.memory import MemoryState
from titans_pt.layers.memory_gates import Gates
from titans_pt.layers.memory_observer import observe_memories
from titans_pt.layers.state import find
from titans_pt.tasks.base import backbone_of

SURPRISE_TOKENS = 16


@contextmanager
def memory_probe(model: nn.Module):
    """Observes the forward passes inside the ``with``; yields a function that returns the means over these passes.

    - theta, eta, alpha, and the memory rule's own gates: means over layers, heads and tokens.
    - memory_norm, momentum_norm: mean Frobenius norm of a head's weight matrix M_t and of its momentum S_t after the
      last token.
    - surprise: mean norm of a head's inner gradient over the last SURPRISE_TOKENS tokens of the first sample. It needs
      a second computation, which only the first forward pass gets.

    All means are over this rank's own heads. Without memory layers the result is empty.
    """
    seen: dict[str, list[torch.Tensor]] = {}

    def note(name: str, value: torch.Tensor):
        seen.setdefault(name, []).append(value.detach().float().mean())

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
            note("surprise", observer.sample(SURPRISE_TOKENS).surprise)
        observing.close()
        first.remove()

    observing = ExitStack()
    observers = observing.enter_context(observe_memories(model, newest=True))
    first = model.register_forward_hook(surprise)
    handles = [m.register_forward_hook(gates) for m in model.modules() if isinstance(m, Gates)]
    handles.append(backbone_of(model).register_forward_hook(states))
    try:
        yield lambda: {name: float(torch.stack(values).mean()) for name, values in seen.items()}
    finally:
        observing.close()
        for handle in (first, *handles):
            handle.remove()
