"""Linear memory: a matrix per head, written with outer products, with optional decay and delta rule."""

from titans_pt.kernels.linear_memory.dispatch import linear_memory, unserved

__all__ = ["linear_memory", "unserved"]
