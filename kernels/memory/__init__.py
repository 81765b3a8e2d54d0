"""The neural long-term memory: a small MLP per head whose weights are trained while the sequence is read."""

from kernels.memory.dispatch import memory_read, neural_memory
from kernels.memory.state import MemoryState
from kernels.memory.trace import Trace, memory_trace

__all__ = ["MemoryState", "Trace", "memory_read", "memory_trace", "neural_memory"]
