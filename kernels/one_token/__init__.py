"""Prepared steps of one token of each row of a stream on a CPU: calls of C on tensors that stay."""

from titans_pt.kernels.one_token.steps import Map, Maps, Rotation, Step, add, blend, memory_gates, unserved

__all__ = ["Map", "Maps", "Rotation", "Step", "add", "blend", "memory_gates", "unserved"]
