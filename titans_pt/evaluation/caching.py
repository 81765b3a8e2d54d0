"""Memory Caching put on the memories of a trained model (arXiv 2602.24281), without parameters."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from titans_pt.config import CachingConfig
from titans_pt.errors import UserError
from titans_pt.layers.caching import Caching
from titans_pt.layers.hierarchy import HierarchicalMemory
from titans_pt.layers.memory import NeuralMemory


def cache_memories(model: nn.Module, config: CachingConfig):
    """Puts caches on every memory of ``model``, which is read together with them from now on.

    Raises:
        UserError: there is no memory, it has caches already, or its chunks do not divide segments.
    """
    memories = [module for module in model.modules() if isinstance(module, (NeuralMemory, HierarchicalMemory))]
    if not memories:
        raise UserError("evaluation.caching: set, but the run has no neural memory (model.mixers); leave it out")
    for memory in memories:
        if isinstance(memory, HierarchicalMemory):
            raise UserError(
                "evaluation.caching: set; must be null for a run with model.memory.hierarchy, whose memories begin "
                "again by themselves"
            )
        if memory.caching is not None:
            raise UserError(
                "evaluation.caching: set; must be null for a run that was trained with model.memory.caching; "
                "leave it out"
            )
        if config.segment % memory.config.chunk_size:
            raise UserError(
                f"evaluation.caching.segment: given {config.segment}; must be a multiple of the run's "
                f"model.memory.chunk_size={memory.config.chunk_size}"
            )
    for memory in memories:
        assert isinstance(memory, NeuralMemory)
        memory.caching = Caching(memory.q.linear.in_features, memory.q.n_heads, config)


@contextmanager
def unread(model: nn.Module) -> Iterator[None]:
    """Inside, memories answer alone; what they would have cached is cached."""
    found = [module for module in model.modules() if isinstance(module, Caching)]
    for caching in found:
        caching.reads = False
    try:
        yield
    finally:
        for caching in found:
            caching.reads = True
