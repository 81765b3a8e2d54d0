"""What one token of each row of a stream passes through on a CPU, prepared: calls of C on tensors that stay."""

from titans_pt.kernels.one_token.steps import Map, Maps, Rotation, Step, add, blend, memory_gates, unserved

__all__ = ["Map", "Maps", "Rotation", "Step", "add", "blend", "memory_gates", "unserved"]
