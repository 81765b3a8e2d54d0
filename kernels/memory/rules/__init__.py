"""Memory rules, which turn a token's error into a write: one per file, found by name; base.py has their contract."""

from titans_pt.kernels.memory.rules.base import RULES, Own, OwnGate, Rule
from titans_pt.kernels.memory.rules.titans import TITANS, Titans

__all__ = ["RULES", "TITANS", "Own", "OwnGate", "Rule", "Titans"]
