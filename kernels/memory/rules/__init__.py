"""What a memory makes of the error at a token: one rule per file, found by name; base.py has their contract."""

from titans_pt.kernels.memory.rules.base import RULES, Own, OwnGate, Rule
from titans_pt.kernels.memory.rules.titans import TITANS, Titans

__all__ = ["RULES", "TITANS", "Own", "OwnGate", "Rule", "Titans"]
