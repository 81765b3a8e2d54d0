"""Tensor x context x data parallelism, put on a model from outside: models and layers do not know of ranks."""

from titans_pt.parallel.context import Context
from titans_pt.parallel.split import TensorParallel
from titans_pt.parallel.topology import RankGroup, Topology

__all__ = ["Context", "RankGroup", "TensorParallel", "Topology"]
