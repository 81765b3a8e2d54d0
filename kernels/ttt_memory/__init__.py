"""TTT's memory: a small network per head, trained by mini-batch gradient descent while the sequence is read."""

from titans_pt.kernels.ttt_memory.dispatch import ttt_memory
from titans_pt.kernels.ttt_memory.state import TTTState

__all__ = ["TTTState", "ttt_memory"]
