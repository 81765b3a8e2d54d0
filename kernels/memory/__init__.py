"""The neural long-term memory: a small MLP per head whose weights are trained while the sequence is read."""

from titans_pt.kernels.memory.dispatch import memory_read, neural_memory, self_modifying_memory, unserved
from titans_pt.kernels.memory.network import NetworkShape
from titans_pt.kernels.memory.state import MemoryState
from titans_pt.kernels.memory.trace import Trace, memory_trace, self_modifying_trace

__all__ = [
    "MemoryState",
    "NetworkShape",
    "Trace",
    "memory_read",
    "memory_trace",
    "neural_memory",
    "self_modifying_memory",
    "self_modifying_trace",
    "unserved",
]
