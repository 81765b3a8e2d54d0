"""The neural long-term memory: a small MLP per head whose weights are trained while the sequence is read."""

from kernels.memory.dispatch import memory_read, neural_memory
from kernels.memory.state import MemoryState

__all__ = ["MemoryState", "memory_read", "neural_memory"]
