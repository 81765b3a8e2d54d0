"""Prepared steps of one token per row of a stream on a CPU: C functions on tensors at fixed addresses."""

from titans_pt.kernels.one_token.steps import Map, Maps, Rotation, Step, add, blend, memory_gates, unserved

__all__ = ["Map", "Maps", "Rotation", "Step", "add", "blend", "memory_gates", "unserved"]
