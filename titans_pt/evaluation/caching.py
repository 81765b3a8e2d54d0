"""Memory Caching (arXiv 2602.24281), added to the memories of a trained model or changed there."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from titans_pt.config import Config, ReadCachingConfig
from titans_pt.config.sections import own_section
from titans_pt.errors import UserError
from titans_pt.layers.caching import Caching
from titans_pt.layers.hierarchy import HierarchicalMemory
from titans_pt.layers.memory import NeuralMemory
from titans_pt.runs.loaded import LoadedRun
from titans_pt.streaming import prefill


def with_caches(run: LoadedRun) -> LoadedRun:
    """Return the run with the caches of its evaluation.caching; its model is changed in place.

    Raises:
        UserError: as :func:`cache_memories`.
    """
    given = run.config.evaluation.caching
    return run if given is None else replace(run, caching=cache_memories(run.model, given))


def cache_memories(model: nn.Module, given: ReadCachingConfig) -> ReadCachingConfig:
    """Add caches to every memory of ``model``. From then on, reading a memory reads its caches with it.

    Returns:
        the settings; those not given are as in the training.

    Raises:
        UserError: there is no memory, its chunks do not divide segments, or shares need parameters that it lacks.
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
        trained, config = memory.caching, given
        if trained is not None:
            fields = trained.config.model_dump() | given.model_dump(exclude_unset=True)
            config = own_section(fields, ReadCachingConfig, "evaluation.caching")
        if config.segment % memory.config.chunk_size:
            raise UserError(
                f"evaluation.caching.segment: given {config.segment}; must be a multiple of the run's "
                f"model.memory.chunk_size={memory.config.chunk_size}"
            )
        if config.learned and (trained is None or trained.u is None):
            raise UserError(
                f"evaluation.caching.shares: given {config.shares!r}; must be average, sum or change: the run has not "
                "learned the parameters of the others (model.memory.caching)"
            )
        linear = memory.q.linear
        memory.caching = Caching(linear.in_features, linear.out_features, memory.q.n_heads, config)
        memory.caching.u = trained.u if trained is not None and config.learned else None
    return config


def check_without_prompts(config: Config, reader: str):
    """Raise UserError if ``evaluation.caching.last`` is set for a ``reader`` that has no prompts."""
    caching = config.evaluation.caching
    if caching is not None and caching.last is not None:
        raise UserError(f"evaluation.caching.last: set, but {reader} has no prompts; name a suite that has (--suite "
                        "needle), or leave it out: all tokens read the caches")  # fmt: skip


@contextmanager
def unread(model: nn.Module) -> Iterator[None]:
    """Within the block, memories are read without their caches; caches are still written."""
    found = [module for module in model.modules() if isinstance(module, Caching)]
    for caching in found:
        caching.reads = False
    try:
        yield
    finally:
        for caching in found:
            caching.reads = True


def read_prompt(
    model: nn.Module, ids: Tensor, chunk_tokens: int, state: Any = None, reset: Tensor | None = None,
    last: int | None = None,
) -> tuple[Tensor, Any]:  # fmt: skip
    """Run :func:`titans_pt.streaming.prefill`; only the ``last`` ids read caches, all of them if None."""
    split = 0 if last is None else max(ids.shape[1] - last, 0)
    before, after = (None, None) if reset is None else (reset[:, :split], reset[:, split:])
    if split:
        with unread(model):
            logits, state = prefill(model, ids[:, :split], chunk_tokens, state, before)
    if split < ids.shape[1]:
        logits, state = prefill(model, ids[:, split:], chunk_tokens, state, after)
    return logits, state
