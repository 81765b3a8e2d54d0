"""The linear memory: a matrix per head, written with outer products, that decays and may correct itself."""

from titans_pt.kernels.linear_memory.dispatch import linear_memory, unserved

__all__ = ["linear_memory", "unserved"]
